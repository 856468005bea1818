"""The ranks of a job as one of them sees it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisFailure


@dataclass(frozen=True)
class Member:
    rank: int
    host: str
    node: int  # index of its machine, in order of each machine's first rank
    local_rank: int  # among the ranks of its machine
    address: str  # IP under which the others reach it
    pid: int


class World:
    """All ranks of a job."""

    def __init__(self, rank: int, members: tuple[Member, ...]) -> None:
        self.rank, self.members = rank, members
        self.failure: str | None = None

    @classmethod
    def alone(cls) -> World:
        """A job of this process only."""
        return cls(0, (Member(0, socket.gethostname(), 0, 0, "127.0.0.1", os.getpid()),))

    @property
    def size(self) -> int:
        return len(self.members)

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's value, by rank; everyone calls this."""
        return [value]

    def explain(self, error: BaseException) -> YalisFailure | None:
        """What ended the job, if `error` follows from it."""
        return None

    def close(self) -> None:
        """Leave the job."""
