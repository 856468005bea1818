"""How well the planner predicts measured steps of one rank: latency and slice results beside the compute model.

Every result carries the read and matmul rates that were measured in its run; they are the machine's rates when that
result is predicted, because GPUs of one type differ by a few percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from yalis.checkpoint.resolve import open_checkpoint
from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.planner.compute import ComputeModel
from yalis.planner.efficiency import Efficiencies, load_efficiencies
from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity
from yalis.planner.step import StepShape
from yalis.spec import ModelSpec, read_spec
from yalis.study import results
from yalis.study.results import StoredResult
from yalis.workloads import Workload

PHASES = {"first token": ("first_token_ms", "prefill_ms"), "decode step": ("decode_ms", "decode_ms")}


@dataclass(frozen=True)
class Point:
    """One measured time and what it needs to be predicted."""

    source: str  # name of the result's file, without its suffix
    model: str  # path or name of the model
    split: Split
    rank: int
    case: Workload
    phase: str  # a key of PHASES
    measured: float  # seconds
    read_bytes_per_s: float
    matmul_flops_per_s: float
    itemsize: int
    max_batch_tokens: int
    max_num_seqs: int
    excluded: str = ""  # why the measured value is not what the model predicts

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.source, f"{self.split.rows}x{self.split.cols}x{self.split.stages}", str(self.case), self.phase


@dataclass(frozen=True)
class Prediction:
    point: Point
    seconds: float
    calibration: bool  # whether parameters were fitted to this point

    @property
    def error(self) -> float:
        """Relative error; positive if the prediction is too long."""
        return self.seconds / self.point.measured - 1


def read_points(sources: Iterable[StoredResult], engine: str = "yalis") -> list[Point]:
    """Return the points of all latency and slice results; others are ignored. `engine` may be a peer's name."""
    points = [point for source in sources for point in _points_of(source, engine)]
    if not points:
        raise YalisError(
            "there is no latency or slice result of yalis to compare with; give files that `yalis bench latency` or "
            "`yalis bench slice` has written"
        )
    return points


def _points_of(source: StoredResult, name: str) -> Iterator[Point]:
    result = source.result
    if result.kind not in ("latency", "slice"):
        return
    facts = result.parameters
    engine: Mapping[str, Any] = facts["engine"]
    grid = engine.get("tp", (1, 1))
    first_case = None
    seen: set[Workload] = set()
    for row in result.rows:
        if row["status"] != "ok" or row.get("engine", "yalis") != name:
            continue
        case = Workload(row["batch"], row["prompt_len"], row["output_len"])
        first_case = first_case or case
        if result.kind == "slice":
            split = Split(row["tp"] // row["columns"], row["columns"], row["pp"])
        else:
            split = Split(grid[0], grid[1] if len(grid) > 1 else 1)
        for phase, columns in PHASES.items():
            value = row[columns[result.kind == "slice"]]
            if value is None:
                continue
            excluded = ""
            if phase == "first token" and facts.get("warmup") == 0 and case == first_case:
                excluded = "the first run of its process, without a warm-up"
            elif phase == "first token" and case in seen and result.kind == "latency" and engine.get("prefix_reuse"):
                excluded = "the prompts of an earlier row, which the prefix cache has"
            yield Point(
                source.path.stem,
                engine["model"],
                split,
                row.get("rank", 0),
                case,
                phase,
                value / 1e3,
                facts["read_bytes_per_s"],
                facts["matmul_flops_per_s"],
                4 if facts["dtype"] == "float32" else 2,
                engine["max_batch_tokens"],
                max(engine["max_num_seqs"], case.batch),
                excluded,
            )
        seen.add(case)


def predict_all(points: Sequence[Point], machine: Machine, table: Efficiencies | None = None) -> list[Prediction]:
    """Predict the points that are not excluded."""
    table = table or load_efficiencies(machine.gpu.efficiencies)
    used, excluded = ({_key_of(row) for row in rows} for rows in (table.calibration, table.excluded))
    return [
        Prediction(point, predict(point, machine, table), point.key in used)
        for point in points
        if not point.excluded and point.key not in excluded
    ]


def _key_of(row: Mapping[str, str]) -> tuple[str, str, str, str]:
    return row["source"], row["split"], row["workload"], row["phase"]


def predict(point: Point, machine: Machine, table: Efficiencies) -> float:
    """Return the predicted seconds."""
    rates: dict[str, Any] = {
        name: Quantity.of(getattr(point, name), "measured", point.source)
        for name in ("read_bytes_per_s", "matmul_flops_per_s")
    }
    local = replace(machine, gpu=replace(machine.gpu, **rates))
    model = ComputeModel(
        local, read_model(point.model), point.split, point.itemsize, point.rank, point.max_num_seqs, table
    )
    if point.phase == "decode step":
        return model.step(decode_shape(point.case)).back_to_back
    steps = [model.step(shape) for shape in prefill_shapes(point.case, point.max_batch_tokens)]
    return steps[0].alone + sum(step.back_to_back for step in steps[1:])


def decode_shape(case: Workload) -> StepShape:
    """Return the decode step in the middle of the output."""
    context = case.prompt_len + (case.output_len + 1) // 2
    return StepShape(case.batch, case.batch * context, (), case.batch)


def prefill_shapes(case: Workload, max_batch_tokens: int) -> list[StepShape]:
    """Return the steps until the last sequence has its first token: in order of arrival, in chunks if needed."""
    done = [0] * case.batch  # tokens computed of each sequence
    shapes: list[StepShape] = []
    while min(done) < case.prompt_len:
        budget, decodes, context, sampled = max_batch_tokens, 0, 0, 0
        chunks: list[tuple[int, int]] = []
        for index, count in enumerate(done):
            if budget <= 0:
                break
            tokens = min(budget, max(1, case.prompt_len - count))
            sampled += count + tokens >= case.prompt_len
            if count and tokens == 1:  # as in StepShape.of
                decodes, context = decodes + 1, context + count + 1
            else:
                chunks.append((count, tokens))
            budget -= tokens
            done[index] += tokens
        shapes.append(StepShape(decodes, context, tuple(chunks), sampled))
    return shapes


@cache
def read_model(name: str) -> ModelSpec:
    with closing(open_checkpoint(name, "random" if name.endswith(".json") else "auto")) as checkpoint:
        return read_spec(checkpoint.config, checkpoint.label)


@dataclass(frozen=True)
class Summary:
    """Errors of one set of predictions."""

    count: int
    mean: float  # of the absolute relative errors
    worst: float
    within_5: float  # share of the predictions that are off by at most 5%


def summarize(predictions: Sequence[Prediction]) -> Summary:
    errors = [abs(one.error) for one in predictions]
    if not errors:
        return Summary(0, 0.0, 0.0, 0.0)
    return Summary(len(errors), mean(errors), max(errors), mean(error <= 0.05 for error in errors))


def read_files(paths: Iterable[Path], machine: Machine) -> list[StoredResult]:
    """Read latency and slice results: files, and folders.

    Of a folder, those are read that the machine's efficiency table names; if there are none, all of them. Other results
    may have been measured with older kernels.
    """
    known = load_efficiencies(machine.gpu.efficiencies).results
    found: list[StoredResult] = []
    for path in paths:
        if not path.exists():
            raise YalisError(f"there is no {path}; give results of `yalis bench latency` or `yalis bench slice`")
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.glob("*.json")) if file.name.startswith(("latency", "slice"))]
            files = [file for file in files if file.stem in known] or files
        found += [StoredResult(file, results.read(file)) for file in files]
    return found


def compare(sources: Sequence[StoredResult], machine: Machine, command: str) -> results.Result:
    """Return a result of kind "accuracy": every measured time beside its prediction."""
    points = read_points(sources)
    predictions = predict_all(points, machine)
    rows = [make_row(one.point, one.seconds, "yalis", one.calibration) for one in predictions]
    table = load_efficiencies(machine.gpu.efficiencies)
    notes = [
        f"left out: {point.source} {point.case} {point.phase}: {point.excluded}" for point in points if point.excluded
    ]
    sources_seen = {point.source for point in points}
    notes += [
        f"left out: {row['source']} {row['workload']} {row['phase']}: {row['reason']}"
        for row in table.excluded
        if row["source"] in sources_seen
    ]
    notes += [table.caveat] if table.caveat and any(one.calibration for one in predictions) else []
    parameters = {"predictor": "yalis plan", "machine": machine.name, "efficiencies": table.name}
    return results.new("accuracy", parameters, rows, command, sources[0].result.devices, notes)


def make_row(point: Point, seconds: float, engine: str, calibration: bool) -> results.Row:
    """Return a row of an accuracy result."""
    return results.empty_row("accuracy") | {
        "source": point.source,
        "engine": engine,
        "model": Path(point.model).name.removesuffix(".json"),
        "tp": point.split.per_stage,
        "columns": point.split.cols,
        "pp": point.split.stages,
        "batch": point.case.batch,
        "prompt_len": point.case.prompt_len,
        "output_len": point.case.output_len,
        "phase": point.phase,
        "measured_ms": 1e3 * point.measured,
        "predicted_ms": 1e3 * seconds,
        "error": seconds / point.measured - 1,
        "calibration": "yes" if calibration else "no",
    }
