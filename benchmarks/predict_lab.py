"""Predict all-reduces on four hosts of a lab from two: fit the libraries to 2 hosts, and compare with 4 hosts.

`python benchmarks/predict_lab.py measure RESULTS OUT` runs `yalis bench allreduce` on 2 and on 4 hosts of 2 ranks with
links of 1 ms and 5 ms (root, about five minutes), and compares. With `compare` the results must be there. Both write
OUT/lab-allreduce.json and a table, OUT/lab-allreduce.txt.
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

FITTED_HOSTS, PREDICTED_HOSTS = 2, 4
DELAYS = (1, 5)  # ms
SETTINGS = (
    *("--ranks-per-host", "2", "--sizes", "16K,64K,256K,1M", "--repeats", "18"),
    *("--backends", "gloo,hierarchical,mpi"),
)


def file_of(folder: Path, hosts: int, delay: int) -> Path:
    return folder / f"{hosts}x2-{delay}ms.json"


def measure(folder: Path) -> None:
    """Measure each number of hosts and delay; the results get fixed names."""
    for delay in DELAYS:
        for hosts in (FITTED_HOSTS, PREDICTED_HOSTS):
            new = folder / f"new-{hosts}-{delay}"
            command = ["yalis", "bench", "allreduce", "--hosts", str(hosts), "--delay", f"{delay}ms", *SETTINGS]
            subprocess.run([sys.executable, "-m", *command, "--out", str(new)], check=True, stdout=subprocess.DEVNULL)
            (path,) = new.glob("*.json")
            path.replace(file_of(folder, hosts, delay))
            new.rmdir()


def fit_lab(folder: Path, delay: int) -> Machine:
    """Return the lab with the parameters that two hosts show."""
    path, lab = file_of(folder, FITTED_HOSTS, delay), load_machine("lab")
    return replace(lab, libraries=fit_libraries(results.read(path), lab, str(path), 1e3 * delay))


def predict(folder: Path) -> list[tuple[int, Comparison]]:
    """Return every setting with its number of hosts; those of two hosts were fitted."""
    return [
        (hosts, one)
        for delay in DELAYS
        for hosts in (FITTED_HOSTS, PREDICTED_HOSTS)
        for one in compare(fit_lab(folder, delay), results.read(file_of(folder, hosts, delay)), 1e3 * delay)
    ]


def make_table(found: list[tuple[int, Comparison]]) -> str:
    lines = [("link", "hosts", "library", "size", "predicted", "measured", "p10..p90", "error")]
    for hosts, one in found:
        setting = [f"{1e-3 * (one.delay_us or 0):g} ms", f"{hosts}", one.library, f"{one.bytes >> 10} KB"]
        times = [f"{1e-3 * one.predicted_us:.2f} ms", f"{1e-3 * one.measured_us:.2f} ms"]
        span = f"{1e-3 * one.low_us:.1f}..{1e-3 * one.high_us:.1f}"
        lines.append((*setting, *times, span, f"{one.error:+.0%}"))
    errors = [abs(one.error) for hosts, one in found if hosts == PREDICTED_HOSTS]
    last = f"{PREDICTED_HOSTS} hosts, not fitted: mean error {sum(errors) / len(errors):.0%}, worst {max(errors):.0%}\n"
    return "".join("".join(f"{cell:>14}" for cell in line) + "\n" for line in lines) + last


def main() -> None:
    action, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if action == "measure":
        measure(folder)
    found = predict(folder)
    rows = [{"hosts": hosts, **asdict(one), "error": one.error} for hosts, one in found]
    out.mkdir(parents=True, exist_ok=True)
    (out / "lab-allreduce.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "lab-allreduce.txt").write_text(make_table(found))
    sys.stdout.write(make_table(found))


if __name__ == "__main__":
    main()
