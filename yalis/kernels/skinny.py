"""Matrix products with few rows, which cost what reading the matrix costs. kernels/reference.py says the same plainly.

One row is a sum of products: a program takes a few rows of the matrix, wide pieces of each, and adds up in registers.
Several rows go through the tensor cores, the matrix on the left, so that the few rows are the short side. Where a
matrix has too few rows to keep the whole device reading, its columns are split: each program leaves its part in
scratch, and the last to arrive adds the parts up in their order, so a result never depends on who came first.
Tiles are powers of two, but a program may own fewer outputs than its tile has, so that all processors have as much to
read; it does not load the others. Descriptors bring the tiles of 128 rows, the most that a program has registers for.

What stands behind the product joins it: the bias, the gate of an MLP. An RMSNorm of the input is a launch of its own,
which adds the residual too (kernels/fused.py): inside the product every program would repeat it, which was slower at
every size tried. Sums are float32. Rounded to the dtype of the tensors, where separate operations round: the product
with its bias; in an MLP gate and up, the activation of the gate, and their product.

Splits share counters of the device, so one stream carries its launches, captured or not.

A dependent launch (`pdl`, see kernels/pdl.py) asks for its first weights before it waits for its input: with one
row it loads them, with several it brings them into the L2 cache.

Names: R rows of x · N outputs · K inputs · OWN outputs of a program, BN filled up · BK inputs it takes at a time ·
RP rows, filled up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are pointers and numbers of a language of its own)

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from yalis.kernels.fused import gate
from yalis.kernels.gpu_limits import GpuLimits, gpu_limits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.pdl import pdl_option
from yalis.kernels.tma import make_descriptor, tma_compatible

MOST_ROWS = 64
TILED_ROWS = 128  # by descriptor; any fewer, and tiles that reach past the last row come slowly
_LINES = 256  # cache lines a program asks for before its input is there
_LINE_BYTES = 128


@triton.jit
def _ask(at, begin, end, LINE: tl.constexpr, LINES: tl.constexpr):
    """Bring the first lines of these matrix rows, numbers begin..end of each, into the L2 cache.

    Of all rows of a tile: those it does not own are its neighbour's, who asks for them too.
    """
    k = tl.minimum(begin + tl.arange(0, LINES) * LINE, tl.maximum(end - 1, 0))
    at = (at[:, None] + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _finish(
    acc, up, y_ptr, bias_ptr, r, n, y_row, N, live, ACTIVATION: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Sums acc (and up) of outputs n for rows r: bias, gate, and out. r, n and live broadcast to acc."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    out = acc.to(dtype)
    if ACTIVATION != "":
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        out = gate(out.to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype).to(dtype)
    tl.store(y_ptr + r * y_row + n, out, mask=live)


@triton.jit
def _piece(at, own, start, end, BK: tl.constexpr, EVEN: tl.constexpr):
    """Numbers start..start + BK of these matrix rows, 0 from `end` on and in rows that are not its own.

    EVEN: none lies from `end` on. own: None, if all are.
    """
    k = start + tl.arange(0, BK)
    at = at[:, None] + k[None, :]
    if EVEN and own is None:
        return tl.load(at, eviction_policy="evict_first")
    else:
        inside = ((k < end) | EVEN)[None, :]
        if own is not None:
            inside = inside & own[:, None]
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _one_row(
    y_ptr, x_ptr, w_ptr, bias_ptr, w_row, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    EVEN: tl.constexpr = K % BK == 0
    k = tl.arange(0, BK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end, the last once more
    gates = w_ptr + row * w_row
    ups = w_ptr + (row + N) * w_row
    if PDL:
        gdc_launch_dependents()
    # The first weights are on their way while the launch before ends.
    w = _piece(gates, None, 0, K, BK, EVEN)
    u = _piece(ups, None, 0, K, BK, EVEN) if GATED else w
    if PDL:
        gdc_wait()

    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, K, BK):  # unrolled, so that loads of several pieces are in flight
        inside = (start + k < K) | EVEN
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * x
        if GATED:
            up += u.to(tl.float32) * x
        if start + BK < K:
            w = _piece(gates, None, start + BK, K, BK, EVEN)
            if GATED:
                u = _piece(ups, None, start + BK, K, BK, EVEN)
    _finish(tl.sum(acc, 1), tl.sum(up, 1), y_ptr, bias_ptr, 0, n, 0, N, n < N, ACTIVATION, BIAS)


@triton.jit(do_not_specialize=["R"])
def _few_rows(
    y_ptr, x_ptr, x_tiles, w_ptr, w_tiles, bias_ptr, part_ptr, arrived_ptr, x_row, w_row, R, N, K,
    RP: tl.constexpr, OWN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    DESCRIBED: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, RP)
    k = tl.arange(0, BK)
    n = tile * OWN + tl.arange(0, BN)
    own = tl.arange(0, BN) < OWN if OWN < BN else None
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end, the last once more
    share = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    begin = split * share
    end = tl.minimum(K, begin + share)
    gates = w_ptr + row * w_row
    ups = w_ptr + (row + N) * w_row
    if PDL:
        gdc_launch_dependents()
        _ask(gates, begin, end, LINE, LINES)
        if GATED:
            _ask(ups, begin, end, LINE, LINES)
        gdc_wait()

    some = (r < R)[:, None]
    x_at = x_ptr + (r.to(tl.int64) * x_row)[:, None] + k[None, :]
    acc = tl.zeros([BN, RP], tl.float32)
    up = tl.zeros([BN, RP], tl.float32)
    for start in range(begin, end, BK):
        if DESCRIBED:
            x = x_tiles.load([0, start])
            w = w_tiles.load([tile * BN, start])
        else:
            inside = ((start + k < K) | EVEN)[None, :]
            x = tl.load(x_at + start, mask=some & inside, other=0.0)
            w = _piece(gates, own, start, K, BK, EVEN)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            w = w_tiles.load([N + tile * BN, start]) if DESCRIBED else _piece(ups, own, start, K, BK, EVEN)
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")

    live = (n < N)[:, None] & (r < R)[None, :]
    if own is not None:
        live = live & own[:, None]
    row = r.to(tl.int64)[None, :]
    if SPLITS == 1:
        _finish(acc, up, y_ptr, bias_ptr, row, n[:, None], N, N, live, ACTIVATION, BIAS)
    else:
        part = part_ptr + row * N + n[:, None]
        step = R * N  # from one part to the next; gates and ups take turns
        HALVES: tl.constexpr = 2 if GATED else 1
        tl.store(part + split * HALVES * step, acc, mask=live)
        if GATED:
            tl.store(part + (split * HALVES + 1) * step, up, mask=live)
        # Every thread's stores come before the count, and the count before any load.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(arrived_ptr + tile, 0)  # for the next launch
            acc = tl.zeros([BN, RP], tl.float32)
            up = tl.zeros([BN, RP], tl.float32)
            for s in range(SPLITS):
                acc += tl.load(part + s * HALVES * step, mask=live, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(part + (s * HALVES + 1) * step, mask=live, other=0.0, cache_modifier=".cg")
            _finish(acc, up, y_ptr, bias_ptr, row, n[:, None], N, N, live, ACTIVATION, BIAS)


class Shape(NamedTuple):
    """How a product is launched."""

    outputs: int  # a program computes; with 1 and 128 rows a power of two
    inputs: int  # it takes at a time
    warps: int
    stages: int = 1  # of loads in flight, with several rows
    splits: int = 1  # of the columns, with several rows


class Problem(NamedTuple):
    """What a launch is chosen by."""

    rows: int  # 1, or filled up to 16, 32, 64 or 128
    outputs: int
    inputs: int
    itemsize: int
    gated: bool = False

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, gated: bool = False) -> Problem:
        rows = 1 if x.shape[0] == 1 else max(16, next_power_of_2(x.shape[0]))
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        return cls(rows, outputs, weight.shape[1], x.itemsize, gated)


#: Llama-3.1-8B's in bfloat16, by search on an H200, in whole decode steps or chains of layers; tune_kernels.py tries
#: products alone.
TUNED: dict[Problem, Shape] = {
    Problem(1, 6144, 4096, 2): Shape(4, 2048, 8),
    Problem(1, 4096, 4096, 2): Shape(1, 2048, 4),
    Problem(1, 14336, 4096, 2, True): Shape(1, 2048, 8),
    Problem(1, 4096, 14336, 2): Shape(4, 1024, 4),
    Problem(1, 128256, 4096, 2): Shape(1, 2048, 4),
    Problem(16, 6144, 4096, 2): Shape(48, 256, 4, 4, 1),
    Problem(16, 4096, 4096, 2): Shape(64, 256, 4, 3, 2),
    Problem(16, 14336, 4096, 2, True): Shape(112, 128, 4, 3, 1),
    Problem(16, 4096, 14336, 2): Shape(64, 256, 4, 3, 2),
    Problem(16, 128256, 4096, 2): Shape(128, 128, 4, 3, 1),
    Problem(32, 6144, 4096, 2): Shape(48, 128, 4, 5, 1),
    Problem(32, 4096, 4096, 2): Shape(64, 256, 4, 3, 2),
    Problem(32, 14336, 4096, 2, True): Shape(56, 128, 4, 5, 1),
    Problem(32, 4096, 14336, 2): Shape(64, 128, 4, 5, 2),
    Problem(32, 128256, 4096, 2): Shape(64, 128, 4, 3, 1),
    Problem(64, 6144, 4096, 2): Shape(64, 128, 4, 5, 1),
    Problem(64, 4096, 4096, 2): Shape(64, 128, 4, 5, 2),
    Problem(64, 14336, 4096, 2, True): Shape(128, 64, 8, 4, 1),
    Problem(64, 4096, 14336, 2): Shape(64, 128, 4, 5, 2),
    Problem(64, 128256, 4096, 2): Shape(128, 64, 8, 4, 1),
    Problem(128, 6144, 4096, 2): Shape(64, 128, 4, 4),
    Problem(128, 4096, 4096, 2): Shape(64, 64, 4, 8, 2),
    Problem(128, 14336, 4096, 2, True): Shape(64, 64, 4, 3),
    Problem(128, 4096, 14336, 2): Shape(64, 128, 4, 4, 2),
    Problem(128, 128256, 4096, 2): Shape(128, 64, 4, 3),
}


@cache
def choose(problem: Problem, limits: GpuLimits) -> Shape:
    """The launch found by search, else one that should do; always one that the device has limits for."""
    tuned = TUNED.get(problem)
    if tuned is None or shared_bytes(problem, tuned) > limits.max_shared_memory:
        return _guess(problem, limits)
    tile = next_power_of_2(tuned.outputs)
    if tuned.outputs == tile:
        return tuned
    return tuned._replace(outputs=evenly(problem.outputs, tile, tuned.splits, limits))  # as it was where it was found


def shared_bytes(problem: Problem, shape: Shape) -> int:
    """Of shared memory, that the loads of several rows in flight take at most."""
    if problem.rows == 1:
        return 0
    weights = next_power_of_2(shape.outputs) * (2 if problem.gated else 1)
    return shape.stages * shape.inputs * (weights + problem.rows) * problem.itemsize


def _guess(problem: Problem, limits: GpuLimits) -> Shape:
    """About what won for Llama-3.1-8B's matrices on an H200."""
    wide = 16 // problem.itemsize  # what a thread loads at once
    if problem.rows == 1:
        inputs = max(64, min(256 * wide, next_power_of_2(problem.inputs)))
        while problem.inputs % inputs and inputs > 64 * wide:
            inputs //= 2
        return Shape(max(1, 64 * wide // inputs), inputs, max(1, inputs // (32 * wide)))
    if problem.itemsize == 4:  # exact products run outside the tensor cores
        outputs, inputs, stages = 32, 64, 2
    else:
        outputs, inputs = 64, 64 if problem.gated and problem.rows > 32 else 128
        stages = 5 if problem.rows <= MOST_ROWS else 4
    tiles = cdiv(problem.outputs, outputs)
    # A program for each processor, but a part is worth a few chunks at least.
    splits = max(1, min(limits.num_sms // tiles, cdiv(problem.inputs, inputs) // 4, 8))
    if problem.itemsize == 2 and problem.rows <= MOST_ROWS:
        even = evenly(problem.outputs, outputs, splits, limits)
        # With up to 16 rows it pays to look further ahead; narrow tiles that do not lost more than processors won.
        deep = Shape(even, 256, 4, 4, splits)
        if problem.rows > 16 or (problem.gated and 4 * even >= 3 * outputs):
            outputs = even
        elif (
            not problem.gated
            and problem.inputs >= 1024 * splits
            and shared_bytes(problem, deep) <= limits.max_shared_memory
        ):
            return deep
    shape = Shape(outputs, inputs, 4, stages, splits)
    while shared_bytes(problem, shape) > limits.max_shared_memory and shape.stages > 2:
        shape = shape._replace(stages=shape.stages - 1)
    return shape


def evenly(outputs: int, tile: int, splits: int, limits: GpuLimits) -> int:
    """What a program owns if processors share `outputs` evenly, in as many rounds as whole tiles take.

    More than half of a tile, or all of it; in eights, since every number is a kernel of its own.
    """
    rounds = cdiv(cdiv(outputs, tile) * splits, limits.num_sms)
    even = 8 * cdiv(outputs, 8 * (rounds * limits.num_sms // splits))
    return even if tile // 2 < even < tile else tile


def candidates(problem: Problem, limits: GpuLimits) -> Iterator[Shape]:
    """Launches worth trying, for a search."""
    wide = 16 // problem.itemsize
    if problem.rows == 1:
        for outputs, warps, loads in product((1, 2, 4), (2, 4, 8, 16), (1, 2)):
            inputs = 32 * wide * warps * loads  # each thread so many loads of 16 bytes from each row
            if problem.inputs % inputs == 0 and outputs * loads <= 4:
                yield Shape(outputs, inputs, warps)
        return
    tiled = problem.rows > MOST_ROWS  # by descriptors, which bring whole tiles
    depths = (3, 4, 8) if tiled else (3, 4, 5)
    most = min(210_000, limits.max_shared_memory - 2048)  # a kernel has some of its own
    for tile, inputs, stages, splits in product((16, 32, 64, 128), (64, 128, 256), depths, (1, 2, 4, 8)):
        for outputs in {tile} if tiled else {tile, evenly(problem.outputs, tile, splits, limits)}:
            programs = cdiv(problem.outputs, outputs) * splits
            if programs < 90 or (splits > 1 and programs > 1200):
                continue
            for warps in {16: (2,), 128: (4, 8)}.get(tile, (4,)):
                shape = Shape(outputs, inputs, warps, stages, splits)
                if 24_000 <= shared_bytes(problem, shape) <= most:
                    yield shape


def linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    pdl: bool = False,
    shape: Shape | None = None,
) -> Tensor:
    """x times weight transposed, plus bias: [R, N] for 1 to MOST_ROWS rows, or TILED_ROWS."""
    return _launch(x, weight, bias, "", pdl, shape)


def gated_linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [2W, K], the gate's rows before those of up
    activation: str,
    bias: Tensor | None = None,  # [2W]
    pdl: bool = False,
    shape: Shape | None = None,
) -> Tensor:
    """activation(gate) * up, both products of x with their half of weight: [R, W]."""
    return _launch(x, weight, bias, activation, pdl, shape)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, pdl: bool, shape: Shape | None) -> Tensor:
    rows, inputs = x.shape
    assert 1 <= rows <= MOST_ROWS or rows == TILED_ROWS, f"{rows} rows"
    assert weight.stride(1) == 1, "the numbers of a row lie side by side"
    problem = Problem.of(x, weight, activation != "")
    shape = shape or choose(problem, gpu_limits(x.device))
    if x.stride(1) != 1:
        x = x.contiguous()
    outputs = problem.outputs
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = cdiv(outputs, shape.outputs)
    given = {
        "BN": next_power_of_2(shape.outputs), "BK": shape.inputs, "ACTIVATION": activation, "BIAS": bias is not None,
        "PDL": pdl, "num_warps": shape.warps, **pdl_option(pdl),
    }  # fmt: skip
    if rows == 1:
        _one_row[(tiles,)](y, x, weight, x if bias is None else bias, weight.stride(0), outputs, K=inputs, **given)
        return y
    part, arrived = y, y  # never touched where columns are not split
    if shape.splits > 1:
        part = torch.empty(
            (shape.splits * (2 if problem.gated else 1), rows, outputs), dtype=torch.float32, device=x.device
        )
        arrived = _counters(x.device)
        assert tiles <= arrived.numel(), f"{tiles} tiles"
    x_tiles, w_tiles = x, weight
    tiled = rows == TILED_ROWS
    if tiled:
        assert given["BN"] == shape.outputs, "descriptors bring whole tiles"
        x_tiles = make_descriptor(x, [problem.rows, shape.inputs])
        w_tiles = make_descriptor(weight, [shape.outputs, shape.inputs])
    _few_rows[(tiles, shape.splits)](
        y, x, x_tiles, weight, w_tiles, x if bias is None else bias, part, arrived,
        x.stride(0), weight.stride(0), rows, outputs, inputs,
        LINE=_LINE_BYTES // x.itemsize, LINES=_lines(shape, problem),
        RP=problem.rows, OWN=shape.outputs, EVEN=inputs % shape.inputs == 0, SPLITS=shape.splits, DESCRIBED=tiled,
        num_stages=shape.stages, **given,
    )  # fmt: skip
    return y


def suits(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether a product has so few rows that these kernels are the fastest known."""
    rows = x.shape[0]
    if rows == TILED_ROWS:
        return tileable(x, weight) and Problem.of(x, weight, gated) in TUNED
    return 0 < rows <= MOST_ROWS


def tileable(x: Tensor, weight: Tensor) -> bool:
    """Whether descriptors may bring the tiles; exact products run outside the tensor cores."""
    return gpu_limits(x.device).has_tma and x.itemsize == 2 and tma_compatible(x, weight)


def _lines(shape: Shape, problem: Problem) -> int:
    """Cache lines of each matrix row to ask for early: a power of two."""
    held = next_power_of_2(-(-problem.inputs * problem.itemsize // (shape.splits * _LINE_BYTES)))
    return max(1, min(held, _LINES // (next_power_of_2(shape.outputs) * (2 if problem.gated else 1))))


@cache
def _counters(device: torch.device) -> Tensor:
    """How many parts of each tile are done: all zero between launches, which follow each other in one stream.

    Graphs share them with everyone, so they are made by a launch that is not captured.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "the first launch compiles"
    return torch.zeros(4096, dtype=torch.int32, device=device)
