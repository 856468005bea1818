"""`ResultKind`: the definition of one kind of result.

A kind is one class in `yalis/study/results/kinds/`, which is found automatically. It declares the columns of its
rows, the form of its parameters, how two results are compared, and how a result is shown. Writer, reader,
`yalis bench compare`, `yalis report` and the plots use these classes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from yalis.errors import YalisError
from yalis.study.results.card import Card, Section, Table, data_column
from yalis.study.results.column import Column
from yalis.study.results.form import Count, Form, find_mismatch
from yalis.study.results.result import Result, Row, StoredResult, machine_of

_DEVICE = {"type": str, "name": str, "threads?": Count}
#: What every result has besides rows, whatever its kind.
_COMMON_FORM: Form = {
    "parameters": {"engine?": dict, "dtype?": str},
    "devices": [_DEVICE],
    "host": {"cores": Count, "cpu?": str, "machine?": str, "system?": str},
    "topology": ({"ranks": Count, "ranks_per_host": [Count, ...], "launcher?": str},),
    "versions": {"*": (str,)},
    "notes": [str],
}


@dataclass(frozen=True)
class Metric:
    """A column that `yalis bench compare` compares."""

    column: str
    higher_is_better: bool = False
    spread_over_steps: bool = False  # the spread is over many steps, so it is meaningful with few repeats too


class ResultKind:
    """Base class of result kinds; see the module docstring."""

    name: ClassVar[str]
    #: A column `status`, if there is one, is "ok" or the reason why the row has no values.
    columns: ClassVar[tuple[Column, ...]]
    #: Form of `Result.parameters`. Names with a meaning for `bench compare`: engine, dtype, warmup, repeats (below 5
    #: repeats, the spread is ignored).
    parameters: ClassVar[Form] = {}
    renamed_parameters: ClassVar[dict[str, str]] = {}  # new name of a parameter in files of older schema versions
    needs_devices: ClassVar[bool] = True  # a result names at least one device

    #: Columns that identify a row in both results of a comparison. A kind with metrics has at least one.
    identity: ClassVar[tuple[str, ...]] = ()
    #: Columns that are compared. Results of a kind without any cannot be compared.
    metrics: ClassVar[tuple[Metric, ...]] = ()
    #: Parameters that may differ between compared results, in addition to warmup, repeats and engine (of which model,
    #: load, load_seed and tokenizer must be equal). All others define the work, and must be equal.
    may_differ: ClassVar[frozenset[str]] = frozenset()
    #: Parameters that older versions did not record. They are compared only if both results have them.
    added_parameters: ClassVar[frozenset[str]] = frozenset()

    section: ClassVar[Section]  # of the report
    report_order: ClassVar[int] = 100  # kinds are shown in ascending order; the existing ones have 10 to 70

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def empty_row(self) -> Row:
        """Return a row with every column null, to be filled by a benchmark."""
        return dict.fromkeys(column.name for column in self.columns)

    # Reading and writing

    def upgrade(self, data: dict[str, Any], version: int) -> dict[str, Any]:
        """Return the JSON object of an older schema version with today's names, and with null for new columns."""
        rows, parameters = data.get("rows"), data.get("parameters")
        if isinstance(rows, list):
            data = {**data, "rows": [self.upgrade_row(row, version) for row in rows]}
        if isinstance(parameters, dict):
            renamed = {self.renamed_parameters.get(name, name): value for name, value in parameters.items()}
            data = {**data, "parameters": renamed}
        return data

    def upgrade_row(self, row: Any, version: int) -> Any:
        """Upgrade one row. A kind whose values changed overrides it."""
        if not isinstance(row, dict):
            return row
        new_names = {column.renamed_from: column.name for column in self.columns if column.renamed_from}
        added = dict.fromkeys(column.name for column in self.columns if column.since > version)
        return {**added, **{new_names.get(name, name): value for name, value in row.items()}}

    def check(self, data: dict[str, Any], label: str) -> None:
        """Raise an error that names the first violation of the schema in a result's JSON object."""
        self.check_rows(data["rows"], label)
        form = {"parameters": self.parameters, **({"devices": [dict, ...]} if self.needs_devices else {})}
        if mismatch := find_mismatch(data, _COMMON_FORM) or find_mismatch(data, form):
            raise YalisError(f"{label} has {mismatch}")

    def check_rows(self, rows: list[Any], label: str) -> None:
        if not rows:
            raise YalisError(f"{label} has no rows: nothing was measured; run the benchmark again")
        names = {column.name for column in self.columns}
        for number, row in enumerate(rows, 1):
            where = f"row {number} of {label}"
            if not isinstance(row, dict):
                raise YalisError(f"{where} is not an object")
            if set(row) != names:
                odd = sorted(set(row) ^ names)[0]
                raise YalisError(f"{where} {'has an unknown' if odd in row else 'lacks the'} column {odd!r}")
            for column in self.columns:
                column.check(row[column.name], where)
            for column in self.columns:
                column.check_in_row(row, where)

    # Comparing

    def check_comparable(self, before: Result, after: Result) -> None:
        """Raise if no ratio of these results makes sense. Kind, machine and parameters are checked elsewhere."""

    # Showing

    def title(self, result: Result) -> str:
        """Return the title of the card."""
        return result.command

    def table(self, result: Result) -> Table:
        """Return the table of the card; by default every column with its unit and spread."""
        spreads = {name for column in self.columns for name in (column.low, column.high)}
        return Table([data_column(column) for column in self.columns if column.name not in spreads], result.rows)

    def notes(self, result: Result) -> list[str]:
        """Return notes for wherever the plot is shown."""
        return list(result.notes)

    def remarks(self, result: Result) -> list[str]:
        """Return notes that are shown below the table only."""
        return []

    def has_plot(self, result: Result) -> bool:
        """Return whether this result can be plotted; by default, whether the kind defines `plot`."""
        return type(self).plot is not ResultKind.plot

    def plot(self, result: Result) -> Any:
        """Return a matplotlib figure. Decorate it with `drawing.styled`."""
        raise NotImplementedError

    def text(self, result: Result) -> Iterator[str]:
        """Yield the lines that the terminal shows."""
        columns = self.table(result).used_columns
        cells = [[column.head for column in columns]]
        cells += [[column.cell(row) or "" for column in columns] for row in self.table(result).rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        yield self.title(result)
        for line in cells:
            aligned = (
                cell.ljust(width) if column.text else cell.rjust(width)
                for column, cell, width in zip(columns, line, widths, strict=True)
            )
            yield "  ".join(aligned).rstrip()
        yield from self.notes(result)

    def card(self, source: StoredResult) -> Card:
        result = source.result
        draw = partial(self.plot, result) if self.has_plot(result) else None
        return Card(
            self.name, self.title(result), [source], self.table(result), draw, self.notes(result), self.remarks(result)
        )

    def cards(self, sources: Sequence[StoredResult]) -> list[Card]:
        """Return the cards for all results of this kind in a report: one each, unless a kind joins several."""
        return [self.card(source) for source in sources]

    def superseded(self, sources: Sequence[StoredResult]) -> set[Path]:
        """Return files that need not be shown because one of `sources`, which are of this kind, replaces them."""
        return set()

    def machines(self, result: Result) -> list[dict[str, Any]]:
        """Return the machines a result was measured on."""
        return [machine_of(result)]

    def renumber_machines(self, result: Result, machines: Sequence[dict[str, Any]]) -> Result:
        """Return the result with rows that refer to a machine by its number, from 1, in the list `machines`."""
        return result
