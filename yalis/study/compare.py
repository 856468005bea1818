"""What changed between two results of the same benchmark, beyond the noise that their repeats show.

Rows are the same setting where all that identifies them is equal. A figure changed where each of the two medians lies
outside the other's spread; where a row has no spread, or one of too few repeats, where the difference is more than a
share that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from yalis import results
from yalis.errors import YalisError
from yalis.results import Result

FEWEST = 5  # repeats whose spread says something

Row = dict[str, Any]
Verdict = Literal["faster", "slower", "the same", "gone", "new", "failed", "mended"]


@dataclass(frozen=True)
class Figure:
    """A column that is compared, and those that hold its spread."""

    column: str
    unit: str
    low: str = ""  # no spread is known where these are empty
    high: str = ""
    more_is_better: bool = False
    of_steps: bool = False  # the spread is one of many steps, however few repeats there were


@dataclass(frozen=True)
class Kind:
    """How results of a kind are compared."""

    identity: tuple[str, ...]  # columns by which a row is found again
    figures: tuple[Figure, ...]


KINDS = {
    "latency": Kind(
        ("engine", "batch", "prompt_len", "output_len"),
        (
            Figure("decode_ms", "ms", "decode_ms_low", "decode_ms_high", of_steps=True),
            Figure("first_token_ms", "ms", "first_token_ms_low", "first_token_ms_high"),
            Figure("seconds", "s", "seconds_low", "seconds_high"),
        ),
    ),
    "throughput": Kind(
        ("engine", "requests", "prompt_tokens", "rate"),
        (
            Figure("tokens_per_s", "tokens/s", "tokens_per_s_low", "tokens_per_s_high", more_is_better=True),
            Figure("seconds", "s", "seconds_low", "seconds_high"),
            Figure("first_token_ms", "ms"),
            Figure("token_ms", "ms"),
        ),
    ),
    "scaling": Kind(("ranks", "split", "allreduce"), (Figure("seconds", "s", "seconds_low", "seconds_high"),)),
    "pipeline": Kind(("stages", "micro_batches"), (Figure("seconds", "s", "seconds_low", "seconds_high"),)),
    "allreduce": Kind(
        ("backend", "options", "dtype", "bytes", "mode", "delay_us"), (Figure("median_us", "us", "low_us", "high_us"),)
    ),
    "kernels": Kind(("kernel", "shape", "rows"), (Figure("us", "us", "us_low", "us_high"),)),
}
#: Parameters that say what was measured with; others say what was measured, and must be equal.
_HOW = {
    *("engine", "warmup", "repeats", "peer", "read_bytes_per_s", "matmul_flops_per_s", "answers", "machines"),
    "read_by",
    *("baselines", "links", "ranks", "schemes", "allreduces", "minutes", "node_ranks", "backends", "sizes", "batch"),
    *("baseline", "tune", "join_timeout", "rows", "micro_batches", "start", "mpi"),
    *("workload", "load_seconds", "graph_bytes"),
}
_WHAT_ENGINE = ("model", "load", "load_seed", "tokenizer")  # of the engine's settings, those that are the work itself


@dataclass(frozen=True)
class Change:
    """One figure of one setting, before and after; those of a setting that only one result has are None."""

    setting: str
    figure: Figure
    before: float | None
    after: float | None
    verdict: Verdict
    sure: bool  # a spread was there to tell it from noise

    @property
    def ratio(self) -> float | None:
        return None if self.before is None or self.after is None else self.after / self.before


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    warnings: list[str]  # settings that differ

    @property
    def slower(self) -> list[Change]:
        """What got worse: slower, or failed."""
        return [change for change in self.changes if change.verdict in ("slower", "failed")]


def compare(before: Result, after: Result, noise: float) -> Comparison:
    """`noise`: the share by which a figure without a spread, or with one of few repeats, may differ."""
    if not 0 <= noise < 1:
        raise YalisError(f"noise is {noise:g}; give a share from 0 to below 1, such as 0.05")
    _check_comparable(before, after)
    kind = KINDS[before.kind]
    old, new = ({_identity(kind, row): row for row in one.rows} for one in (before, after))
    few = min(one.parameters.get("repeats", FEWEST) for one in (before, after)) < FEWEST
    changes: list[Change] = []
    for key in dict.fromkeys([*old, *new]):
        changes += _row_changes(kind, key, old.get(key), new.get(key), noise, few)
    if not any(change.ratio is not None for change in changes):
        raise YalisError("the two results have no setting in common that both measured; give results of the same work")
    return Comparison(changes, list(_differences(before, after)))


def _check_comparable(before: Result, after: Result) -> None:
    if before.kind != after.kind:
        raise YalisError(f"one result is of kind {before.kind} and one of {after.kind}; give two of the same benchmark")
    if before.kind not in KINDS:
        raise YalisError(f"results of kind {before.kind} are not compared; accepted: {', '.join(KINDS)}")
    if before.kind == "scaling":
        machines = [one.parameters["machines"] for one in (before, after)]
        if machines[0] != machines[1] or len(machines[0]) != 1:
            raise YalisError("the two studies are not of one kind of machine, and no ratio joins machines")
    ours, theirs = results.machine(before), results.machine(after)
    for name, value in ours.items():
        if theirs[name] != value:
            raise YalisError(
                f"the results are from different machines ({name}: {_short(value)} and {_short(theirs[name])}), and no "
                "ratio joins machines; measure both on one"
            )
    old, new = before.parameters, after.parameters
    skipped = _HOW | _untold(old, new)
    for name in sorted(old.keys() | new.keys()):
        if name not in skipped and old.get(name) != new.get(name):
            raise YalisError(
                f"the results are not of the same work: {name} is {_short(old.get(name))} and {_short(new.get(name))}"
            )
    for name in _WHAT_ENGINE:
        one, other = (facts.get("engine", {}).get(name) for facts in (old, new))
        if one != other:
            raise YalisError(f"the results are not of the same work: {name} is {_short(one)} and {_short(other)}")


def _untold(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """What an older yalis did not tell: a digest of the prompts (without a dataset, the other parameters say what was
    drawn), and the prompts of kernels, of which it measured none."""
    digests = old.get("prompts_digest"), new.get("prompts_digest")
    untold = {"prompts_digest"} if None in digests and old.get("dataset") is None else set()
    return untold | {name for name in ("prompts", "prompt_len") if (name in old) != (name in new)}


def _differences(before: Result, after: Result) -> Iterator[str]:
    """What else differs, and may be why."""
    old, new = before.parameters, after.parameters
    for name in ("warmup", "repeats", "mpi"):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} and {new.get(name)}"
    engines = old.get("engine", {}), new.get("engine", {})
    for name in dict.fromkeys([*engines[0], *engines[1]]):
        if engines[0].get(name) != engines[1].get(name):
            yield f"engine's {name}: {_short(engines[0].get(name))} and {_short(engines[1].get(name))}"
    for name in ("threads", "card"):
        told = [[device.get(name) for device in one.devices] for one in (before, after)]
        if told[0] != told[1]:
            yield f"{name}: {_short(told[0])} and {_short(told[1])}"
    if before.topology is not None and after.topology is not None and before.topology != after.topology:
        yield f"ranks of each host: {before.topology['ranks_per_host']} and {after.topology['ranks_per_host']}"
    for name in dict.fromkeys([*before.versions, *after.versions]):
        if before.versions.get(name) != after.versions.get(name):
            yield f"{name}: {before.versions.get(name)} and {after.versions.get(name)}"
    if before.host.get("system") != after.host.get("system"):
        yield f"system: {before.host.get('system')} and {after.host.get('system')}"
    if before.revision != after.revision:
        yield f"revision: {_short(before.revision)} and {_short(after.revision)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _identity(kind: Kind, row: Row) -> tuple[str, ...]:
    return tuple(f"{row[name]}" for name in kind.identity)


def _row_changes(
    kind: Kind, key: tuple[str, ...], old: Row | None, new: Row | None, noise: float, few: bool
) -> Iterator[Change]:
    pairs = zip(kind.identity, key, strict=True)
    setting = ", ".join(f"{name} {value}" for name, value in pairs if value not in ("", "None", "{}"))
    for figure in kind.figures:
        before, after = (_value(figure, row) for row in (old, new))
        sure = True
        verdict: Verdict
        if before is None or after is None:
            if before is after is None:
                continue
            there = new if before is not None else old  # the row without a figure, if there is one
            if there is not None and there.get("status", "ok") == "ok":
                continue  # an older yalis did not tell it
            if there is None:
                verdict = "gone" if new is None else "new"
            else:
                verdict = "failed" if after is None else "mended"
        else:
            assert old is not None
            assert new is not None
            verdict, sure = _judge(figure, old, new, noise, few and not figure.of_steps)
        yield Change(setting, figure, before, after, verdict, sure)


def _value(figure: Figure, row: Row | None) -> float | None:
    """What counts: a row that failed may still carry the time it took to be wrong."""
    if row is None or row.get("status", "ok") != "ok":
        return None
    value: float | None = row[figure.column]
    return value


def _judge(figure: Figure, old: Row, new: Row, noise: float, few: bool) -> tuple[Verdict, bool]:
    """Whether it changed, and whether a spread was there to tell, of more than a few repeats."""
    before, after = old[figure.column], new[figure.column]
    old_span, new_span = _span(figure, old), _span(figure, new)
    if few or old_span is None or new_span is None:
        sure, changed = False, abs(after - before) > noise * before
    else:
        sure, changed = True, not _within(after, old_span) and not _within(before, new_span)
    if not changed:
        return "the same", sure
    return ("faster" if (after > before) == figure.more_is_better else "slower"), sure


def _within(value: float, span: tuple[float, float]) -> bool:
    return span[0] <= value <= span[1]


def _span(figure: Figure, row: Row) -> tuple[float, float] | None:
    """A row's spread; one repeat has none."""
    if not figure.low or row[figure.low] is None or row[figure.low] == row[figure.high]:
        return None
    return row[figure.low], row[figure.high]
