"""Launches of paged attention tried on this GPU: of decoding by their time, the fastest first; of prompts beside flash.

PYTHONPATH=. python benchmarks/tune_attention.py [decode] [prefill] [--seconds 50] [--processes 16] [--top 10]

Decoding is tried with keys at a time, warps, stages and programs for each processor, at every size of CONTEXTS. All are
compiled first, by many processes. What the device has no limits for is left out, what is wrong is told and left out.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from statistics import geometric_mean, median
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.flash import FlashAttention
from yalis.attention.triton import TritonAttention
from yalis.kernels import paged_attention as kernels
from yalis.kernels import reference
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.paged_attention import TileConfig
from yalis.kernels.pdl import enable_pdl
from yalis.study.bandwidth import time_work
from yalis.study.kernels.benchmark import capture_graph

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
PARAMS = AttentionParams(DIM**-0.5)
CONTEXTS = ((1, 200), (16, 200), (16, 2700), (64, 640))  # sequences, and keys of each
PROMPTS = ((16, 2480), (1, 2048), (4, 8192))
NO_ROOM = (OutOfResources, PTXASError)  # as Triton says it
_SPREAD = 2**28  # bytes of the caches that take turns: far more than the L2 cache holds
_LAUNCHES = 24  # in a graph, at least
_REPLAYS = 5
_WRONG = 1e-2  # relative to the reference, in bfloat16


class Candidate(NamedTuple):
    """How decoding may be launched."""

    keys: int  # at a time
    warps: int
    stages: int
    programs: int  # for each processor, that contexts are cut for

    @property
    def shape(self) -> TileConfig:
        rows = kernels.decode_config(HEADS // KV_HEADS, DIM, torch.bfloat16).block_m
        return TileConfig(rows, self.keys, self.warps, self.stages)


class Step(NamedTuple):
    """Sequences of equal contexts, and caches that take turns."""

    needs: AttentionNeeds
    batch: ForwardBatch
    caches: list[LayerCache]
    q: Tensor

    @property
    def name(self) -> str:
        return f"{len(self.batch.context_lens)} x {self.batch.context_lens[0]}"

    @property
    def bytes(self) -> int:
        """That decoding reads."""
        return 2 * sum(self.batch.context_lens) * KV_HEADS * DIM * self.q.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["decode"], help="decode (if nothing is given), prefill")
    parser.add_argument("--keys", type=numbers, default=(32, 64, 128, 256))
    parser.add_argument("--warps", type=numbers, default=(2, 4, 8))
    parser.add_argument("--stages", type=numbers, default=(1, 2, 3))
    parser.add_argument("--programs", type=numbers, default=(1, 2, 4, 8))
    parser.add_argument("--seconds", type=float, default=50.0, help="that decoding may take, compiling included")
    parser.add_argument("--processes", type=int, default=16, help="that compile")
    parser.add_argument("--top", type=int, default=10, help="lines of each table")
    args = parser.parse_args()
    if unknown := set(args.what) - {"decode", "prefill"}:
        parser.error(f"{unknown.pop()} is neither decode nor prefill")
    device = torch.device("cuda")
    with torch.inference_mode(), enable_pdl(device):  # as in a decode step
        if "decode" in args.what:
            end = time.monotonic() + args.seconds
            candidates = list_candidates(present(device), args.keys, args.warps, args.stages, args.programs)
            tune_decode(candidates, end, args.processes, args.top)
        if "prefill" in args.what:
            tune_prefill()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def present(device: torch.device) -> Candidate:
    """What is launched now."""
    shape = kernels.decode_config(HEADS // KV_HEADS, DIM, torch.bfloat16)
    programs = TritonAttention(make_needs(device)).target_programs // gpu_limits(device).num_sms
    return Candidate(shape.block_n, shape.num_warps, shape.num_stages, programs)


def list_candidates(now: Candidate, *choices: Sequence[int]) -> list[Candidate]:
    """The present one first, then all others in no order: where time runs out, those tried are of every kind."""
    others = [one for one in map(Candidate._make, product(*choices)) if one != now]
    random.Random(0).shuffle(others)
    return [now, *others]


def tune_decode(candidates: list[Candidate], end: float, processes: int, top: int) -> None:
    device = torch.device("cuda")
    begin = time.monotonic()
    shapes = list(dict.fromkeys(one._replace(programs=1) for one in candidates))
    ready = build_all(shapes, processes, begin + (end - begin) * 0.6)
    tell(f"{len(ready)} of {len(shapes)} kernels compiled and fit, after {time.monotonic() - begin:.0f} s")
    steps = [make_step(sequences, keys, 1, device) for sequences, keys in CONTEXTS]
    able = [one for one in candidates if one._replace(programs=1) in ready]
    found = sweep(able, steps, end)
    tell(f"{len(found)} of {len(able)} launches timed, after {time.monotonic() - begin:.0f} s")
    if not found:
        sys.exit("no launch was timed; give more --seconds")
    for line in tabulate(found, [(step.name, step.bytes) for step in steps], candidates[0], top):
        tell(line)


def build_all(candidates: Sequence[Candidate], processes: int, end: float) -> set[Candidate]:
    """Those that are compiled in time, and that the device has limits for."""
    ready = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # whose end ends what still compiles
        built = pool.imap_unordered(build, candidates)
        for _ in candidates:
            try:
                one, fits = built.next(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if fits:
                ready.add(one)
    return ready


def build(candidate: Candidate) -> tuple[Candidate, bool]:
    """Leave a launch's kernels in Triton's cache; whether the device has limits for it."""
    device = torch.device("cuda")
    with torch.inference_mode(), enable_pdl(device):
        return candidate, attend_once(candidate, make_step(1, 200, 1, device, copies=1)) is not None


def sweep(candidates: Iterable[Candidate], steps: Sequence[Step], end: float) -> dict[Candidate, list[float]]:
    """Microseconds of a launch at each step, until the time is over."""
    expected = [expect(step) for step in steps]
    found: dict[Candidate, list[float]] = {}
    for candidate in candidates:
        if time.monotonic() > end:
            break
        outs = [attend_once(candidate, step) for step in steps]
        off = [error(*pair) for pair in zip(outs, expected, strict=True)]
        if max(off) <= _WRONG:
            found[candidate] = [time_launch(candidate, step) for step in steps]
        elif None not in outs:
            tell(f"{candidate} is wrong: off by {max(off):.1e}")
    return found


def attend_once(candidate: Candidate, step: Step) -> Tensor | None:
    """What a launch gives; nothing where the device has no limits for it."""
    try:
        with launched(candidate, step.needs) as backend:
            out = backend.attend(step.q, step.caches[0], step.batch, backend.prepare(step.batch), PARAMS)
            out.sum().item()  # a launch that fails does so here
    except NO_ROOM:
        return None
    return out


@contextmanager
def launched(candidate: Candidate, needs: AttentionNeeds) -> Iterator[TritonAttention]:
    """A backend that launches decoding so."""
    backend = TritonAttention(needs)
    backend.target_programs = candidate.programs * gpu_limits(needs.device).num_sms
    chosen, shape = kernels.decode_config, candidate.shape
    kernels.decode_config = lambda *_: shape
    try:
        yield backend
    finally:
        kernels.decode_config = chosen


def time_launch(candidate: Candidate, step: Step) -> float:
    with launched(candidate, step.needs) as backend:
        return microseconds(backend, step)


def microseconds(backend: AttentionBackend, step: Step) -> float:
    """Of one launch, in a graph of many over the caches in turn."""
    shared = backend.prepare(step.batch)
    launches = len(step.caches) * -(-_LAUNCHES // len(step.caches))

    def attend(count: int) -> None:
        for i in range(count):
            backend.attend(step.q, step.caches[i % len(step.caches)], step.batch, shared, PARAMS)

    attend(1)  # what happens once in a step: contexts are cut
    replay = capture_graph(lambda: attend(launches))
    replay()
    return 1e6 * median(time_work(replay, step.q.device) for _ in range(_REPLAYS)) / launches


def expect(step: Step) -> Tensor:
    q, k, v = (x.float() for x in (step.q, *step.caches[0]))
    where = (step.batch.query_start, step.batch.context_len, step.batch.block_tables)
    return reference.paged_attention(q, k, v, *where, PARAMS.scale)


def error(out: Tensor | None, expected: Tensor) -> float:
    if out is None:
        return float("inf")
    off = float((out.float() - expected).norm() / expected.norm())
    return off if off == off else float("inf")


def tabulate(
    found: dict[Candidate, list[float]], steps: Sequence[tuple[str, int]], now: Candidate, top: int
) -> Iterator[str]:
    """A table for each step, of a name and so many bytes, and one for all: by how much a launch is behind the best."""
    for at, (name, count) in enumerate(steps):
        speeds = {one: [us[at], count / us[at] / 1e6] for one, us in found.items()}
        yield from rank(f"decode, {name} keys", ["us", "TB/s"], speeds, now, top)
    best = [min(us[at] for us in found.values()) for at in range(len(steps))]
    behind = {one: [a / b for a, b in zip(us, best, strict=True)] for one, us in found.items()}
    means = {one: [geometric_mean(ratios), *ratios] for one, ratios in behind.items()}
    yield from rank("all, over the best of each", ["mean", *(name for name, _ in steps)], means, now, top)


def rank(
    title: str, heads: list[str], figures: dict[Candidate, list[float]], now: Candidate, top: int
) -> Iterator[str]:
    """By the first figure, the least first; the present launch is there, wherever it stands."""
    yield ""
    yield f"{title:<28}" + "".join(f"{head:>10}" for head in (*Candidate._fields, *heads))
    for place, one in enumerate(sorted(figures, key=lambda one: figures[one]), start=1):
        if place <= top or one == now:
            told = "".join(f"{number:>10}" for number in one) + "".join(f"{figure:>10.2f}" for figure in figures[one])
            yield f"{place:>28}{told}{'  now' if one == now else ''}"


def tune_prefill() -> None:
    device = torch.device("cuda")
    shapes = [TileConfig(m, 64, warps, stages) for m, warps, stages in product((64, 128), (4, 8), (2, 3, 5))]
    shapes += [TileConfig(128, 128, 8, stages) for stages in (2, 3)]
    chosen = kernels.prefill_config
    now = chosen(HEADS // KV_HEADS, DIM, torch.bfloat16, gpu_limits(device))
    steps = [make_step(sequences, tokens, tokens, device) for sequences, tokens in PROMPTS]
    tell(f"\n{'prefill, TFLOP/s':<44}" + "".join(f"{step.name:>12}" for step in steps))
    for shape in (None, now, *(one for one in shapes if one != now)):
        rates = []
        for step, (sequences, tokens) in zip(steps, PROMPTS, strict=True):
            flops = 4 * HEADS * DIM * sequences * tokens * (tokens + 1) / 2
            kernels.prefill_config = lambda *_, shape=shape, **__: shape
            try:
                backend = FlashAttention(step.needs) if shape is None else TritonAttention(step.needs)
                rates.append(flops / microseconds(backend, step) / 1e6)
            except NO_ROOM:
                rates.append(float("nan"))
            finally:
                kernels.prefill_config = chosen
        name = "flash, keys packed first" if shape is None else str(shape)
        tell(f"{name:<44}" + "".join(f"{rate:>12.0f}" for rate in rates) + ("  now" if shape == now else ""))


def make_needs(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AttentionNeeds:
    return AttentionNeeds(HEADS, KV_HEADS, DIM, dtype, device, BLOCK)


def make_step(
    sequences: int, context: int, new: int, device: torch.device, copies: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Step:
    """Of so many tokens in each context, the last are new; `copies` of the cache, or as many as keep it out of L2."""
    blocks = -(-context // BLOCK)
    shape = (2, sequences * blocks, BLOCK, KV_HEADS, DIM)
    copies = copies or max(2, -(-_SPREAD // (math.prod(shape) * dtype.itemsize)))
    caches = [LayerCache(*torch.randn(shape, device=device, dtype=dtype)) for _ in range(copies)]
    ids = torch.zeros(sequences * new, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        token_ids=ids, positions=ids, rope_rows=ids, kv_slots=ids,
        query_start=torch.arange(sequences + 1, device=device, dtype=torch.int32) * new,
        context_len=torch.full((sequences,), context, device=device, dtype=torch.int32),
        block_tables=torch.randperm(sequences * blocks, device=device).view(sequences, blocks).int(),
        logit_rows=ids[:1], query_lens=(new,) * sequences, context_lens=(context,) * sequences,
    )  # fmt: skip
    q = torch.randn(sequences * new, HEADS, DIM, device=device, dtype=dtype)
    return Step(make_needs(device, dtype), batch, caches, q)


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
