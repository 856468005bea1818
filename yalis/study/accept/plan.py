"""What `yalis accept` does, and the ranks of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from yalis.comm.topology import Topology
from yalis.launch.world import World
from yalis.study.results.result import Result

#: Communication backends in the order in which they are tried: NVSHMEM comes last, because a failure of its start may
#: end the job.
BACKENDS = ("torch", "hierarchical", "mpi", "nvrar")
#: Names of files in the output folder.
MACHINE, PAGE = "machine.json", "acceptance.html"


@dataclass(frozen=True)
class AcceptPlan:
    """The arguments of the command, equal on all ranks."""

    quick: bool = False
    device: str = "auto"
    backends: tuple[str, ...] = BACKENDS
    ranks_per_node: int | None = None
    ranks_per_gpu: int = 1
    machine: str = ""  # whose predictions are shown; default: one fitted to the times of this run
    join_timeout: float = 300.0

    @property
    def storm_operations(self) -> int:
        return 150 if self.quick else 5000

    @property
    def sizes(self) -> tuple[int, ...]:
        return (16 << 10, 128 << 10, 1 << 20) if self.quick else tuple(8 << 10 << step for step in range(10))

    @property
    def repeats(self) -> int | None:
        return 6 if self.quick else None

    @property
    def output_len(self) -> int:
        return 8 if self.quick else 64


@dataclass
class Job:
    """The ranks of a run, and what rank 0 has collected. Every stage runs on every rank."""

    world: World
    plan: AcceptPlan
    device: torch.device
    topology: Topology
    out: Path
    command: str
    report: Callable[[str], None]  # shows progress on rank 0
    usable: list[str] = field(default_factory=list)  # backends
    results: list[Result] = field(default_factory=list)
