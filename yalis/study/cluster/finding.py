"""One result of a check, and the results of all ranks as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from yalis.launch.rank_info import list_ranks

OK, WARNING, IMPOSSIBLE = "ok", "warning", "not possible here"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    area: str
    name: str
    usable: bool
    detail: str  # what was found; if it is not good, also what to do
    needed: bool = False  # required: nothing runs without it
    warning: bool = False  # works, but slowly or not in every case

    @property
    def status(self) -> str:
        return WARNING if self.warning else OK if self.usable else IMPOSSIBLE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Return the finding that another rank sent."""
        return cls(**{name: value for name, value in values.items() if name != "status"})


@dataclass(frozen=True)
class RankFinding:
    """A finding and the ranks that have it. `differs`: other ranks have another one for the same check."""

    finding: Finding
    ranks: tuple[int, ...]
    differs: bool

    @property
    def detail(self) -> str:
        return f"{self.finding.detail} [{list_ranks(self.ranks)}]" if self.differs else self.finding.detail

    def to_json(self) -> dict[str, Any]:
        return {**self.finding.to_json(), "ranks": list(self.ranks)}


def merge_ranks(by_rank: Sequence[Sequence[Finding]]) -> list[RankFinding]:
    """Return the findings of all ranks, by rank, as one table in the order of the first rank that has each check."""
    table: dict[tuple[str, str], dict[Finding, list[int]]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            table.setdefault((finding.area, finding.name), {}).setdefault(finding, []).append(rank)
    areas = list(dict.fromkeys(area for area, _ in table))
    return [
        RankFinding(finding, tuple(ranks), len(ranks) < len(by_rank))
        for key, variants in sorted(table.items(), key=lambda item: areas.index(item[0][0]))
        for finding, ranks in variants.items()
    ]
