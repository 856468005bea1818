"""Compare two results of the same benchmark and find what changed by more than the noise.

Rows are matched by the identity columns of their kind. A metric changed if each median is outside the other result's
spread. Without a spread, or with too few repeats, it changed if it differs by more than a given share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from yalis.errors import YalisError
from yalis.study import results
from yalis.study.results import KINDS, Result, Row
from yalis.study.results.column import Column
from yalis.study.results.kind import Metric, ResultKind

MIN_REPEATS = 5  # with fewer, the spread is not meaningful

Verdict = Literal["faster", "slower", "the same", "gone", "new", "failed", "fixed"]

# Parameters that may differ in results of any kind.
_MAY_DIFFER = frozenset({"engine", "warmup", "repeats"})
# Engine settings that define the work, and must be equal.
_WORK_SETTINGS = ("model", "load", "load_seed", "tokenizer", "routing")


@dataclass(frozen=True)
class Change:
    """One metric of one setting, before and after. The value of a result without that setting is None."""

    setting: str
    metric: str
    unit: str
    before: float | None
    after: float | None
    verdict: Verdict
    sure: bool  # the verdict is based on a spread

    @property
    def ratio(self) -> float | None:
        return None if self.before is None or self.after is None else self.after / self.before


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    warnings: list[str]  # versions and settings that differ

    @property
    def slower(self) -> list[Change]:
        """The changes for the worse: slower, or failed."""
        return [change for change in self.changes if change.verdict in ("slower", "failed")]


def compare(before: Result, after: Result, noise: float) -> Comparison:
    """Compare two results. `noise` is the share by which a metric without a meaningful spread may differ."""
    if not 0 <= noise < 1:
        raise YalisError(f"noise is {noise:g}; give a share from 0 to below 1, such as 0.05")
    _check_comparable(before, after)
    kind = results.kind_of(before)
    old, new = ({_identity(kind, row): row for row in result.rows} for result in (before, after))
    few_repeats = min(result.parameters.get("repeats", MIN_REPEATS) for result in (before, after)) < MIN_REPEATS
    changes: list[Change] = []
    for key in dict.fromkeys([*old, *new]):
        changes += _compare_rows(kind, key, old.get(key), new.get(key), noise, few_repeats)
    if not any(change.ratio is not None for change in changes):
        raise YalisError("the two results have no setting in common that both measured; give results of the same work")
    return Comparison(changes, list(_list_differences(before, after)))


def _check_comparable(before: Result, after: Result) -> None:
    if before.kind != after.kind:
        raise YalisError(f"one result is of kind {before.kind} and one of {after.kind}; give two of the same benchmark")
    kind = results.kind_of(before)
    if not kind.metrics:
        accepted = ", ".join(name for name, one in KINDS.items() if one.metrics)
        raise YalisError(f"results of kind {before.kind} cannot be compared; accepted: {accepted}")
    kind.check_comparable(before, after)
    old_machine, new_machine = results.machine_of(before), results.machine_of(after)
    for name, value in old_machine.items():
        if new_machine[name] != value:
            raise YalisError(
                f"the results are from different machines ({name}: {_shorten(value)} and "
                f"{_shorten(new_machine[name])}), so they cannot be compared; measure both on one"
            )
    old, new = before.parameters, after.parameters
    skipped = _MAY_DIFFER | kind.may_differ | _unrecorded(kind, old, new)
    pairs = [(name, old.get(name), new.get(name)) for name in sorted((old.keys() | new.keys()) - skipped)]
    engines = [{"routing": "model", **one.get("engine", {})} for one in (old, new)]  # older versions had no other
    pairs += [(name, engines[0].get(name), engines[1].get(name)) for name in _WORK_SETTINGS]
    for name, one, other in pairs:
        if one != other:
            raise YalisError(f"the results are not of the same work: {name} is {_shorten(one)} and {_shorten(other)}")


def _unrecorded(kind: ResultKind, old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """Return parameters that one result lacks because an older version did not record them.

    A missing digest of the prompts is ignored only without a dataset: then the other parameters define the prompts."""
    digests = old.get("prompts_digest"), new.get("prompts_digest")
    names = {"prompts_digest"} if None in digests and old.get("dataset") is None else set()
    return names | {name for name in kind.added_parameters if (name in old) != (name in new)}


def _list_differences(before: Result, after: Result) -> Iterator[str]:
    """Yield the other settings and versions that differ, which may explain a change."""
    old, new = before.parameters, after.parameters
    for name in ("warmup", "repeats", "mpi"):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} and {new.get(name)}"
    engines = old.get("engine", {}), new.get("engine", {})
    for name in dict.fromkeys([*engines[0], *engines[1]]):
        if engines[0].get(name) != engines[1].get(name):
            yield f"engine's {name}: {_shorten(engines[0].get(name))} and {_shorten(engines[1].get(name))}"
    for name in ("threads", "card"):
        values = [[device.get(name) for device in result.devices] for result in (before, after)]
        if values[0] != values[1]:
            yield f"{name}: {_shorten(values[0])} and {_shorten(values[1])}"
    if before.topology is not None and after.topology is not None and before.topology != after.topology:
        yield f"ranks per host: {before.topology['ranks_per_host']} and {after.topology['ranks_per_host']}"
    for name in dict.fromkeys([*before.versions, *after.versions]):
        if before.versions.get(name) != after.versions.get(name):
            yield f"{name}: {before.versions.get(name)} and {after.versions.get(name)}"
    if before.host.get("system") != after.host.get("system"):
        yield f"system: {before.host.get('system')} and {after.host.get('system')}"
    if before.revision != after.revision:
        yield f"revision: {_shorten(before.revision)} and {_shorten(after.revision)}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _identity(kind: ResultKind, row: Row) -> tuple[str, ...]:
    return tuple(f"{row[name]}" for name in kind.identity)


def _compare_rows(
    kind: ResultKind, key: tuple[str, ...], old: Row | None, new: Row | None, noise: float, few_repeats: bool
) -> Iterator[Change]:
    pairs = zip(kind.identity, key, strict=True)
    setting = ", ".join(f"{name} {value}" for name, value in pairs if value not in ("", "None", "{}"))
    for metric in kind.metrics:
        before, after = (_value(metric, row) for row in (old, new))
        column = kind.column(metric.column)
        sure = True
        verdict: Verdict
        if before is None or after is None:
            if before is after is None:
                continue
            without_value = new if before is not None else old
            if without_value is not None and without_value.get("status", "ok") == "ok":
                continue  # an older version did not record it
            if without_value is None:
                verdict = "gone" if new is None else "new"
            else:
                verdict = "failed" if after is None else "fixed"
        else:
            assert old is not None
            assert new is not None
            ignore_spread = few_repeats and not metric.spread_over_steps
            verdict, sure = _judge(metric, column, old, new, noise, ignore_spread)
        yield Change(setting, metric.column, column.unit, before, after, verdict, sure)


def _value(metric: Metric, row: Row | None) -> float | None:
    """Return a row's value, or None if the row failed. A row with wrong output may still have a time."""
    if row is None or row.get("status", "ok") != "ok":
        return None
    value: float | None = row[metric.column]
    return value


def _judge(
    metric: Metric, column: Column, old: Row, new: Row, noise: float, ignore_spread: bool
) -> tuple[Verdict, bool]:
    """Return the verdict, and whether it is based on a spread."""
    before, after = old[column.name], new[column.name]
    old_spread, new_spread = _spread(column, old), _spread(column, new)
    if ignore_spread or old_spread is None or new_spread is None:
        sure, changed = False, abs(after - before) > noise * before
    else:
        sure, changed = True, not _is_within(after, old_spread) and not _is_within(before, new_spread)
    if not changed:
        return "the same", sure
    return ("faster" if (after > before) == metric.higher_is_better else "slower"), sure


def _is_within(value: float, spread: tuple[float, float]) -> bool:
    return spread[0] <= value <= spread[1]


def _spread(column: Column, row: Row) -> tuple[float, float] | None:
    """Return the 10th and 90th percentile of a row, or None if there is only one repeat."""
    if not column.low or row[column.low] is None or row[column.low] == row[column.high]:
        return None
    return row[column.low], row[column.high]
