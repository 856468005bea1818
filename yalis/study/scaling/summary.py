"""The results of a scaling study: read from the folders of its settings and joined into one table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.launch.launchers import SRUN
from yalis.study import results
from yalis.study.requests import ThroughputPlan, digest_requests, read_dataset
from yalis.study.results import Result, StoredResult
from yalis.study.scaling.settings import EXITED, LOG, ScalingPlan, Setting, command_line

Row = dict[str, Any]


def find_result(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> Result | None:
    """Return the newest result in a setting's folder, or None. Refuse one of another workload or engine config."""
    newest = _newest(plan.folder / setting.folder)
    if newest is None:
        return None
    path, result = newest.path, newest.result
    _check_same(path, result.parameters, asdict(plan.throughput))
    _check_dataset(path, result.parameters, plan.throughput)
    expected = asdict(setting.apply(config))
    if config.block_size is None:
        del expected["block_size"]  # its default depends on the device that was measured
    _check_same(path, result.parameters["engine"], expected)
    return result


def _newest(folder: Path) -> StoredResult | None:
    readable = []
    for path in folder.glob("*.json"):
        try:
            readable.append(StoredResult(path, results.read(path)))
        except YalisError as error:
            raise YalisError(f"{error}; or remove the file, and the same command measures the setting again") from error
    candidates = [stored for stored in readable if stored.result.kind == "throughput"]
    return max(candidates, key=results.age_key, default=None)


def _check_same(path: Path, measured: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a result with other parameters. Those that an older version did not write count as equal."""
    for name, value in json.loads(json.dumps(expected)).items():
        if measured.get(name, value) != value:
            raise YalisError(
                f"{path} belongs to another study: its {name} is {measured[name]!r}, not {value!r}; give another "
                "--out, or remove the file"
            )


def _check_dataset(path: Path, measured: dict[str, Any], throughput: ThroughputPlan) -> None:
    """Refuse a result if the dataset has changed since. Without the dataset at hand, this cannot be checked."""
    if throughput.dataset is None or not (file := Path(throughput.dataset)).exists():
        return
    if measured.get("prompts_digest") != digest_requests(read_dataset(file, throughput.requests)):
        raise YalisError(
            f"{path} was measured with other requests than {file} has now; give another --out, or remove the file, "
            "and the same command measures the setting again"
        )


def _check_same_prompts(measured: Sequence[Result], plan: ScalingPlan) -> str | None:
    """Return the digest that all results share. Older results have none, which is accepted for seeded prompts."""
    digests = {result.parameters.get("prompts_digest") for result in measured}
    if plan.throughput.dataset is None:
        digests.discard(None)
    if len(digests) > 1:
        raise YalisError(
            f"the results in {plan.folder} have different requests, so they cannot be compared; give another --out"
        )
    return next(iter(digests), None)


def gather(config: EngineConfig, plan: ScalingPlan, settings: Sequence[Setting], command: str) -> Result:
    """Join the results of all settings into one. A setting without a result gets a row that says why."""
    by_setting = {setting: find_result(config, plan, setting) for setting in settings}
    measured = {setting: result for setting, result in by_setting.items() if result is not None}
    digest = _check_same_prompts(list(measured.values()), plan)
    machines: list[dict[str, Any]] = []
    for result in measured.values():
        if (machine := results.machine_of(result)) not in machines:
            machines.append(machine)
    rows = [_row(config, plan, setting, by_setting[setting], machines) for setting in settings]
    baselines = _add_ratios(rows, measured, settings)
    parameters = {
        **{name: value for name, value in asdict(plan).items() if name not in ("folder", "throughput")},
        **asdict(plan.throughput),
        "engine": asdict(config),
        "machines": machines,
        "baselines": baselines,
        "prompts_digest": digest,
    }
    notes = list(_notes(rows, measured, machines))
    if not measured:
        return results.new("scaling", parameters, rows, command, [], notes)
    first = next(iter(measured.values()))  # host and versions are those of the measurement, not of this process
    parameters["dtype"] = first.parameters["dtype"]
    result = results.new("scaling", parameters, rows, command, first.devices, notes)
    return replace(result, host=first.host, versions=first.versions, revision=first.revision)


def _row(
    config: EngineConfig, plan: ScalingPlan, setting: Setting, result: Result | None, machines: list[dict[str, Any]]
) -> Row:
    row: Row = results.empty_row("scaling")
    row.update(ranks=setting.ranks, scheme=setting.scheme, split=setting.label, allreduce=setting.allreduce)
    row.update(oversubscribed="", file="")
    if result is None:
        row["status"] = _why_missing(plan.folder / setting.folder / LOG, command_line(config, plan, setting))
        return row
    measured = result.rows[0]
    for name in ("status", "seconds", "seconds_low", "seconds_high", "tokens_per_s", "first_token_ms", "token_ms"):
        row[name] = measured[name]
    row["machine"] = 1 + machines.index(results.machine_of(result))
    row["oversubscribed"] = results.describe_oversubscription(result)
    if newest := _newest(plan.folder / setting.folder):
        row["file"] = str(newest.path.relative_to(plan.folder))
    if result.topology is not None:
        row["hosts"] = len(result.topology["ranks_per_host"])
    return row


def _why_missing(log: Path, command: str) -> str:
    """Return the error at the end of a setting's log. A log of another command is ignored."""
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
    if lines and lines[-1].startswith(EXITED):
        return ": ".join([lines[-1], *lines[-2:-1]])
    return f"no result yet; the log ends with: {lines[-1]}" if lines else "no result yet"


def _add_ratios(rows: list[Row], measured: dict[Setting, Result], settings: Sequence[Setting]) -> dict[str, str]:
    """Add speed-up, efficiency and token agreement relative to a baseline; returns the baseline of each machine.

    The baseline is the fastest setting with the fewest ranks on the same kind of machine.
    """
    baselines: dict[str, str] = {}
    pairs = [(setting, row) for setting, row in zip(settings, rows, strict=True) if row["status"] == "ok"]
    for machine in sorted({row["machine"] for _, row in pairs}):
        on_machine = [(setting, row) for setting, row in pairs if row["machine"] == machine]
        setting, base = min(on_machine, key=lambda pair: (pair[1]["ranks"], pair[1]["seconds"]))
        baselines[str(machine)] = setting.folder
        expected = measured[setting].parameters["answers"]
        exact = measured[setting].parameters["dtype"] == "float32"
        for other, row in on_machine:
            answers = measured[other].parameters["answers"]
            equal = sum(a == b for a, b in zip(expected, answers, strict=False))
            row["same_tokens"] = equal / max(len(expected), len(answers))
            if exact and row["same_tokens"] < 1:
                share = f"{row['same_tokens']:.0%} of its answers"
                row["status"] = f"wrong tokens: {share} equal those of {setting.folder}"
                continue
            row["speedup"] = base["seconds"] / row["seconds"]
            row["efficiency"] = row["speedup"] * base["ranks"] / row["ranks"]
    return baselines


def _notes(rows: list[Row], measured: dict[Setting, Result], machines: list[dict[str, Any]]) -> Iterator[str]:
    for sharing in dict.fromkeys(row["oversubscribed"] for row in rows if row["oversubscribed"]):
        yield f"{sharing}: these rows show the overhead of the split, not how it scales"
    if counts := _ranks_without_more_cores(measured):
        ranks = ", ".join(map(str, counts))
        yield f"one rank used as many cores as {ranks} ranks, so no speed-up is possible"
    if len(machines) > 1:
        yield f"measured on {len(machines)} kinds of machines; speed-ups compare settings of the same kind"
    revisions = {str(result.revision)[:10] for result in measured.values()}
    if len(revisions) > 1:
        yield f"measured at {len(revisions)} revisions: {', '.join(sorted(revisions))}"
    torches = {str(result.versions.get("torch")) for result in measured.values()}
    if len(torches) > 1:
        yield f"measured with {len(torches)} versions of torch: {', '.join(sorted(torches))}"


def _ranks_without_more_cores(measured: dict[Setting, Result]) -> list[int]:
    """Return the numbers of CPU ranks that together had no more cores than a single rank on such a machine."""
    on_cpus = {setting: result for setting, result in measured.items() if result.devices[0]["type"] == "cpu"}
    single = [(results.machine_of(result), _cores(result)) for setting, result in on_cpus.items() if setting.ranks == 1]
    counts = set()
    for setting, result in on_cpus.items():
        machine, cores = results.machine_of(result), _cores(result)
        if setting.ranks > 1 and any(machine == same and cores <= available for same, available in single):
            counts.add(setting.ranks)
    return sorted(counts)


def _cores(result: Result) -> int:
    """Return the cores that all ranks of a CPU run can use together."""
    topology = result.topology or results.make_topology([0])
    threads: int = topology["ranks"] * result.devices[0].get("threads", 1)
    if topology.get("launcher") == SRUN.name:
        return threads
    return min(threads, result.host["cores"] * len(topology["ranks_per_host"]))


def failed(result: Result) -> list[Row]:
    """Return the rows of settings without figures."""
    return [row for row in result.rows if row["status"] != "ok"]
