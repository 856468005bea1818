"""Compare the join of 8 ranks and CPU decode steps of two checkouts.

    python benchmarks/compare_cpu.py TREE_A TREE_B [--turns 20] [--workload join] [--out FILE]

Each turn measures every workload in both trees, in new processes, in the order A B, then B A, and so on, so that a
drifting clock affects both alike. The table has the medians, the median of the ratios of the turns with its 95%
interval, and the spread of each tree. A result is within 2% if the interval is. Run it on an idle machine: a neighbour
on the same cores widens the interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

_TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_REAL = "smollm2-135m"
_RANKS = 8


def join_ranks() -> list[float]:
    """Return the seconds from starting 7 further processes, which import no torch, until all 8 ranks have joined."""
    from yalis.launch.join import join

    begin = time.perf_counter()
    world = join(_RANKS, (Path(__file__).stem, "rank"))
    seconds = time.perf_counter() - begin
    world.close()
    return [seconds]


def run_rank() -> None:
    """Body of the other ranks: join, and leave when rank 0 does."""
    from yalis.launch.join import join

    world = join(_RANKS, ())
    world.wait_rank0_left(60)
    world.close()


def decode(model: str, tp: int, tokens: int, repeats: int) -> list[float]:
    """Return the milliseconds of a decode step of one sequence, one value for each repetition after a warm-up."""
    from yalis import LLM, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        load = "auto"
        if model == "tiny":
            (Path(folder) / "config.json").write_text(json.dumps(_TINY))
            model, load = folder, "random"
        with LLM(model, load=load, device="cpu", dtype="float32", tp=tp, kv_blocks=64, threads=1) as llm:
            runs = [llm.generate([[1, 2, 3, 4]], params, progress=False)[0] for _ in range(repeats + 1)]
    return [run.metrics.time_per_token * 1e3 for run in runs[1:]]


#: name -> unit and what to call
WORKLOADS: dict[str, tuple[str, Any]] = {
    "join": ("s", join_ranks),
    "tiny": ("ms", lambda: decode("tiny", 1, 256, 6)),
    "tiny-tp2": ("ms", lambda: decode("tiny", 2, 64, 6)),
    "real": ("ms", lambda: decode(_REAL, 1, 32, 3)),
    "real-tp2": ("ms", lambda: decode(_REAL, 2, 32, 3)),
}


def main() -> int:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="may be repeated; default: all")
    parser.add_argument("--out", type=Path, help="write all measurements to this JSON file")
    given = parser.parse_args()
    names = given.workload or list(WORKLOADS)
    samples: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    trees = [tree.resolve() for tree in given.trees]
    with tempfile.TemporaryDirectory() as bytecode:
        for tree in trees:
            measure(tree, names[0], Path(bytecode))  # compiles the modules
        for turn in range(given.turns):
            for name in names:
                for index in (0, 1) if turn % 2 == 0 else (1, 0):
                    samples[name][index].append(measure(trees[index], name, Path(bytecode)))
            sys.stderr.write(f"turn {turn + 1} of {given.turns}\n")
    rows = [compare(name, *samples[name]) for name in names]
    sys.stdout.write(format_table(rows) + "\n")
    if given.out:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
        result = {"machine": machine, "python": platform.python_version(), "turns": given.turns, "rows": rows}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(tree: Path, name: str, bytecode: Path) -> float:
    """Return the median of one workload in a new process that imports yalis from `tree`.

    `bytecode`: the folder for compiled modules, the same for all calls.
    """
    path = os.pathsep.join((str(tree), str(Path(__file__).parent.resolve())))
    # With bytecode, as an installed package has it: compiling yalis takes longer than a join.
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, __file__, "measure", name],
        env={**variables, "PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        cwd=tree,
        check=True,
    )
    return median(json.loads(done.stdout))


def compare(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return the medians of both trees, and the median ratio of the turns with its bootstrapped 95% interval."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    rng = Random(1)
    resampled = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "workload": name,
        "unit": WORKLOADS[name][0],
        "a": median(before),
        "b": median(after),
        "ratio": median(ratios),
        "ratio_low": resampled[50],
        "ratio_high": resampled[1949],
        "spread_a": spread(before),
        "spread_b": spread(after),
        "samples_a": list(before),
        "samples_b": list(after),
    }


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range relative to the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / median(values)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [f"{'workload':<14}{'A':>12}{'B':>12}{'B / A':>8}{'95% interval':>18}{'spread A':>10}{'spread B':>10}"]
    for row in rows:
        a, b = f"{row['a']:.4g} {row['unit']}", f"{row['b']:.4g} {row['unit']}"
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        lines.append(
            f"{row['workload']:<14}{a:>12}{b:>12}{row['ratio']:>8.3f}{interval:>18}"
            f"{row['spread_a']:>10.1%}{row['spread_b']:>10.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        run_rank()
    elif sys.argv[1:2] == ["measure"]:
        sys.stdout.write(json.dumps(WORKLOADS[sys.argv[2]][1]()))
    else:
        sys.exit(main())
