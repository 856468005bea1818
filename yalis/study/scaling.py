"""The scaling study: one job over numbers of ranks, ways to split the model and all-reduces.

Every setting is a `yalis bench throughput` that leaves its result in a folder of its own; scaling_jobs.py starts them.
What is there is not run again, so a study that was stopped goes on, and jobs may come back in any order.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from yalis import result_rows, results
from yalis.comm.choose import check_name
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.results import Result
from yalis.study.jobs import ThroughputPlan, digest_of, read_dataset

Row = dict[str, Any]

FAMILIES = ("tp", "grid", "pp", "hybrid", "dp")
ONE = "one rank"
LOG = "log.txt"  # what a setting's command said, beside its result
ENDED = "ended with exit status"  # what is written there of one that failed without a word


@dataclass(frozen=True)
class Setting:
    split: Split
    allreduce: str = ""  # empty with one rank, which has nobody to sum with

    @property
    def ranks(self) -> int:
        return self.split.size

    @property
    def scheme(self) -> str:
        """Which of the families it belongs to."""
        split = self.split
        if split.size == 1:
            return ONE
        if split.replicas > 1:
            return "dp"
        if split.stages > 1:
            return "hybrid" if split.per_stage > 1 else "pp"
        return "grid" if split.cols > 1 else "tp"

    @property
    def label(self) -> str:
        """ "tp2x2-pp2", the way a scheme is given too."""
        split = self.split
        grid = str(split.rows) if split.cols == 1 else f"{split.rows}x{split.cols}"
        parts = [f"tp{grid}"] if split.per_stage > 1 else []
        parts += [f"{name}{count}" for name, count in (("pp", split.stages), ("dp", split.replicas)) if count > 1]
        return "-".join(parts) or "tp1"

    @property
    def folder(self) -> str:
        return f"{self.label}-{self.allreduce}" if self.allreduce else self.label

    def apply(self, config: EngineConfig) -> EngineConfig:
        split, allreduce = self.split, self.allreduce or config.allreduce
        return replace(config, tp=(split.rows, split.cols), pp=split.stages, dp=split.replicas, allreduce=allreduce)


@dataclass(frozen=True)
class ScalingPlan:
    folder: Path  # of all results
    ranks: tuple[int, ...] = (1, 2, 4)
    schemes: tuple[str, ...] = ("tp", "pp")
    allreduces: tuple[str, ...] = ("auto",)
    node_ranks: int = 4  # ranks that a node holds: where a hybrid goes from tp to pp
    minutes: float = 30.0  # that a setting may take
    work: ThroughputPlan = field(default_factory=ThroughputPlan)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise YalisError("ranks has no number of at least 1; give for example --ranks 1,2,4")
        if not self.schemes or not self.allreduces:
            raise YalisError("there is no scheme or no all-reduce; give for example --schemes tp,pp --allreduce torch")
        if self.node_ranks < 1:
            raise YalisError(f"a node holds {self.node_ranks} ranks; give --tasks-per-node a number of at least 1")
        if not 0 < self.minutes < math.inf:
            raise YalisError(f"minutes is {self.minutes:g}; give a number above 0")
        for name in self.allreduces:
            check_name(name)


def list_settings(plan: ScalingPlan) -> list[Setting]:
    """Every setting once, fewer ranks first."""
    settings: dict[Setting, None] = {}
    unused = set(plan.schemes)
    for ranks in sorted(set(plan.ranks)):
        for scheme in plan.schemes:
            split = _split(scheme, ranks, plan.node_ranks)
            if split is None:
                continue
            unused.discard(scheme)
            for allreduce in plan.allreduces if ranks > 1 else ("",):
                settings.setdefault(Setting(split, allreduce))
    if unused:
        raise YalisError(
            f"scheme {sorted(unused)[0]!r} is none of {', '.join(map(str, plan.ranks))} ranks; give more --ranks, or "
            "leave it out"
        )
    return list(settings)


def _split(scheme: str, ranks: int, node_ranks: int) -> Split | None:
    """What a scheme means for so many ranks; None where it means nothing."""
    if scheme not in FAMILIES:
        split = _read_split(scheme)
        return split if split.size == ranks else None
    if ranks == 1:
        return Split()
    if scheme == "tp":
        return Split(rows=ranks)
    if scheme == "pp":
        return Split(stages=ranks)
    if scheme == "dp":
        return Split(replicas=ranks)
    if scheme == "hybrid":  # tp inside a node and pp between nodes; two stages on one node
        per_stage = node_ranks if node_ranks < ranks else ranks // 2
        return Split(rows=per_stage, stages=ranks // per_stage) if per_stage > 1 and ranks % per_stage == 0 else None
    cols = max(col for col in range(1, math.isqrt(ranks) + 1) if ranks % col == 0)  # the squarest grid
    return Split(ranks // cols, cols) if cols > 1 else None


def _read_split(scheme: str) -> Split:
    """ "2x2", "tp4", "tp2-pp2"."""
    counts: dict[str, int] = {}
    for part in scheme.lower().split("-"):
        found = re.fullmatch(r"(?:tp)?([1-9]\d*)x([1-9]\d*)|(tp|pp|dp)([1-9]\d*)", part)
        if found is None or counts.keys() & (new := _degrees(found)).keys():
            raise YalisError(
                f"scheme {scheme!r} is not known; accepted: {', '.join(FAMILIES)}, or one split such as 2x2, tp4 or "
                "tp2-pp2"
            )
        counts |= new
    return Split(**counts)


def _degrees(found: re.Match[str]) -> dict[str, int]:
    rows, cols, name, count = found.groups()
    if name is None:
        return {"rows": int(rows), "cols": int(cols)}
    return {{"tp": "rows", "pp": "stages", "dp": "replicas"}[name]: int(count)}


# What is run


def command_line(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> str:
    """The setting's command, wherever it is started from: the first line of its log."""
    return shlex.join(["yalis", *command_words(config, replace(plan, folder=plan.folder.resolve()), setting)])


def command_words(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> list[str]:
    """`yalis` with these words measures the setting and leaves its result in its folder."""
    work = plan.work
    words = ["bench", "throughput"]
    for one in work.workloads:
        words += ["--workload", str(one)]
    words += _flags(work, without=("workloads", "peer"))
    words += _flags(setting.apply(config))
    if config.prefix_reuse:  # which is off in throughput unless asked for
        words.append("--prefix-reuse")
    return [*words, "--out", str(plan.folder / setting.folder)]


def _flags(values: Any, without: tuple[str, ...] = ()) -> list[str]:
    """The fields of a dataclass that are not at their default, as flags."""
    words: list[str] = []
    for one in fields(values):
        value, flag = getattr(values, one.name), one.name.replace("_", "-")
        if one.name in without or value == one.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", "x".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


# What came back


def find_result(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> Result | None:
    """The newest result in the setting's folder, which must be of the same work and engine."""
    newest = _newest(plan.folder / setting.folder)
    if newest is None:
        return None
    path, result = newest
    _check_same(path, result.parameters, asdict(plan.work))
    _check_dataset(path, result.parameters, plan.work)
    asked = asdict(setting.apply(config))
    if config.block_size is None:
        del asked["block_size"]  # the ranks' device had the choice, which may not be here
    _check_same(path, result.parameters["engine"], asked)
    return result


def _newest(folder: Path) -> tuple[Path, Result] | None:
    found = []
    for path in folder.glob("*.json"):
        try:
            found.append((path, results.read(path)))
        except YalisError as error:
            raise YalisError(f"{error}; or remove it, and the same command measures it again") from error
    own = [(path, result) for path, result in found if result.kind == "throughput"]
    return max(own, key=lambda pair: results.age(*pair), default=None)


def _check_same(path: Path, told: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a result whose work or engine is not what is asked; what an older yalis did not tell is at its default."""
    for name, value in json.loads(json.dumps(asked)).items():
        if told.get(name, value) != value:
            raise YalisError(
                f"{path} is of another study: its {name} is {told[name]!r} and not {value!r}; give another --out, or "
                "remove it"
            )


def _check_dataset(path: Path, told: dict[str, Any], work: ThroughputPlan) -> None:
    """Refuse a result of other lines than the dataset has now. Where it is not at hand, results are still compared."""
    if work.dataset is None or not (file := Path(work.dataset)).exists():
        return
    if told.get("prompts_digest") != digest_of(read_dataset(file, work.requests)):
        raise YalisError(
            f"{path} is of other requests than {file} holds now; give another --out, or remove it, and the same "
            "command measures it again"
        )


def _check_same_prompts(measured: Sequence[Result], plan: ScalingPlan) -> str | None:
    """The digest that all results share. An older yalis told none, which does where a seed says what was drawn."""
    digests = {result.parameters.get("prompts_digest") for result in measured}
    if plan.work.dataset is None:
        digests.discard(None)
    if len(digests) > 1:
        raise YalisError(
            f"the results in {plan.folder} are of different requests, and no ratio joins those; give another --out"
        )
    return next(iter(digests), None)


def gather(config: EngineConfig, plan: ScalingPlan, settings: Sequence[Setting], command: str) -> Result:
    """All that came back, as one result; settings without one are rows that say why."""
    found = {setting: find_result(config, plan, setting) for setting in settings}
    measured = {setting: result for setting, result in found.items() if result is not None}
    digest = _check_same_prompts(list(measured.values()), plan)
    machines: list[dict[str, Any]] = []
    for result in measured.values():
        if (machine := results.machine(result)) not in machines:
            machines.append(machine)
    rows = [_row(config, plan, setting, found[setting], machines) for setting in settings]
    bases = _add_ratios(rows, measured, settings)
    parameters = {
        **{name: value for name, value in asdict(plan).items() if name not in ("folder", "work")},
        **asdict(plan.work),
        "engine": asdict(config),
        "machines": machines,
        "baselines": bases,
        "prompts_digest": digest,
    }
    notes = list(_notes(rows, measured, machines))
    if not measured:
        return results.new("scaling", parameters, rows, command, [], notes)
    first = next(iter(measured.values()))  # that is where it was measured, wherever it is gathered
    parameters["dtype"] = first.parameters["dtype"]
    result = results.new("scaling", parameters, rows, command, first.devices, notes)
    return replace(result, host=first.host, versions=first.versions, revision=first.revision)


def _row(
    config: EngineConfig, plan: ScalingPlan, setting: Setting, result: Result | None, machines: list[dict[str, Any]]
) -> Row:
    row: Row = dict.fromkeys(result_rows.columns("scaling"))
    row.update(ranks=setting.ranks, scheme=setting.scheme, split=setting.label, allreduce=setting.allreduce)
    row.update(crowded="", file="")
    if result is None:
        row["status"] = _why_missing(plan.folder / setting.folder / LOG, command_line(config, plan, setting))
        return row
    measured = result.rows[0]
    for name in ("status", "seconds", "seconds_low", "seconds_high", "tokens_per_s", "first_token_ms", "token_ms"):
        row[name] = measured[name]
    row["machine"] = 1 + machines.index(results.machine(result))
    row["crowded"] = crowding(result)
    if newest := _newest(plan.folder / setting.folder):
        row["file"] = str(newest[0].relative_to(plan.folder))
    if result.topology is not None:
        row["hosts"] = len(result.topology["ranks_per_host"])
    return row


def _why_missing(log: Path, command: str) -> str:
    """The error a setting's command ended with, or that there was none; a log of another command tells nothing."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "no result yet"
    if not text.startswith(f"{command}\n"):
        return "no result yet"
    lines = [line.strip() for line in text.removeprefix(command).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"yalis: (internal )?error: ", line)]
    if errors:
        return errors[-1].partition("error: ")[2]
    if lines and lines[-1].startswith(ENDED):
        return ": ".join([lines[-1], *lines[-2:-1]])
    return f"no result yet; its log ends: {lines[-1]}" if lines else "no result yet"


def crowding(result: Result) -> str:
    """How ranks share what each should have for itself; empty where they do not."""
    topology = result.topology or results.topology([0])
    most = max(topology["ranks_per_host"])
    if result.devices[0]["type"] == "cpu":
        cores = result.host["cores"]
        # Slurm gives every rank cores of its own, and the first sees only those.
        return f"{most} ranks on {cores} cores" if most > cores and topology.get("launcher") != "srun" else ""
    shared = min(most, result.parameters["engine"]["ranks_per_gpu"])
    return f"{shared} ranks on a GPU" if shared > 1 else ""


def _add_ratios(rows: list[Row], measured: dict[Setting, Result], settings: Sequence[Setting]) -> dict[str, str]:
    """Speed-up, efficiency and agreement with the baseline of the same machine; returns those by machine.

    A machine's baseline is its quickest setting with the fewest ranks. Machines are never mixed in a ratio.
    """
    bases: dict[str, str] = {}
    pairs = [(setting, row) for setting, row in zip(settings, rows, strict=True) if row["status"] == "ok"]
    for machine in sorted({row["machine"] for _, row in pairs}):
        here = [(setting, row) for setting, row in pairs if row["machine"] == machine]
        setting, base = min(here, key=lambda pair: (pair[1]["ranks"], pair[1]["seconds"]))
        bases[str(machine)] = setting.folder
        right = measured[setting].parameters["answers"]
        exact = measured[setting].parameters["dtype"] == "float32"
        for other, row in here:
            answers = measured[other].parameters["answers"]
            equal = sum(a == b for a, b in zip(right, answers, strict=False))
            row["same_tokens"] = equal / max(len(right), len(answers))
            if exact and row["same_tokens"] < 1:
                share = f"{row['same_tokens']:.0%} of its answers"
                row["status"] = f"wrong tokens: {share} equal those of {setting.folder}"
                continue
            row["speedup"] = base["seconds"] / row["seconds"]
            row["efficiency"] = row["speedup"] * base["ranks"] / row["ranks"]
    return bases


def _notes(rows: list[Row], measured: dict[Setting, Result], machines: list[dict[str, Any]]) -> Iterator[str]:
    for crowded in dict.fromkeys(row["crowded"] for row in rows if row["crowded"]):
        yield f"{crowded}: these rows show what the split costs, not how it scales"
    if counts := _no_more_cores(measured):
        told = ", ".join(map(str, counts))
        yield f"one rank had all the cores that {told} ranks had, so there was no speed-up to gain"
    if len(machines) > 1:
        yield f"measured on {len(machines)} kinds of machine; speed-ups are within each"
    revisions = {str(result.revision)[:10] for result in measured.values()}
    if len(revisions) > 1:
        yield f"measured at {len(revisions)} revisions: {', '.join(sorted(revisions))}"
    torches = {str(result.versions.get("torch")) for result in measured.values()}
    if len(torches) > 1:
        yield f"measured with {len(torches)} versions of torch: {', '.join(sorted(torches))}"


def _no_more_cores(measured: dict[Setting, Result]) -> list[int]:
    """Numbers of CPU ranks that only share out the cores that a single rank used on the same kind of machine."""
    on_cpus = {setting: result for setting, result in measured.items() if result.devices[0]["type"] == "cpu"}
    alone = [(results.machine(result), _cores(result)) for setting, result in on_cpus.items() if setting.ranks == 1]
    counts = set()
    for setting, result in on_cpus.items():
        machine, cores = results.machine(result), _cores(result)
        if setting.ranks > 1 and any(machine == own and cores <= had for own, had in alone):
            counts.add(setting.ranks)
    return sorted(counts)


def _cores(result: Result) -> int:
    """Cores that the ranks of a CPU job can use together."""
    topology = result.topology or results.topology([0])
    wanted: int = topology["ranks"] * result.devices[0].get("threads", 1)
    if topology.get("launcher") == "srun":
        return wanted
    return min(wanted, result.host["cores"] * len(topology["ranks_per_host"]))


def failed(result: Result) -> list[Row]:
    return [row for row in result.rows if row["status"] != "ok"]
