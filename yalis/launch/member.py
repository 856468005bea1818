"""One rank, as the others know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    rank: int
    host: str
    node: int  # index of its machine, in order of each machine's first rank
    local_rank: int  # among the ranks of its machine
    address: str  # IP under which the others reach it
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def list_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1 and 2", "ranks 1, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
