"""Time of sampling alone on a GPU: the kernels of yalis/kernels/sampling.py, and plain torch beside them.

    python benchmarks/sampling.py [--rows 1,16,64,128,256] [--vocab 128256] [--out FILE]

Prints microseconds per step for each filter and two kinds of logits: flat ones, as random weights give, of which
top_p 0.95 keeps most of the vocabulary, and peaked ones, of which it keeps few. The floor is one read of the logits at
the rate measured in this run. Tokens are compared in every case. Without a GPU it runs a small case in Triton's
interpreter (TRITON_INTERPRET=1), as a check of this script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from yalis.comm.base import SingleRank
from yalis.kernels import fused, sampling
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.sampled_tokens import NO_TOKEN
from yalis.sampling.sampler import Sampler
from yalis.study import bandwidth
from yalis.types import SamplingParams

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.5": {"top_p": 0.5},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
SCALES = {"flat": 0.3, "peaked": 4.0}


def time_us(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a run in microseconds."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
    return median(times)


def as_graph(run: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    """Return a replay of what the function launches."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(rows: int, vocab: int, kind: str, fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator, device=device).mul_(SCALES[kind]).bfloat16()
    steps = [SamplingRow(SamplingParams(temperature=0.8, **fields), i, 100) for i in range(rows)]
    sampler = Sampler(range(vocab), vocab, SingleRank(), device)
    batches = [SamplingBatch.build(steps, range(vocab), vocab, device, on) for on in (False, True)]
    expected, found = (sampler.sample(logits, batch).tokens for batch in batches)
    params = batches[1].fused
    assert params is not None
    best_ids = fused.argmax(logits)
    replay = as_graph(lambda: sampling.sample(logits, best_ids, params, NO_TOKEN), device)
    repeats = 20 if device.type == "cuda" else 1
    return {
        "rows": rows,
        "logits": kind,
        "filter": ", ".join(f"{name} {value}" for name, value in fields.items()) or "none",
        "same_tokens": bool(torch.equal(expected, found)),
        "kernels_us": time_us(replay, device, repeats),
        "torch_us": time_us(lambda: sampler.sample(logits, batches[0]), device, repeats),
        "bytes": logits.nbytes,
    }


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,128,256")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter"
    rate = bandwidth.measure_rates(device, torch.bfloat16).read_bytes_per_s if device.type == "cuda" else None
    show(f"{name}, torch {torch.__version__}, vocabulary {args.vocab}, bfloat16, temperature 0.8")
    show(f"{'rows':>5} {'logits':<7} {'filter':<22}{'kernels µs':>12}{'torch µs':>12}{'floor µs':>10}  tokens")
    results = []
    for rows in map(int, args.rows.split(",")):
        for kind in SCALES:
            for label, fields in FILTERS.items():
                row = measure(rows, args.vocab, kind, fields, device)
                results.append(row | {"floor_us": None if rate is None else 1e6 * row["bytes"] / rate})
                floor = "" if rate is None else f"{results[-1]['floor_us']:.1f}"
                same = "equal" if row["same_tokens"] else "DIFFERENT"
                times = f"{row['kernels_us']:>12.1f}{row['torch_us']:>12.1f}"
                show(f"{rows:>5} {kind:<7} {label:<22}{times}{floor:>10}  {same}")
    if args.out is not None:
        args.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": results}, indent=1) + "\n")
    return 0 if all(row["same_tokens"] for row in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
