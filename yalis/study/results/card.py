"""What a report shows of a result: sections, cards, tables, and functions that format table cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from yalis.study.results.column import Column
from yalis.study.results.result import Row, StoredResult

CellText = Callable[[Row], "str | None"]  # None: unknown


@dataclass(frozen=True)
class TableColumn:
    """A column of a shown table."""

    head: str
    cell: CellText
    text: bool = False  # aligned to the left; numbers are aligned to the right
    spread: CellText | None = None  # 10th to 90th percentile, shown below the value


@dataclass(frozen=True)
class Table:
    columns: Sequence[TableColumn]
    rows: Sequence[Row]

    @property
    def used_columns(self) -> list[TableColumn]:
        """The columns that have a value in some row."""
        return [column for column in self.columns if any(column.cell(row) for row in self.rows)]


@dataclass(frozen=True)
class Card:
    """A plot with its table and notes."""

    kind: str
    title: str
    sources: Sequence[StoredResult]  # all of one machine, except for a scaling study
    table: Table
    draw: Callable[[], Any] | None  # returns a matplotlib figure; None: the card has no plot
    notes: Sequence[str] = ()  # shown wherever the plot is shown
    remarks: Sequence[str] = ()  # shown below the table only


@dataclass(frozen=True)
class Section:
    """A heading of the report. Kinds that share a section name the same object."""

    title: str
    about: str


SHARE_OF_FLOOR = Section(
    "Share of the floor",
    "The floor is the roofline lower bound: the time to read every byte once at the device's measured bandwidth, or to "
    "multiply at its measured rate, whichever is longer.",
)


def fixed(name: str, digits: int, unit: str = "") -> CellText:
    return lambda row: None if row[name] is None else f"{row[name]:,.{digits}f}{unit}"


def spread_column(head: str, name: str, digits: int, unit: str) -> TableColumn:
    """Return a column of medians with the spread below, which keeps the table narrow."""
    return TableColumn(head, fixed(name, digits, unit), spread=spread_text(f"{name}_low", f"{name}_high", digits))


def spread_text(low: str, high: str, digits: int) -> CellText:
    """Format a range such as "1.50..2.50"; None for a single repeat, whose ends are equal."""
    return lambda row: (
        None if row[low] is None or row[low] == row[high] else f"{row[low]:,.{digits}f}..{row[high]:,.{digits}f}"
    )


def data_column(column: Column) -> TableColumn:
    """Return a table column that shows a column of the data as it is, with its unit and spread."""

    def cell(row: Row) -> str | None:
        value = row[column.name]
        if not isinstance(value, float):
            return None if value is None else str(value)
        return f"{short_number(value)} {column.unit}".strip()

    spread = spread_text(column.low, column.high, 2) if column.low else None
    return TableColumn(column.name.replace("_", " "), cell, text=column.type is str, spread=spread)


def rate(name: str, unit: str) -> CellText:
    """Format a column of 1e9 per second with a fitting prefix, such as "4.21 TB/s"."""

    def cell(row: Row) -> str | None:
        value = row[name]
        if not value:
            return None
        scale, letter = (1e3, "T") if value >= 1e3 else (1, "G") if value >= 1 else (1e-3, "M")
        return f"{short_number(value / scale)} {letter}{unit}"

    return cell


def percent(name: str, digits: int = 0) -> CellText:
    return lambda row: None if row[name] is None else f"{row[name]:.{digits}%}"


def short_number(value: float) -> str:
    """Format with up to two decimals, fewer for large values."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def engine_name(row: Row) -> str:
    return f"{row['engine']} {row['version']}".strip()


def status_text(row: Row) -> str:
    """Return why a row failed; empty if it did not."""
    return "" if row["status"] == "ok" else str(row["status"])
