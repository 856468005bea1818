"""Find the fastest launches of products with few rows on this GPU: lines for TUNED in yalis/kernels/skinny.py.

PYTHONPATH=. python benchmarks/tune_kernels.py [--rows 1,16,64] [--dtype bfloat16] [--processes 16]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TextIO

import torch

from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.skinny import Problem, candidates
from yalis.study.kernels.benchmark import LLAMA_8B, build, tune
from yalis.study.kernels.cases import matrices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,64,128")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--processes", type=int, default=16)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    problems = []
    for rows in map(int, args.rows.split(",")):
        for name, (outputs, inputs) in matrices(LLAMA_8B).items():
            gated = name == "gate_up"
            problems.append(Problem(rows, outputs // 2 if gated else outputs, inputs, dtype.itemsize, gated))
    limits = gpu_limits(torch.device("cuda"))
    jobs = {(problem, shape) for problem in problems for shape in candidates(problem, limits)}
    # Launches of equal inputs share a kernel, so one of them is enough; compiling is what takes the time.
    unlike = {(p.rows, p.inputs if p.rows == 1 else 0, p.gated, shape): (p, shape, dtype) for p, shape in jobs}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(build, *job) for job in unlike.values()]:
            done.result()
    found = tune(problems, dtype, lambda text: tell(text, sys.stderr))
    for problem, shape in found.items():
        tell(f"    Problem{tuple(problem)}: Shape{tuple(shape)},", sys.stdout)


def tell(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()


if __name__ == "__main__":
    main()
