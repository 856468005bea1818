"""Predict all-reduces on more hosts of a lab than were measured: fit to 2 hosts, predict 4, and measure them (root).

`python benchmarks/predict_lab.py measure FOLDER` runs `yalis bench allreduce` on 2 and on 4 hosts of 2 ranks with links
of 1 ms and 5 ms, and compares. `python benchmarks/predict_lab.py compare FOLDER` only compares. Both write
FOLDER/prediction.json and print a table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from yalis.planner.machine import Machine, load_machine
from yalis.study import results
from yalis.study.calibration import Comparison, compare, fit_libraries

DELAYS = (1, 5)  # ms
COMMON = ("--ranks-per-host", "2", "--sizes", "16K,64K,256K,1M", "--repeats", "18", "--backends")
BACKENDS = "gloo,hierarchical,mpi"


def file_of(folder: Path, hosts: int, delay: int) -> Path:
    return folder / f"allreduce-lab-{hosts}x2-{delay}ms-planned.json"


def measure(folder: Path) -> None:
    """Measure each number of hosts and delay; the results get fixed names."""
    folder.mkdir(parents=True, exist_ok=True)
    for delay in DELAYS:
        for hosts in (2, 4):
            new = folder / f"new-{hosts}-{delay}"
            command = ["yalis", "bench", "allreduce", "--hosts", str(hosts), "--delay", f"{delay}ms", *COMMON, BACKENDS]
            subprocess.run([sys.executable, "-m", *command, "--out", str(new)], check=True, stdout=subprocess.DEVNULL)
            (path,) = new.glob("*.json")
            path.replace(file_of(folder, hosts, delay))
            new.rmdir()


def calibrated(folder: Path, delay: int) -> Machine:
    """Return the lab with the parameters that two hosts show."""
    path, lab = file_of(folder, 2, delay), load_machine("lab")
    found = fit_libraries(results.read(path), lab, path.name, 1e3 * delay)
    return replace(lab, libraries=found)


def predict(folder: Path) -> list[tuple[int, Comparison]]:
    return [
        (hosts, one)
        for delay in DELAYS
        for hosts in (2, 4)
        for one in compare(calibrated(folder, delay), results.read(file_of(folder, hosts, delay)), 1e3 * delay)
    ]


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "measure":
        measure(folder)
    found = predict(folder)
    rows = [{"hosts": hosts, **asdict(one), "error": one.error} for hosts, one in found]
    (folder / "prediction.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [("link", "hosts", "library", "size", "predicted", "measured", "p10..p90", "error")]
    for hosts, one in found:
        times = [f"{1e-3 * one.predicted_us:.2f} ms", f"{1e-3 * one.measured_us:.2f} ms"]
        span = f"{1e-3 * one.low_us:.1f}..{1e-3 * one.high_us:.1f}"
        setting = [f"{1e-3 * (one.delay_us or 0):g} ms", f"{hosts}", one.library, f"{one.bytes >> 10} KB"]
        lines.append((*setting, *times, span, f"{one.error:+.0%}"))
    table = "".join("".join(f"{cell:>14}" for cell in line) + "\n" for line in lines)
    (folder / "prediction.txt").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
