"""Interleaved runs of several engines, so that a machine that slows down affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from yalis.study.peers.peer import explain_failure

Engine = TypeVar("Engine")
Input = TypeVar("Input")
Output = TypeVar("Output")
Report = Callable[[str], None]


def run_interleaved(
    engines: Sequence[tuple[str, Engine | str]],
    inputs: Sequence[Input],
    warmup: int,
    run: Callable[[Engine, Input, Report], Output],
    report: Report,
) -> list[list[Output] | str]:
    """Run every engine on every input, input by input; the first `warmup` outputs are dropped.

    `engines` are pairs of a name and an engine, or the reason why it could not start. Returns for each engine its
    outputs, or why it has none. An engine that fails runs no more, but a failure of the first one, YALIS, is raised.
    """
    outputs: list[list[Output] | str] = [engine if isinstance(engine, str) else [] for _, engine in engines]
    for turn, one_input in enumerate(inputs):
        counts = turn >= warmup
        phase = f"repeat {turn - warmup + 1}/{len(inputs) - warmup}" if counts else "warm-up"
        for index, (name, engine) in enumerate(engines):
            kept = outputs[index]
            if isinstance(engine, str) or isinstance(kept, str):
                continue
            label = f"{name}, {phase}"
            report(label)
            try:
                output = run(engine, one_input, _with_prefix(label, report))
            except Exception as error:
                if index == 0:
                    raise
                outputs[index] = explain_failure(error)
                continue
            if counts:
                kept.append(output)
    return outputs


def _with_prefix(label: str, report: Report) -> Report:
    return lambda text: report(f"{label}: {text}")
