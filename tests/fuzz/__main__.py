"""The command line of the fuzzer: runs the inputs, prints a table, and writes it as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.limits import LIMIT_BYTES, LIMIT_S
from tests.fuzz.runner import FAILURES, Outcome, run_inputs
from tests.fuzz.targets import TARGETS, make_input
from yalis.errors import YalisError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="inputs, over all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="may be repeated; default: all")
    parser.add_argument("--only", type=int, help="run this input of one --target in this process")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--failed", type=Path, default=Path("build/fuzz"), help="folder for inputs that failed")
    given = parser.parse_args(arguments)
    targets = given.target or list(TARGETS)
    if given.only is not None:
        return _run_one(targets[0], given.seed, given.only)
    items = [(targets[i % len(targets)], i // len(targets)) for i in range(given.count)]
    Random(given.seed).shuffle(items)  # so that the processes have equal shares of the slow targets
    outcomes: list[Outcome] = []
    begin = time.monotonic()

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.outcome in FAILURES:
            _save_failure(outcome, given.seed, given.failed)
        if len(outcomes) % 100 == 0 or len(outcomes) == len(items):
            failed = sum(one.outcome in FAILURES for one in outcomes)
            rate = len(outcomes) / (time.monotonic() - begin)
            print(f"{len(outcomes)} of {len(items)} inputs, {failed} failed, {rate:.0f}/s", flush=True)

    run_inputs(items, given.seed, given.processes, report)
    summary = summarize(outcomes, given.seed, time.monotonic() - begin)
    print(format_table(summary))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["failures"] else 0


def _run_one(target: str, seed: int, index: int) -> int:
    data = make_input(target, seed, index)
    print(f"{len(data)} bytes: {data[:300]!r}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            TARGETS[target].run(data, Path(folder))
            print("accepted")
        except YalisError as error:
            print(f"refused: {error}")
    return 0


def _save_failure(outcome: Outcome, seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.target.replace(' ', '-')}-{seed}-{outcome.index}"
    path.write_bytes(make_input(outcome.target, seed, outcome.index))
    print(f"{outcome.outcome}: {outcome.message}")
    print(f"  again: python -m tests.fuzz --target '{outcome.target}' --seed {seed} --only {outcome.index}   # {path}")


def summarize(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """Return the results as JSON: a row for each target, and the failures."""
    rows = []
    for target in TARGETS:
        own = [one for one in outcomes if one.target == target]
        if own:
            counts = Counter(one.outcome for one in own)
            rows.append(
                {
                    "target": target,
                    "inputs": len(own),
                    **{name: counts[name] for name in ("accepted", "refused", *FAILURES)},
                    "different_refusals": len({one.message for one in own if one.outcome == "refused"}),
                    "slowest_s": round(max(one.seconds for one in own), 3),
                    "peak_mib": round(max(one.bytes for one in own) / 2**20, 1),
                }
            )
    failures = sorted(
        ({"target": one.target, "index": one.index, "outcome": one.outcome, "message": one.message} for one in outcomes
         if one.outcome in FAILURES),
        key=lambda one: (one["target"], one["index"]),
    )  # fmt: skip
    return {
        "seed": seed,
        "inputs": len(outcomes),
        "limit_s": LIMIT_S,
        "limit_mib": LIMIT_BYTES >> 20,
        "seconds": round(seconds),
        "python": platform.python_version(),
        "rows": rows,
        "failures": failures,
    }


def format_table(summary: dict[str, Any]) -> str:
    """Return the rows as text, and the failures counted by message."""
    columns = list(summary["rows"][0])
    lines = [columns, *([str(row[name]) for name in columns] for row in summary["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    kinds = Counter((one["target"], one["outcome"], one["message"][:160]) for one in summary["failures"])
    text += [f"{count} x {target}: {outcome}: {message}" for (target, outcome, message), count in kinds.most_common()]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
