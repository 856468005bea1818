"""Find the fastest skinny GEMM configurations on this GPU. Prints lines for TUNED in yalis/kernels/skinny_config.py.

PYTHONPATH=. python benchmarks/tune_kernels.py [--rows 1,16,64] [--dtype bfloat16] [--processes 16] [--experts]

With --experts it searches the grouped products of Qwen3-30B-A3B instead, with these rows and two prefill sizes, and
prints what yalis/kernels/experts_config.py chooses beside the fastest launch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TextIO

import torch

from yalis.kernels.experts_config import ExpertShape, uses_gemv
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.skinny_config import GemmShape, candidates
from yalis.study.kernels.benchmark import LLAMA_8B, build, tune, tune_experts
from yalis.study.kernels.cases import EXPERT_DIMS, matrices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,64,128", help="values of M, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--processes", type=int, default=16, help="processes that compile")
    parser.add_argument("--experts", action="store_true", help="search the grouped products of experts")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.experts:
        search_experts([*map(int, args.rows.split(",")), 2048, 16384], dtype)
        return
    shapes = []
    for rows in map(int, args.rows.split(",")):
        for name, (n, k) in matrices(LLAMA_8B).items():
            gated = name == "gate_up"
            shapes.append(GemmShape(rows, n // 2 if gated else n, k, dtype.itemsize, gated))
    limits = gpu_limits(torch.device("cuda"))
    launches = {(shape, config) for shape in shapes for config in candidates(shape, limits)}
    # Compilation takes most of the time. Launches that share a kernel (N is not a constant of it, and K only of the
    # GEMV) are compiled once.
    kernels = {(s.m, s.k if s.m == 1 else 0, s.gated, config): (s, config, dtype) for s, config in launches}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for compiled in [pool.submit(build, *kernel) for kernel in kernels.values()]:
            compiled.result()
    for shape, config in tune(shapes, dtype, lambda text: write_line(text, sys.stderr)).items():
        write_line(f"    GemmShape{tuple(shape)}: GemmConfig{tuple(config)},", sys.stdout)


def search_experts(row_counts: list[int], dtype: torch.dtype) -> None:
    """Print the fastest launch of gate and up, and of down, for each number of rows."""
    dims = EXPERT_DIMS["cuda"]
    shapes = []
    for rows in row_counts:
        pairs = rows * int(dims.top_k)
        if not uses_gemv(pairs, dims.experts):
            shapes.append(ExpertShape(pairs, dims.experts, dims.expert_width, dims.hidden, dtype.itemsize, True))
            shapes.append(ExpertShape(pairs, dims.experts, dims.hidden, dims.expert_width, dtype.itemsize))
    tune_experts(shapes, int(dims.top_k), dtype, lambda text: write_line(text, sys.stdout))


def write_line(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()


if __name__ == "__main__":
    main()
