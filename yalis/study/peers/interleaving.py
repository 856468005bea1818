"""Engines take turns within each repeat, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from yalis.study.peers.peer import explain_failure

Engine = TypeVar("Engine")
Work = TypeVar("Work")
Taken = TypeVar("Taken")
Report = Callable[[str], None]


def take_turns(
    engines: Sequence[tuple[str, Engine | str]],
    works: Sequence[Work],
    warmup: int,
    run: Callable[[Engine, Work, Report], Taken],
    report: Report,
) -> list[list[Taken] | str]:
    """What each engine's runs gave from the warm-up on, or why it has none.

    An engine is named, and text in its place says why it is not there. Ours is the first: its error ends the benchmark.
    """
    taken: list[list[Taken] | str] = [engine if isinstance(engine, str) else [] for _, engine in engines]
    for turn, work in enumerate(works):
        counts = turn >= warmup
        kind = f"repeat {turn - warmup + 1}/{len(works) - warmup}" if counts else "warm-up"
        for index, (name, engine) in enumerate(engines):
            kept = taken[index]
            if isinstance(engine, str) or isinstance(kept, str):
                continue
            label = f"{name}, {kind}"
            report(label)
            try:
                found = run(engine, work, _under(label, report))
            except Exception as error:
                if index == 0:
                    raise
                taken[index] = explain_failure(error)
                continue
            if counts:
                kept.append(found)
    return taken


def _under(label: str, report: Report) -> Report:
    return lambda text: report(f"{label}: {text}")
