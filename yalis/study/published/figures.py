"""The figures of the published study as rows: strong scaling, breakdowns, all-reduce times, speed-ups and gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from yalis.perfmodel.collectives import Shape
from yalis.planner.communication import CommModel
from yalis.planner.estimate import decode_shape, prefill_shapes
from yalis.planner.intervals import Interval, effects, interval, prefixes_of
from yalis.planner.machine import Machine
from yalis.planner.step import StepTime
from yalis.study import results
from yalis.study.published.jobs import GPUS, Predictor, Setting, decode_heavy, machine_of, machines, poster, split_of
from yalis.study.results.kinds.plan import CATEGORIES
from yalis.study.results.result import Row

#: Message sizes of the all-reduce figures, in bytes.
SIZES = tuple(1 << power for power in range(13, 23))
SCHEMES = ("tp", "pp", "hybrid")
#: Of the InfiniBand machine in the study (Vista) one GPU is in a node.
INFINIBAND, INFINIBAND_RANKS = "h100-ib", 1
_SPREAD = 0.3  # of the sensitivity


def strong_scaling(predictor: Predictor) -> Iterator[Row]:
    """Yield the time of the poster's job by GPUs for tp, pp and hybrid, with NCCL.

    It is the fast estimate, which a test compares with the virtual clock: a pipeline of 64 stages has 33,000 steps."""
    for machine in machines():
        for model, counts in GPUS.items():
            for scheme in SCHEMES:
                for gpus in counts:
                    split = split_of(scheme, gpus, machine.gpus_per_node)
                    one = predictor.candidate(setting := Setting(machine, model, poster(), split, "nccl"))
                    if one is None:
                        continue
                    value = predictor.planner(setting).interval(one)
                    yield _row(
                        machine, scheme, value, model=model, gpus=gpus, nodes=one.nodes, time=one.estimate.breakdown
                    )  # fmt: skip


def breakdowns(predictor: Predictor) -> Iterator[Row]:
    """Yield where the time of prefill and of 10 decode steps goes, by GPUs, for the 70B with tensor parallelism."""
    model, work = "llama-3.1-70b", poster()
    for machine in machines():
        for gpus in GPUS[model]:
            setting = Setting(machine, model, work, split_of("tp", gpus, 4), "nccl")
            times = predictor.planner(setting).model(setting.split, setting.library)
            (prefill,) = prefill_shapes(work.batch, work.prompt_len, work.batch * work.prompt_len)
            decode = decode_shape(work.batch, work.prompt_len + work.output_len / 2)
            for phase, shape, steps in (("prefill", prefill, 1), ("10 decode steps", decode, 10)):
                (step,) = times.stages(shape)
                idle = max(0.0, times.host(shape) - step.total)
                time = (step + StepTime(idle=idle)).scaled(steps)
                yield _row(
                    machine, phase, Interval(time.total, time.total, time.total), model=model, gpus=gpus,
                    nodes=max(1, gpus // 4), time=time,
                )  # fmt: skip


def all_reduce_times() -> Iterator[Row]:
    """Yield microseconds of an all-reduce by size and nodes, of NCCL, MPI and both NVRAR."""
    for machine, ranks in _networks():
        for library in machine.libraries:
            for nodes in (1, 2, 4, 8):
                if nodes * ranks < 2:
                    continue
                for size in SIZES:
                    value = _time(machine, library, nodes, ranks, size)
                    yield _row(machine, library, value, nodes=nodes, gpus=nodes * ranks, size=size)


def speed_ups() -> Iterator[Row]:
    """Yield NCCL's time over that of NVRAR, published and ours, by size and nodes."""
    for machine, ranks in _networks():
        for library in ("nvrar-published", "nvrar"):
            for nodes in (2, 4, 8, 16):
                for size in SIZES:
                    value = interval(machine, _ratio(library, nodes, ranks, size), ("libraries.", "nic_", "intra_"))
                    yield _row(machine, library, value, nodes=nodes, gpus=nodes * ranks, size=size)


def gains(predictor: Predictor) -> Iterator[Row]:
    """Yield the job's time with NCCL over that with NVRAR, decode-heavy, tensor parallelism, by GPUs."""
    for machine in machines():
        for model, counts in GPUS.items():
            for library in ("nvrar-published", "nvrar"):
                for gpus in counts:
                    predict = gain(predictor, machine, model, gpus, library)
                    if predict is None:
                        continue
                    prefixes = {*prefixes_of("nccl"), *prefixes_of(library)}
                    value = interval(machine, predict, sorted(prefixes))
                    yield _row(machine, library, value, model=model, gpus=gpus, nodes=max(1, gpus // 4))


def gain(
    predictor: Predictor, machine: Machine, model: str, gpus: int, library: str
) -> Callable[[Machine], float] | None:
    """Return a prediction of the time with NCCL over the time with `library`; None if the model does not fit."""
    split = split_of("tp", gpus, machine.gpus_per_node)
    slow = Setting(machine, model, decode_heavy(), split, "nccl")
    one = predictor.candidate(slow)
    if one is None:
        return None
    planner, room = predictor.planner(slow), one.capacity

    def predict(changed: Machine) -> float:
        before, after = (planner.estimate(split, name, room, changed).seconds for name in ("nccl", library))
        return before / after

    return predict


def sensitivity(predictor: Predictor) -> Iterator[Row]:
    """Yield the main results with each assumed or fitted quantity changed by 30%, relative to the prediction."""
    machine = machines()[0]
    settings = {
        "70B on 16 GPUs, tp, nccl: seconds of the job": _job(predictor, machine, "llama-3.1-70b", 16, "nccl"),
        "70B on 16 GPUs, tp, nvrar: seconds of the job": _job(predictor, machine, "llama-3.1-70b", 16, "nvrar"),
        "nccl over nvrar-published, 512 KiB, 4 nodes": _ratio("nvrar-published", 4, 4, 512 << 10),
        "nccl over mpi, 512 KiB, 4 nodes": _ratio("mpi", 4, 4, 512 << 10),
        "405B on 32 GPUs: gain of nvrar-published": gain(predictor, machine, "llama-3.1-405b", 32, "nvrar-published"),
    }
    assumed = [path for path, one in machine.quantities().items() if one.origin in ("assumed", "fitted")]
    for name, predict in settings.items():
        assert predict is not None, name
        value = predict(machine)
        for one in effects(machine, predict, assumed, _SPREAD):
            row = _row(machine, name, Interval(value, value, value))
            yield {**row, "parameter": one.path, "at_low": one.at_low / value, "at_high": one.at_high / value}


def _job(predictor: Predictor, machine: Machine, model: str, gpus: int, library: str) -> Callable[[Machine], float]:
    setting = Setting(machine, model, poster(), split_of("tp", gpus, machine.gpus_per_node), library)
    one = predictor.candidate(setting)
    assert one is not None
    planner = predictor.planner(setting)
    return lambda changed: planner.estimate(setting.split, library, one.capacity, changed).seconds


def _networks() -> Iterator[tuple[Machine, int]]:
    for machine in machines():
        yield machine, machine.gpus_per_node
    yield machine_of(INFINIBAND), INFINIBAND_RANKS


def _time(machine: Machine, library: str, nodes: int, ranks: int, size: int) -> Interval:
    def predict(changed: Machine) -> float:
        return 1e6 * CommModel(changed, library).all_reduce(Shape(nodes, ranks), size)

    return interval(machine, predict, ("intra_", "nic_", f"libraries.{library}."))


def _ratio(library: str, nodes: int, ranks: int, size: int) -> Callable[[Machine], float]:
    shape = Shape(nodes, ranks)

    def predict(machine: Machine) -> float:
        slow, fast = (CommModel(machine, name).all_reduce(shape, size) for name in ("nccl", library))
        return slow / fast

    return predict


def _row(
    machine: Machine, series: str, value: Interval, model: str | None = None, gpus: int | None = None,
    nodes: int | None = None, size: int | None = None, time: StepTime | None = None,
) -> Row:  # fmt: skip
    row: dict[str, Any] = results.empty_row("scale")
    row |= {"machine": machine.name, "model": model, "series": series, "gpus": gpus, "nodes": nodes}
    row |= {"message_bytes": size, "value": value.value, "value_low": value.low, "value_high": value.high}
    return row if time is None else row | {f"{name}_s": getattr(time, name) for name in CATEGORIES}
