"""Replays recorded throughput runs on the planner's virtual clock: predicted time and steps beside the measured ones.

A result of `yalis bench throughput` has the sizes and arrival times of its requests, the settings of its scheduler and
the number of its KV blocks, so the same scheduler decides the same steps; only their times are predicted. The read and
matmul rates of the device are those that were measured in the run, because devices of one type differ by some percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.planner.clock import SimEngine, Simulation, simulate
from yalis.planner.compute import ComputeModel, ComputeTime
from yalis.planner.efficiency import Efficiencies
from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity
from yalis.planner.step import SimRequest, StepShape, StepTime
from yalis.planner.step_time import StepTimeModel
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.spec import ModelSpec
from yalis.study import results
from yalis.study.efficiency_fit import fit_cpu
from yalis.study.planner_accuracy import read_model
from yalis.study.results import Result, StoredResult

#: Library of the planner for each `--allreduce` of the engine, on GPUs and on CPUs.
_LIBRARIES = {"cuda": {"auto": "nccl", "torch": "nccl"}, "cpu": {"auto": "hierarchical", "torch": "gloo"}}


def replay(source: StoredResult, machine: Machine, table: Efficiencies | None = None) -> Simulation:
    """Run the requests of a throughput result on the virtual clock, on the same split.

    `table` replaces the efficiencies of the machine, and its rates are then not those of the run.
    """
    facts = source.result.parameters
    if source.result.kind != "throughput":
        raise YalisError(
            f"{source.path} is a result of kind {source.result.kind}; give one of `yalis bench throughput`"
        )
    if "sizes" not in facts or "scheduler" not in facts:
        raise YalisError(
            f"{source.path} lacks the sizes of its requests and the settings of its scheduler: an older version wrote "
            "it; run `yalis bench throughput` again"
        )
    if facts["scheduler"]["prefix_reuse"]:
        raise YalisError(f"{source.path} was measured with prefix reuse, which depends on tokens; omit --prefix-reuse")
    settings = dict(facts["scheduler"])
    num_blocks = settings.pop("num_blocks")
    engine, on_cpu = facts["engine"], source.result.devices[0]["type"] == "cpu"
    rows, columns = engine["tp"]
    split = Split(rows, columns, engine["pp"], engine["dp"])
    machine = _with_rates(machine, facts, source.path.stem) if table is None else machine
    times = _StepTimes(source, machine, split, table)
    sim = SimEngine(
        SchedulerConfig(**settings), num_blocks, times.stages, times.host, times.replayed, on_cpu,
        times.return_seconds(settings["max_num_seqs"]),
    )  # fmt: skip
    return simulate([SimRequest(*size) for size in facts["sizes"]], sim, split.replicas)


def _with_rates(machine: Machine, facts: dict[str, Any], label: str) -> Machine:
    """Return the machine with the rates that were measured in the run, if it has some."""
    names = [name for name in ("read_bytes_per_s", "matmul_flops_per_s") if name in facts]
    rates: dict[str, Any] = {name: Quantity.of(facts[name], "measured", label) for name in names}
    return replace(machine, gpu=replace(machine.gpu, **rates))


class _StepTimes:
    """Step times of a result's model on a machine, for SimEngine. One rank needs no communication library."""

    def __init__(self, source: StoredResult, machine: Machine, split: Split, table: Efficiencies | None) -> None:
        facts = source.result.parameters
        self._spec, self._itemsize = read_model(facts["engine"]["model"]), 4 if facts["dtype"] == "float32" else 2
        self._table, self._max_num_seqs = table, facts["engine"]["max_num_seqs"]
        self._split: StepTimeModel | None = None
        self._one: ComputeModel | None = None
        self._last: tuple[StepShape, ComputeTime] | None = None
        if split.per_replica == 1:
            self._one = self._compute(machine, self._spec, split, self._itemsize, 0)
        else:
            allreduce = facts["engine"]["allreduce"]
            library = _LIBRARIES[source.result.devices[0]["type"]].get(allreduce, allreduce)
            self._split = StepTimeModel(machine, self._spec, split, self._itemsize, library, self._compute)

    def _compute(self, machine: Machine, spec: ModelSpec, split: Split, itemsize: int, rank: int) -> ComputeModel:
        return ComputeModel(machine, spec, split, itemsize, rank, self._max_num_seqs, self._table)

    def stages(self, shape: StepShape) -> Sequence[StepTime]:
        if self._split is not None:
            return self._split.stages(shape)
        time = self._step(shape)
        return [StepTime(time.matmul, time.attention, 0.0, time.other)]

    def host(self, shape: StepShape) -> float:
        if self._split is not None:
            return self._split.host(shape)
        time = self._step(shape)
        return time.host + time.host_mixed

    def replayed(self, shape: StepShape) -> bool:
        return self._split.replayed(shape) if self._split is not None else self._step(shape).replayed

    def return_seconds(self, sequences: int) -> float:
        return self._split.return_seconds(sequences) if self._split is not None else 0.0

    def _step(self, shape: StepShape) -> ComputeTime:
        """Return the times of one rank. The clock asks several times for the same step."""
        assert self._one is not None
        if self._last is None or self._last[0] is not shape:
            self._last = shape, self._one.step(shape)
        return self._last[1]


def compare(
    sources: Sequence[StoredResult], machine: Machine, command: str, calibration: Sequence[StoredResult] = ()
) -> Result:
    """Return a result of kind "replay": every throughput result beside its replay.

    `calibration`: latency results of the same CPU, to which its efficiency table is fitted.
    """
    table = None
    if calibration:
        machine, table = fit_cpu(calibration, machine)
    rows = [_row(source, replay(source, machine, table)) for source in sources]
    parameters = {
        "machine": machine.name,
        "efficiencies": machine.gpu.efficiencies,
        "calibration": [source.path.stem for source in calibration],
        "fitted": {} if table is None else {name: one.value for name, one in table.parameters.items()},
    }
    return results.new("replay", parameters, rows, command, sources[0].result.devices)


def _row(source: StoredResult, run: Simulation) -> results.Row:
    measured = next(row for row in source.result.rows if row["engine"] == "yalis")
    itl = run.itl()
    return results.empty_row("replay") | {
        "source": source.path.stem,
        "model": Path(source.result.parameters["engine"]["model"]).name.removesuffix(".json"),
        "requests": len(run.requests),
        "prompt_tokens": measured["prompt_tokens"],
        "output_tokens": run.output_tokens,
        "measured_s": measured["seconds"],
        "predicted_s": run.seconds,
        "error": run.seconds / measured["seconds"] - 1,
        "measured_steps": measured["steps"],
        "predicted_steps": run.steps,
        "measured_first_token_ms": measured["first_token_ms"],
        "predicted_first_token_ms": 1e3 * run.ttft(),
        "measured_token_ms": measured["token_ms"],
        "predicted_token_ms": None if itl is None else 1e3 * itl,
        "measured_preemptions": measured["preemptions"],
        "predicted_preemptions": run.preemptions,
        "peak_kv_blocks": run.peak_kv_blocks,
        "kv_blocks": run.num_blocks,
        **{f"{name}_s": value for name, value in asdict(run.breakdown).items()},
    }
