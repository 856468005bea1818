"""Time launch configurations of paged attention on this GPU: of decode, fastest first; of prefill, next to flash.

PYTHONPATH=. python benchmarks/tune_attention.py [decode] [prefill] [--seconds 50] [--processes 16] [--top 10]

Decode is tried with all combinations of keys per tile (BLOCK_N), warps, stages and programs per SM, for each batch of
CONTEXTS. All kernels are compiled first, in parallel processes. Configurations that exceed the registers or shared
memory of the GPU are skipped; those with wrong results are reported and skipped.
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
CONTEXTS = ((1, 200), (16, 200), (16, 2700), (64, 640))  # (sequences, keys per sequence)
PROMPTS = ((16, 2480), (1, 2048), (4, 8192))  # (sequences, tokens per prompt)
DOES_NOT_FIT = (OutOfResources, PTXASError)  # raised by Triton
_CACHE_BYTES = 2**28  # all copies of the KV cache together: far more than L2 holds
_LAUNCHES = 24  # minimum in a graph
_REPLAYS = 5
_TOLERANCE = 1e-2  # relative to the reference, in bfloat16


class Candidate(NamedTuple):
    """A launch configuration of the decode kernel."""

    keys: int  # per tile (BLOCK_N)
    warps: int
    stages: int
    programs: int  # per SM, which contexts are split for

    @property
    def config(self) -> TileConfig:
        rows = kernels.decode_config(HEADS // KV_HEADS, DIM, torch.bfloat16).block_m
        return TileConfig(rows, self.keys, self.warps, self.stages)


class Step(NamedTuple):
    """Sequences of equal context lengths, and copies of the KV cache that launches use in turn."""

    needs: AttentionNeeds
    batch: ForwardBatch
    caches: list[LayerCache]
    q: Tensor

    @property
    def name(self) -> str:
        return f"{len(self.batch.context_lens)} x {self.batch.context_lens[0]}"

    @property
    def bytes(self) -> int:
        """Bytes that decode attention reads."""
        return 2 * sum(self.batch.context_lens) * KV_HEADS * DIM * self.q.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["decode"], help="decode (default), prefill")
    parser.add_argument("--keys", type=parse_ints, default=(32, 64, 128, 256), help="keys per tile")
    parser.add_argument("--warps", type=parse_ints, default=(2, 4, 8))
    parser.add_argument("--stages", type=parse_ints, default=(1, 2, 3), help="stages of software pipelining")
    parser.add_argument("--programs", type=parse_ints, default=(1, 2, 4, 8), help="decode programs per SM")
    parser.add_argument("--seconds", type=float, default=50.0, help="time limit of decode, including compilation")
    parser.add_argument("--processes", type=int, default=16, help="processes that compile")
    parser.add_argument("--top", type=int, default=10, help="lines of each table")
    args = parser.parse_args()
    if unknown := set(args.what) - {"decode", "prefill"}:
        parser.error(f"{unknown.pop()} is unknown; accepted: decode, prefill")
    device = torch.device("cuda")
    with torch.inference_mode(), enable_pdl(device):  # as in a decode step
        if "decode" in args.what:
            end = time.monotonic() + args.seconds
            candidates = list_candidates(current_candidate(device), args.keys, args.warps, args.stages, args.programs)
            tune_decode(candidates, end, args.processes, args.top)
        if "prefill" in args.what:
            tune_prefill()


def parse_ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def current_candidate(device: torch.device) -> Candidate:
    """Return the configuration that the engine uses."""
    config = kernels.decode_config(HEADS // KV_HEADS, DIM, torch.bfloat16)
    programs = TritonAttention(make_needs(device)).target_programs // gpu_limits(device).num_sms
    return Candidate(config.block_n, config.num_warps, config.num_stages, programs)


def list_candidates(current: Candidate, *choices: Sequence[int]) -> list[Candidate]:
    """Return the current candidate, then all others in random order, so that a time limit leaves a mixed sample."""
    others = [candidate for candidate in map(Candidate._make, product(*choices)) if candidate != current]
    random.Random(0).shuffle(others)
    return [current, *others]


def tune_decode(candidates: list[Candidate], end: float, processes: int, top: int) -> None:
    device = torch.device("cuda")
    begin = time.monotonic()
    kernel_configs = list(dict.fromkeys(one._replace(programs=1) for one in candidates))
    compiled = build_all(kernel_configs, processes, begin + (end - begin) * 0.6)
    print_line(
        f"{len(compiled)} of {len(kernel_configs)} kernels compiled and fit, after {time.monotonic() - begin:.0f} s"
    )
    steps = [make_step(sequences, keys, 1, device) for sequences, keys in CONTEXTS]
    usable = [one for one in candidates if one._replace(programs=1) in compiled]
    found = sweep(usable, steps, end)
    print_line(f"{len(found)} of {len(usable)} candidates timed, after {time.monotonic() - begin:.0f} s")
    if not found:
        sys.exit("no candidate was timed; give more --seconds")
    for line in tabulate(found, [(step.name, step.bytes) for step in steps], candidates[0], top):
        print_line(line)


def build_all(candidates: Sequence[Candidate], processes: int, end: float) -> set[Candidate]:
    """Return the candidates that were compiled in time and fit the GPU."""
    compiled = set()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # leaving it terminates the processes
        results = pool.imap_unordered(build, candidates)
        for _ in candidates:
            try:
                candidate, fits = results.next(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            if fits:
                compiled.add(candidate)
    return compiled


def build(candidate: Candidate) -> tuple[Candidate, bool]:
    """Compile the kernels of a candidate into Triton's cache; return it and whether it fits the GPU."""
    device = torch.device("cuda")
    with torch.inference_mode(), enable_pdl(device):
        return candidate, attend_once(candidate, make_step(1, 200, 1, device, copies=1)) is not None


def sweep(candidates: Iterable[Candidate], steps: Sequence[Step], end: float) -> dict[Candidate, list[float]]:
    """Return the microseconds of a launch at each step, for the candidates that are correct and timed before `end`."""
    expected = [expect(step) for step in steps]
    found: dict[Candidate, list[float]] = {}
    for candidate in candidates:
        if time.monotonic() > end:
            break
        outs = [attend_once(candidate, step) for step in steps]
        errors = [relative_error(*pair) for pair in zip(outs, expected, strict=True)]
        if max(errors) <= _TOLERANCE:
            found[candidate] = [time_candidate(candidate, step) for step in steps]
        elif None not in outs:
            print_line(f"{candidate} is wrong: relative error {max(errors):.1e}")
    return found


def attend_once(candidate: Candidate, step: Step) -> Tensor | None:
    """Return the output of one launch; None if the configuration does not fit the GPU."""
    try:
        with use_candidate(candidate, step.needs) as backend:
            out = backend.attend(step.q, step.caches[0], step.batch, backend.prepare(step.batch), PARAMS)
            out.sum().item()  # a failed launch raises here
    except DOES_NOT_FIT:
        return None
    return out


@contextmanager
def use_candidate(candidate: Candidate, needs: AttentionNeeds) -> Iterator[TritonAttention]:
    """Yield a backend that launches decode with the configuration of `candidate`."""
    backend = TritonAttention(needs)
    backend.target_programs = candidate.programs * gpu_limits(needs.device).num_sms
    original, config = kernels.decode_config, candidate.config
    kernels.decode_config = lambda *_: config
    try:
        yield backend
    finally:
        kernels.decode_config = original


def time_candidate(candidate: Candidate, step: Step) -> float:
    with use_candidate(candidate, step.needs) as backend:
        return time_attention(backend, step)


def time_attention(backend: AttentionBackend, step: Step) -> float:
    """Return the microseconds of one layer's attention, from a CUDA graph of many launches over the caches in turn."""
    shared = backend.prepare(step.batch)
    launches = len(step.caches) * -(-_LAUNCHES // len(step.caches))

    def attend(count: int) -> None:
        for i in range(count):
            backend.attend(step.q, step.caches[i % len(step.caches)], step.batch, shared, PARAMS)

    attend(1)  # what is done once per step: the split plan
    replay = capture_graph(lambda: attend(launches))
    replay()
    return 1e6 * median(time_work(replay, step.q.device) for _ in range(_REPLAYS)) / launches


def expect(step: Step) -> Tensor:
    q, k, v = (x.float() for x in (step.q, *step.caches[0]))
    indices = (step.batch.query_start, step.batch.context_len, step.batch.block_tables)
    return reference.paged_attention(q, k, v, *indices, PARAMS.scale)


def relative_error(out: Tensor | None, expected: Tensor) -> float:
    """Return |out - expected| / |expected|; infinity without an output or if it has NaN."""
    if out is None:
        return float("inf")
    error = float((out.float() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def tabulate(
    found: dict[Candidate, list[float]], steps: Sequence[tuple[str, int]], current: Candidate, top: int
) -> Iterator[str]:
    """Yield the lines of a table for each step (name, bytes), and of one for all: time relative to the best of each."""
    for i, (name, num_bytes) in enumerate(steps):
        speeds = {one: [us[i], num_bytes / us[i] / 1e6] for one, us in found.items()}
        yield from rank(f"decode, {name} keys", ["us", "TB/s"], speeds, current, top)
    best = [min(us[i] for us in found.values()) for i in range(len(steps))]
    ratios = {one: [a / b for a, b in zip(us, best, strict=True)] for one, us in found.items()}
    means = {one: [geometric_mean(each), *each] for one, each in ratios.items()}
    yield from rank("all, relative to the best", ["mean", *(name for name, _ in steps)], means, current, top)


def rank(
    title: str, heads: list[str], figures: dict[Candidate, list[float]], current: Candidate, top: int
) -> Iterator[str]:
    """Yield a table sorted by the first figure, lowest first: the `top` candidates and the current one."""
    yield ""
    yield f"{title:<28}" + "".join(f"{head:>10}" for head in (*Candidate._fields, *heads))
    for position, one in enumerate(sorted(figures, key=lambda one: figures[one]), start=1):
        if position <= top or one == current:
            cells = "".join(f"{value:>10}" for value in one) + "".join(f"{figure:>10.2f}" for figure in figures[one])
            yield f"{position:>28}{cells}{'  now' if one == current else ''}"


def tune_prefill() -> None:
    device = torch.device("cuda")
    configs = [TileConfig(m, 64, warps, stages) for m, warps, stages in product((64, 128), (4, 8), (2, 3, 5))]
    configs += [TileConfig(128, 128, 8, stages) for stages in (2, 3)]
    original = kernels.prefill_config
    current = original(HEADS // KV_HEADS, DIM, torch.bfloat16, gpu_limits(device))
    steps = [make_step(sequences, tokens, tokens, device) for sequences, tokens in PROMPTS]
    print_line(f"\n{'prefill, TFLOP/s':<44}" + "".join(f"{step.name:>12}" for step in steps))
    for config in (None, current, *(one for one in configs if one != current)):
        rates = []
        for step, (sequences, tokens) in zip(steps, PROMPTS, strict=True):
            flops = 4 * HEADS * DIM * sequences * tokens * (tokens + 1) / 2
            kernels.prefill_config = lambda *_, config=config, **__: config
            try:
                backend = FlashAttention(step.needs) if config is None else TritonAttention(step.needs)
                rates.append(flops / time_attention(backend, step) / 1e6)
            except DOES_NOT_FIT:
                rates.append(float("nan"))
            finally:
                kernels.prefill_config = original
        name = "flash, keys packed first" if config is None else str(config)
        print_line(f"{name:<44}" + "".join(f"{rate:>12.0f}" for rate in rates) + ("  now" if config == current else ""))


def make_needs(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AttentionNeeds:
    return AttentionNeeds(HEADS, KV_HEADS, DIM, dtype, device, BLOCK)


def make_step(
    sequences: int, context: int, new: int, device: torch.device, copies: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Step:
    """Make a step of sequences with `context` tokens, the last `new` of which are queries.

    `copies` is the number of KV caches; 0 for as many as do not fit into L2.
    """
    blocks = -(-context // BLOCK)
    shape = (2, sequences * blocks, BLOCK, KV_HEADS, DIM)
    copies = copies or max(2, -(-_CACHE_BYTES // (math.prod(shape) * dtype.itemsize)))
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


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
