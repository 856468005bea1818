"""Published statements about multi-node inference as data, and the predictions of those that need no step time.

Sources: arXiv 2511.09557 (abstract), the poster "Understanding Communication Bottlenecks in Multi-Node LLM Inference",
and the tuned NVRAR times in the published code. B statements are arithmetic on the A statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from yalis.perfmodel.collectives import Shape
from yalis.planner.communication import CommModel
from yalis.planner.intervals import Interval, interval
from yalis.planner.machine import Machine, load_machine

KIB = 1 << 10
#: Microseconds of the published NVRAR, tuned, bf16, on 4 nodes of 4 A100, by KiB.
NVRAR_TIMES = {8: 62.0, 64: 72.0, 128: 77.0, 256: 82.0, 512: 105.0, 1024: 158.0}
_SIZES = (128, 256, 512, 1024, 2048)  # KiB, of A1
_NODES = (2, 4, 8, 16)
#: A fitted time must stay this close to the published one.
_FITTED_SHARE = 0.10

#: How a statement is predicted: by communication alone, by step times, or not at all.
COMMUNICATION, STEPS, NOT_PREDICTED = "communication", "steps", "not predicted"


@dataclass(frozen=True)
class Statement:
    name: str
    text: str
    predicted: str  # the number that a prediction gives for it
    low: float  # accepted range of that number
    high: float
    by: str = STEPS
    machine: str = ""  # the machine of the prediction; empty: given in `predicted`
    fitted: str = ""  # the values that were fitted to it; such a statement is no evidence
    note: str = ""  # what was known of the prediction when values were chosen; then it was not made blindly


_INFINITE = float("inf")
_NOT_BLIND = (
    "worked out by hand for several values of libraries.nccl.net_hop_extra_s before one was taken from another source"
)
_MPI_NOT_BLIND = (
    "the flat algorithm was preferred to a hierarchical one because its ratio was nearer to reports of 1.5x to 2x"
)
STATEMENTS = (
    *(
        Statement(
            f"A1 {network}",
            "NVRAR up to 1.9x to 3.6x lower latency than NCCL, 128 KB to 2 MB, Slingshot and InfiniBand",
            f"largest NCCL time over nvrar-published time, 128 KB to 2 MB, 2 to 16 nodes{shape}",
            1.9, 3.6, COMMUNICATION, machine, note=_NOT_BLIND if machine == "perlmutter" else "",
        )
        for network, machine, shape in (
            ("Perlmutter", "perlmutter", ""),
            ("Alps", "alps", ""),
            ("InfiniBand", "h100-ib", " of 1 GPU, as on Vista"),
        )
    ),
    Statement(
        "A2", "up to 1.72x lower end-to-end batch latency, 405B, multi-node, decode-heavy, tensor parallel",
        "largest ratio of batch latency with nccl over nvrar-published, 405B, 16 to 64 GPUs", 1.4, 2.1,
    ),
    Statement(
        "A3", "workload: 70B-Instruct, batch 16, prefill 2480, decode 2048; Alps and Perlmutter",
        "a setting, not a result", 0, 0, NOT_PREDICTED,
    ),
    Statement(
        "A5 decode", "decode messages: tens to hundreds of KB", "KiB per all-reduce, 70B, batch 16", 10, 1000,
    ),
    Statement("A5 prefill", "prefill messages: hundreds of MB", "MB per all-reduce, 70B, 16 x 2480", 100, 1000),
    *(
        statement
        for title, machine in (("Perlmutter", "perlmutter"), ("Alps", "alps"))
        for statement in (
            Statement(
                f"A6 {title} between nodes", "MPI can beat NCCL at 256 to 1024 KB beyond one node",
                "largest NCCL time over MPI time, 256 to 1024 KB, 2 to 16 nodes", 1.0, _INFINITE, COMMUNICATION,
                machine, note=_MPI_NOT_BLIND,
            ),
            Statement(
                f"A6 {title} one node", "NCCL is best inside a node",
                "largest NCCL time over MPI time, 256 to 1024 KB, one node", 0.0, 1.0, COMMUNICATION, machine,
            ),
        )
    ),
    Statement(
        "A7 time", "time to solution does not fall with more GPUs", "70B batch latency at 32 over 4 GPUs, Perlmutter",
        0.9, _INFINITE, STEPS, "perlmutter",
    ),
    *(
        Statement(
            f"A7 pipeline {title}", "pipeline parallelism raises latency on both machines",
            f"70B batch latency at 32 GPUs (tp 4, pp 8) over 4 GPUs (tp 4), {title}", 1.0, _INFINITE, STEPS, machine,
        )
        for title, machine in (("Perlmutter", "perlmutter"), ("Alps", "alps"))
    ),
    Statement(
        "A9 Perlmutter", "tensor parallelism on Perlmutter: about constant", "70B batch latency at 32 over 4 GPUs",
        0.8, 1.25, STEPS, "perlmutter",
    ),
    Statement(
        "A9 Alps", "tensor parallelism on Alps: sharp rise from one to several nodes, then steady",
        "70B batch latency at 8 over 4 GPUs", 1.2, _INFINITE, STEPS, "alps",
    ),
    Statement(
        "A11 matmul", "matmul time falls with GPUs", "70B matmul time of a decode step at 16 over 4 GPUs, Perlmutter",
        0.0, 0.6, STEPS, "perlmutter",
    ),
    Statement(
        "A11 communication", "communication grows drastically past one node, more on Alps",
        "growth of communication from 4 to 8 GPUs, Alps over Perlmutter (share of the step)", 1.0, _INFINITE,
    ),
    Statement("A12", "YALIS about equal to vLLM offline", "vLLM is not modelled", 0, 0, NOT_PREDICTED),
    Statement(
        "B7 8 GPUs", "a 256 KiB all-reduce on Perlmutter grows by about 61 us from 4 to 8 GPUs", "us of NCCL",
        43, 79, COMMUNICATION, "perlmutter", note=_NOT_BLIND,
    ),
    Statement(
        "B7 32 GPUs", "a 256 KiB all-reduce on Perlmutter grows by about 101 us from 4 to 32 GPUs", "us of NCCL",
        71, 131, COMMUNICATION, "perlmutter", note=_NOT_BLIND,
    ),
    Statement(
        "B8", "a 256 KiB all-reduce on Alps grows by more than 31 us from 4 to 8 GPUs", "us of NCCL",
        31, _INFINITE, COMMUNICATION, "alps",
    ),
    *(
        Statement(
            f"NVRAR {size} KiB", f"published NVRAR on 16 x A100, {size} KiB: {time:g} us",
            "us of nvrar-published, 4 x 4", time * (1 - _FITTED_SHARE), time * (1 + _FITTED_SHARE), COMMUNICATION,
            "perlmutter", "libraries.nvrar-published.ready_s and net_efficiency",
        )
        for size, time in NVRAR_TIMES.items()
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A statement beside its prediction."""

    statement: Statement
    prediction: Interval

    @property
    def agrees(self) -> bool:
        return self.statement.low <= self.prediction.value <= self.statement.high

    @property
    def may_agree(self) -> bool:
        """Whether the interval of the prediction meets the accepted range."""
        return self.prediction.low <= self.statement.high and self.prediction.high >= self.statement.low


def statements(by: str) -> list[Statement]:
    """Return the statements that are predicted in this way."""
    return [one for one in STATEMENTS if one.by == by]


def evaluate(predictors: dict[str, Callable[[Machine], float]], prefixes: tuple[str, ...]) -> list[Outcome]:
    """Predict statements by name. `prefixes` are those of the quantities that the intervals take into account."""
    known = {one.name: one for one in STATEMENTS}
    return [
        Outcome(known[name], interval(load_machine(known[name].machine), predict, prefixes))
        for name, predict in predictors.items()
    ]


def evaluate_communication() -> list[Outcome]:
    """Predict the statements that need only the time of collectives."""
    return evaluate(dict(_communication_predictors()), ("libraries.", "nic_", "intra_"))


def _communication_predictors() -> Iterator[tuple[str, Callable[[Machine], float]]]:
    several = _NODES
    for network, ranks in (("Perlmutter", 4), ("Alps", 4), ("InfiniBand", 1)):
        yield f"A1 {network}", _largest_ratio("nccl", "nvrar-published", _SIZES, several, ranks)
    for title in ("Perlmutter", "Alps"):
        yield f"A6 {title} between nodes", _largest_ratio("nccl", "mpi", _SIZES[1:4], several, 4)
        yield f"A6 {title} one node", _largest_ratio("nccl", "mpi", _SIZES[1:4], (1,), 4)
    for name, nodes in (("B7 8 GPUs", 2), ("B7 32 GPUs", 8), ("B8", 2)):
        yield name, _growth(nodes)
    for size in NVRAR_TIMES:
        yield f"NVRAR {size} KiB", _time("nvrar-published", 4, size)


def _largest_ratio(
    slow: str, fast: str, sizes: tuple[int, ...], nodes: tuple[int, ...], ranks: int
) -> Callable[[Machine], float]:
    def predict(machine: Machine) -> float:
        return max(
            _microseconds(machine, slow, count, ranks, size) / _microseconds(machine, fast, count, ranks, size)
            for count in nodes
            for size in sizes
        )

    return predict


def _time(library: str, nodes: int, kib: int) -> Callable[[Machine], float]:
    return lambda machine: _microseconds(machine, library, nodes, 4, kib)


def _growth(nodes: int) -> Callable[[Machine], float]:
    """Return a prediction of how many microseconds NCCL needs more on so many nodes than on one, at 256 KiB."""

    def predict(machine: Machine) -> float:
        return _microseconds(machine, "nccl", nodes, 4, 256) - _microseconds(machine, "nccl", 1, 4, 256)

    return predict


def _microseconds(machine: Machine, library: str, nodes: int, ranks: int, kib: int) -> float:
    return 1e6 * CommModel(machine, library).all_reduce(Shape(nodes, ranks), kib * KIB)
