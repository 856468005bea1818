"""The columns of a result's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from yalis.errors import YalisError
from yalis.study.results.form import TYPE_NAMES, has_type


@dataclass(frozen=True)
class Column:
    """A column that every row of a kind has. Its value may be null unless stated otherwise."""

    name: str
    type: type
    unit: str = ""
    required: bool = False  # never null
    required_if_ok: bool = False  # not null in a row that was measured
    positive: bool = False
    since: int = 1  # schema version that added it; null in rows of older files
    renamed_from: str = ""  # its name in older files
    low: str = ""  # columns of its 10th and 90th percentile
    high: str = ""
    spread_required: bool = False  # both are given wherever the value is

    def check(self, value: Any, where: str) -> None:
        """Raise unless `value` may be stored in this column. `where` starts the message: "row 3 of a.json"."""
        if value is None and not self.required:
            return
        if not has_type(value, self.type):
            raise YalisError(f"{where} has {value!r} as {self.name!r}; it should be {TYPE_NAMES[self.type]}")
        if self.positive and value <= 0:
            raise YalisError(f"{where} has {value!r} as {self.name!r}; it should be above 0")

    def check_in_row(self, row: dict[str, Any], where: str) -> None:
        """Raise if the value is missing from a row that was measured, or if it is outside its own spread."""
        value = row[self.name]
        if value is None:
            if self.required_if_ok and row.get("status", "ok") == "ok":
                raise YalisError(f"{where} has no {self.name!r}, although its status is ok")
            return
        if not self.low:
            return
        low, high = row[self.low], row[self.high]
        if low is None and high is None and not self.spread_required:
            return
        # Percentiles are interpolated and may be off by a rounding error.
        if low is None or high is None or not low * (1 - 1e-9) <= value <= high * (1 + 1e-9):
            raise YalisError(f"{where} has {value!r} as {self.name!r}, from {low!r} to {high!r}")


def with_spread(column: Column, since: int | None = None, spread_required_if_ok: bool = False) -> tuple[Column, ...]:
    """Return a column and the `_low` and `_high` columns of its spread.

    `since` and `spread_required_if_ok` are those of the spread; by default it was added together with the column."""
    low, high = f"{column.name}_low", f"{column.name}_high"
    added = column.since if since is None else since
    end = Column(low, column.type, column.unit, since=added, required_if_ok=spread_required_if_ok)
    return replace(column, low=low, high=high), end, replace(end, name=high)
