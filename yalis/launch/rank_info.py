"""The entries of the table of ranks that every rank receives at the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankInfo(NamedTuple):
    """One rank of a job: where it runs and how to reach it."""

    rank: int
    host: str
    node: int  # index of its host, in order of each host's lowest rank
    local_rank: int  # index among the ranks of its host
    address: str  # IP address under which the other ranks reach it
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1 and 2" or "ranks 1, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
