"""The results of a scaling study: read from the folders of its settings and joined into one table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from yalis import result_rows, results
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.launch.launchers import SRUN
from yalis.results import Result
from yalis.study.requests import ThroughputPlan, digest_of, read_dataset
from yalis.study.scaling.settings import ENDED, LOG, ScalingPlan, Setting, command_line
from yalis.study.topology import crowding

Row = dict[str, Any]


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
    if topology.get("launcher") == SRUN.name:
        return wanted
    return min(wanted, result.host["cores"] * len(topology["ranks_per_host"]))


def failed(result: Result) -> list[Row]:
    return [row for row in result.rows if row["status"] != "ok"]
