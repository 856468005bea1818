"""Launches of paged attention tried on this GPU: microseconds of decode, TFLOP/s of prefill, beside flash.

python benchmarks/tune_attention.py [decode] [prefill]
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from typing import Any

import torch

from yalis.attention.base import AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.flash import FlashAttention
from yalis.attention.triton import TritonAttention
from yalis.kernels import paged_attention as kernels
from yalis.kernels.paged_attention import Shape
from yalis.kernels.room import room_of

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
NEEDS = AttentionNeeds(HEADS, KV_HEADS, DIM, torch.bfloat16, torch.device("cuda"), BLOCK)
PARAMS = AttentionParams(DIM**-0.5)
DECODES = [(1, 128), (1, 300), (1, 1024), (1, 4000), (1, 32000), (16, 300), (16, 2700), (64, 640), (64, 4000)]
# Keys are found through a table, so a step of loads in flight takes two stages.
STAGES = (2, 3, 5, 7)
PREFILLS = [(16, 2480), (1, 2048), (4, 8192)]


def main() -> None:
    wanted = sys.argv[1:] or ["decode", "prefill"]
    if "decode" in wanted:
        tune_decode()
    if "prefill" in wanted:
        tune_prefill()


def tune_decode() -> None:
    shapes = [Shape(16, n, warps, stages) for n, warps, stages in product((32, 64), (2, 4), STAGES)]
    shapes += [Shape(16, 128, 4, stages) for stages in STAGES[:3]]
    chosen = kernels.decode_shape(HEADS // KV_HEADS, DIM, torch.bfloat16)
    tell(f"{'decode, us of a layer':<44}" + "".join(f"{f'{b} x {c}':>11}" for b, c in DECODES))
    batches = [make_batch(batch, context, 1) for batch, context in DECODES]
    times: dict[Shape, list[float]] = {}

    def line(shape: Shape, programs: int) -> list[float]:
        kernels.decode_shape = lambda *_: shape
        found = [1e6 / rate(partial(Crowded, programs=programs), *step, 1.0) for step in batches]
        mark = "  chosen" if (shape, programs) == (chosen, 3) else ""
        tell(f"{f'{shape} x {programs}':<44}" + "".join(f"{us:>11.1f}" for us in found) + mark)
        return found

    for shape in shapes:
        times[shape] = line(shape, 3)
    # More or fewer pieces, for the shapes that were best somewhere.
    best = [min(times, key=lambda shape, at=at: times[shape][at]) for at in range(len(DECODES))]
    for shape, programs in product(dict.fromkeys(best), (1, 2, 4, 6)):
        line(shape, programs)
    reads = [2 * 2 * batch * context * KV_HEADS * DIM for batch, context in DECODES]
    rates = [count / times[shape][at] / 1e6 for at, (shape, count) in enumerate(zip(best, reads, strict=True))]
    tell(f"{'TB/s of the best above':<44}" + "".join(f"{value:>11.2f}" for value in rates))


def tune_prefill() -> None:
    shapes = [Shape(m, 64, warps, stages) for m, warps, stages in product((64, 128), (4, 8), STAGES[:3])]
    shapes += [Shape(128, 128, 8, stages) for stages in STAGES[:2]]
    chosen = kernels.prefill_shape(HEADS // KV_HEADS, DIM, torch.bfloat16, room_of(torch.device("cuda")))
    tell(f"{'prefill, TFLOP/s':<44}" + "".join(f"{f'{b} x {c}':>12}" for b, c in PREFILLS))
    batches = [make_batch(batch, context, context) for batch, context in PREFILLS]
    work = [4 * HEADS * DIM * batch * context * (context + 1) / 2 for batch, context in PREFILLS]

    def line(name: str, backend: Any) -> None:
        found = (rate(backend, *step, flops) for step, flops in zip(batches, work, strict=True))
        tell(
            f"{name:<44}" + "".join(f"{value / 1e12:>12.0f}" for value in found) + ("  chosen" * (name == str(chosen)))
        )

    line("flash, keys packed first", FlashAttention)
    for shape in shapes:
        kernels.prefill_shape = lambda *_, shape=shape: shape  # type: ignore[assignment]
        line(str(shape), TritonAttention)


class Crowded(TritonAttention):
    """Contexts cut so that each processor has so many programs."""

    def __init__(self, needs: AttentionNeeds, programs: int) -> None:
        super().__init__(needs)
        self.programs = self.programs // 3 * programs


def make_batch(sequences: int, context: int, brought: int) -> tuple[ForwardBatch, list[LayerCache], torch.Tensor]:
    """A step, caches in turn so that keys come from memory, and queries."""
    blocks = -(-context // BLOCK)
    device = torch.device("cuda")
    tokens = sequences * brought
    size = 2 * 2 * sequences * blocks * BLOCK * KV_HEADS * DIM
    copies = max(1, min(16, 2**28 // size))
    caches = [
        LayerCache(*torch.randn(2, sequences * blocks, BLOCK, KV_HEADS, DIM, device=device, dtype=torch.bfloat16))
        for _ in range(copies)
    ]
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        token_ids=ids, positions=ids, rope_rows=ids, slots=ids,
        query_start=torch.arange(sequences + 1, device=device, dtype=torch.int32) * brought,
        context_len=torch.full((sequences,), context, device=device, dtype=torch.int32),
        block_tables=torch.randperm(sequences * blocks, device=device).view(sequences, blocks).int(),
        logit_rows=ids[:1], query_lens=(brought,) * sequences, context_lens=(context,) * sequences,
    )  # fmt: skip
    return batch, caches, torch.randn(tokens, HEADS, DIM, device=device, dtype=torch.bfloat16)


def rate(kind: Any, batch: ForwardBatch, caches: list[LayerCache], q: torch.Tensor, amount: float) -> float:
    """`amount` for each cache, a second, from a graph of them all; NaN where a launch does not fit the device."""
    backend = kind(NEEDS)
    shared = backend.prepare(batch)

    def run() -> None:
        for cache in caches:
            backend.attend(q, cache, batch, shared, PARAMS)

    try:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        return amount * len(caches) * 10 / (begin.elapsed_time(end) / 1e3)
    except Exception as error:  # a launch too large for the device, as Triton says it
        sys.stderr.write(f"{error}\n")
        return float("nan")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
