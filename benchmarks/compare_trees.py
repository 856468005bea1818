"""Print the medians of two checkouts, and their ratios, from the folder that compare_trees.sh filled.

python benchmarks/compare_trees.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

#: Measured columns of a latency row.
COLUMNS = ("decode_ms", "first_token_ms")
Samples = dict[str, list[float]]


def main() -> int:
    """Print the table; return 1 if one of the checkouts has no measurement."""
    folder = Path(sys.argv[1])
    before, after = read_samples(folder, "a"), read_samples(folder, "b")
    lines = [f"{'workload':<34}{'A':>10}{'B':>10}{'B / A':>8}{'spread of A':>13}"]
    for name in before.keys() & after.keys():
        a, b = median(before[name]), median(after[name])
        spread = max(before[name]) / min(before[name]) - 1
        lines.append(f"{name:<34}{a:>10.4g}{b:>10.4g}{b / a:>8.3f}{spread:>13.1%}")
    sys.stdout.write("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
    return 0 if len(lines) > 1 else 1


def read_samples(folder: Path, label: str) -> Samples:
    """Return every measurement of a checkout by workload and column: milliseconds, and seconds for the start-up."""
    samples: Samples = {}
    for path in sorted(folder.glob(f"{label}-*/latency-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for column in COLUMNS:
                name = f"{row['batch']} x {row['prompt_len']} {column}"
                samples.setdefault(name, []).append(row[column])
    # The first start compiles the kernels; the later ones find them in the cache.
    for path in sorted(folder.glob(f"{label}-*-start.txt")):
        cache = "cold" if path.name == f"{label}-1-start.txt" else "warm"
        samples.setdefault(f"start-up, cache {cache}, s", []).append(float(path.read_text()))
    return samples


if __name__ == "__main__":
    sys.exit(main())
