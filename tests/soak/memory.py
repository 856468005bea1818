"""Samples memory, descriptors and threads of processes while a test runs, and finds growth."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.growth import fit_growth

#: Growth in MiB per minute that counts as noise. It is written to the result.
NOISE_MIB = 0.1
#: The fraction of the run that is not evaluated. In it, KV blocks are touched for the first time, and the malloc arena
#: of each thread that runs steps grows to the size that the largest step needs.
WARM_UP = 1 / 3


class MemorySampler:
    """Samples the processes once a second within a `with` block; `samples` has them afterwards."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.samples: list[dict[str, Any]] = []

    def __enter__(self) -> MemorySampler:
        self._file = tempfile.NamedTemporaryFile()
        argv = [sys.executable, "-m", "tests.soak.sampler", self._file.name, *map(str, self._pids)]
        self._process = subprocess.Popen(argv)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self.samples = [json.loads(line) for line in Path(self._file.name).read_text().splitlines()]
        self._file.close()

    def rows(self) -> list[dict[str, Any]]:
        """Return growth of memory, descriptors and threads of each process."""
        return [self._summarize(rank) for rank in range(len(self._pids))]

    def series(self) -> dict[str, Any]:
        """Return the times of the samples and the memory of each process."""
        memory = [[one["ranks"][rank]["uss_mib"] for one in self.samples] for rank in range(len(self._pids))]
        return {"seconds": [one["s"] for one in self.samples], "uss_mib": memory}

    def _summarize(self, rank: int) -> dict[str, Any]:
        kept = [one for one in self.samples if one["s"] >= WARM_UP * self.samples[-1]["s"]]
        own = [one["ranks"][rank] for one in kept]
        fitted = fit_growth([one["s"] for one in kept], [one["uss_mib"] for one in own])
        row: dict[str, Any] = {"rank": rank}
        row["uss_mib"] = {"first": own[0]["uss_mib"], "last": own[-1]["uss_mib"]}
        row["uss_mib"] |= {key: round(value, 4) for key, value in asdict(fitted).items()}
        for name in ("descriptors", "threads"):
            row[name] = {"first": own[0][name], "last": own[-1][name], "most": max(one[name] for one in own)}
        return row


def find_growth(row: dict[str, Any]) -> list[str]:
    """Return what has grown in a process, as sentences."""
    problems = []
    if row["uss_mib"]["low"] > NOISE_MIB:
        problems.append(f"rank {row['rank']} grows by {row['uss_mib']['per_minute']:.2f} MiB/min")
    for name in ("descriptors", "threads"):
        if row[name]["last"] > row[name]["first"]:
            problems.append(f"rank {row['rank']} has {row[name]['last']:g} {name}, and had {row[name]['first']:g}")
    return problems


def format_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the growth of each process as the lines of a table."""
    lines = [f"{'rank':<6}{'USS MiB':>18}{'MiB/min':>10}{'95% interval':>20}{'descriptors':>14}{'threads':>9}"]
    for row in rows:
        uss = row["uss_mib"]
        span, interval = f"{uss['first']:.1f} to {uss['last']:.1f}", f"{uss['low']:+.3f} to {uss['high']:+.3f}"
        lines.append(
            f"{row['rank']:<6}{span:>18}{uss['per_minute']:>+10.3f}{interval:>20}"
            f"{row['descriptors']['last']:>14g}{row['threads']['last']:>9g}"
        )
    return lines
