"""Each published statement beside its prediction: those about collectives alone, and those that need step times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from yalis.planner.estimate import decode_shape
from yalis.planner.intervals import Interval, interval, prefixes_of
from yalis.planner.machine import Machine
from yalis.planner.published import NOT_PREDICTED, STATEMENTS, Outcome, Statement, evaluate_communication
from yalis.planner.step import StepTime
from yalis.study import results
from yalis.study.published.figures import gain
from yalis.study.published.jobs import GPUS, Predictor, Setting, machine_of, machines, poster, split_of
from yalis.study.results.result import Row

_SMALL, _LARGE = GPUS
_NCCL = prefixes_of("nccl")
Predict = Callable[[Machine], float]


def evaluate_statements(predictor: Predictor) -> Iterator[Row]:
    """Yield a row for each statement, in the order in which they are listed."""
    found = {one.statement.name: one for one in evaluate_communication()}
    found |= {one.statement.name: one for one in _evaluate_steps(predictor)}
    for statement in STATEMENTS:
        outcome = found.get(statement.name)
        assert outcome is not None or statement.by == NOT_PREDICTED, statement.name
        yield _row(statement, outcome)


def _evaluate_steps(predictor: Predictor) -> Iterator[Outcome]:
    known = {one.name: one for one in STATEMENTS}
    yield Outcome(known["A2"], _largest_gain(predictor))
    for name, tokens, unit in (
        ("A5 decode", poster().batch, 1 << 10),
        ("A5 prefill", poster().batch * poster().prompt_len, 1e6),
    ):
        value = _message_bytes(predictor, tokens) / unit
        yield Outcome(known[name], Interval(value, value, value))
    for name, (predict, prefixes) in _ratios(predictor).items():
        yield Outcome(known[name], interval(machine_of(known[name].machine), predict, prefixes))
    yield Outcome(known["A11 communication"], _alps_over_perlmutter(predictor))


def _ratios(predictor: Predictor) -> dict[str, tuple[Predict, tuple[str, ...]]]:
    """Return the predictions that divide two times on one machine."""

    def over(machine: str, after: tuple[str, int], before: tuple[str, int]) -> tuple[Predict, tuple[str, ...]]:
        times = [_job_seconds(predictor, machine_of(machine), *one) for one in (after, before)]
        return lambda changed: times[0](changed) / times[1](changed), _NCCL

    def matmul(changed: Machine) -> float:
        return _decode_step(predictor, changed, 16).matmul / _decode_step(predictor, changed, 4).matmul

    found = {
        "A7 time": over("perlmutter", ("tp", 32), ("tp", 4)),
        "A9 Perlmutter": over("perlmutter", ("tp", 32), ("tp", 4)),
        "A9 Alps": over("alps", ("tp", 8), ("tp", 4)),
        "A11 matmul": (matmul, _NCCL),
    }
    for title, machine in (("Perlmutter", "perlmutter"), ("Alps", "alps")):
        found[f"A7 pipeline {title}"] = over(machine, ("hybrid", 32), ("tp", 4))
    return found


def _job_seconds(predictor: Predictor, machine: Machine, scheme: str, gpus: int) -> Predict:
    """Return a prediction of the poster's job of the 70B with NCCL."""
    setting = Setting(machine, _SMALL, poster(), split_of(scheme, gpus, machine.gpus_per_node), "nccl")
    one = predictor.candidate(setting)
    assert one is not None
    planner = predictor.planner(setting)
    return lambda changed: planner.estimate(setting.split, "nccl", one.capacity, changed).seconds


def _decode_step(predictor: Predictor, machine: Machine, gpus: int) -> StepTime:
    """Return the decode step of the 70B in the middle of the poster's job, with tensor parallelism and NCCL."""
    split = split_of("tp", gpus, machine.gpus_per_node)
    planner = predictor.planner(Setting(machine, _SMALL, poster(), split, "nccl"))
    work = poster()
    shape = decode_shape(work.batch, work.prompt_len + work.output_len / 2)
    return planner.model(split, "nccl", machine).stages(shape)[0]


def _message_bytes(predictor: Predictor, tokens: int) -> float:
    """Return the bytes of an all-reduce in the layers of the 70B."""
    setting = Setting(machine_of("perlmutter"), _SMALL, poster(), split_of("tp", 8, 4), "nccl")
    reduces = predictor.planner(setting).model(setting.split, "nccl").all_reduces(tokens, tokens)
    return max(one.bytes for one in reduces)


def _largest_gain(predictor: Predictor) -> Interval:
    """Return the largest gain of the published NVRAR on the 405B with 16 to 64 GPUs, over both machines."""
    best: tuple[float, Machine, Predict] | None = None
    for machine in machines():
        for gpus in (16, 32, 64):
            predict = gain(predictor, machine, _LARGE, gpus, "nvrar-published")
            if predict is not None and (best is None or predict(machine) > best[0]):
                best = (predict(machine), machine, predict)
    assert best is not None
    return interval(best[1], best[2], (*_NCCL, "libraries.nvrar-published."))


def _alps_over_perlmutter(predictor: Predictor) -> Interval:
    """Return the communication that 8 GPUs add to a decode step of 4 GPUs, as a share of it: Alps over Perlmutter."""

    def growth(machine: Machine) -> float:
        before, after = (_decode_step(predictor, machine, gpus) for gpus in (4, 8))
        return (after.communication - before.communication) / before.total

    alps, perlmutter = (interval(machine_of(name), growth, _NCCL) for name in ("alps", "perlmutter"))
    value = alps.value / perlmutter.value
    below = math.hypot(1 - alps.low / alps.value, 1 - perlmutter.value / perlmutter.high)
    above = math.hypot(alps.high / alps.value - 1, perlmutter.value / perlmutter.low - 1)
    return Interval(value, value * (1 - below), value * (1 + above))


def _row(statement: Statement, outcome: Outcome | None) -> Row:
    row = results.empty_row("statements")
    row |= {"name": statement.name, "statement": statement.text, "predicted": statement.predicted}
    row |= {"fitted": statement.fitted}
    if outcome is None:
        return row
    value = outcome.prediction
    row |= {"value": value.value, "value_low": value.low, "value_high": value.high}
    row |= {"accepted_low": statement.low, "accepted_high": statement.high if math.isfinite(statement.high) else None}
    return row | {"agrees": outcome.agrees, "may_agree": outcome.may_agree}
