"""Random sampling in Triton: filters and Gumbel-max in three launches, without a sort and without a full-size copy.

sampling/random_sampling.py computes the same in plain torch, and is the reference. Both pick the same tokens:

- The noise is counter-based (sampling/noise.py), so a kernel computes the number of any token by itself.
- Masses are summed as integers, which is exact in any order.
- Division, exp and log are those that torch's CUDA kernels use (libdevice), not Triton's approximations.

The filters are not searched for their thresholds. The best of *all* tokens, with noise, is the best of the kept ones
too if the filters keep it. With top_p = 0.95 that is true for 95% of the rows. To know, it is enough to count the
tokens with a higher score and to sum their mass. A row whose token is dropped is drawn again among the higher scores;
for top_k, among the k best.

    _draw_kernel      every chunk of a row: the best token with noise, and the mass of the chunk
    _above_kernel     every chunk of a row that is filtered: the tokens above the drawn one, and their mass
    _finish_kernel    every row: accepts the token or draws again, and stores it

Greedy rows leave the first two kernels at once. Nothing waits for the host, so CUDA graphs can hold the launches.

With a shard of the vocabulary, ranks agree on the thresholds first (sampling/vocab_shards.py): score_histogram() is one
round of their search, and draw_shard() then draws from the shard.

Scores are (logit - row maximum) / temperature, as in sampling/filters.py.
Shapes: R rows, V tokens, C chunks of BLOCK tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (kernel arguments are Triton pointers and scalars, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from yalis.kernels.fused import pdl_sync, with_contiguous_rows
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.pdl import pdl_option

#: The rows of the parameter tensor, int64 [6, R]. Floats are stored as their bits: temperature and log_min_p as
#: float32, top_p as float64. Temperature 0: greedy. top_k 0 or V, and top_p infinity: no filter.
COLUMNS = ("seed", "position", "temperature", "top_k", "top_p", "log_min_p")
_SEED, _POSITION, _TEMPERATURE, _TOP_K, _TOP_P, _LOG_MIN_P = (tl.constexpr(i) for i in range(len(COLUMNS)))
_CHUNK = 2048  # tokens of a program of the first two kernels
_FINISH_CHUNK = 4096  # tokens that the last kernel handles at a time

_INT64_MIN = tl.constexpr(-(2**63))
_MAX32 = tl.constexpr(0x7FFFFFFF)
_ORDER_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)
_FLOAT_MIN = tl.constexpr(torch.finfo(torch.float32).min)
_FIXED_POINT_ONE = tl.constexpr(2.0**40)  # FIXED_POINT_ONE of sampling/filters.py
# The constants of sampling/noise.py, as signed integers.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX64_A, _MIX64_B = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64), tl.constexpr(0x94D049BB133111EB - 2**64)
_MIX32_A, _MIX32_B = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B - 2**32)


@triton.jit
def _exp(x, LIBDEVICE: tl.constexpr):
    """exp(x) with the bits of torch's CUDA kernels. The interpreter has no libdevice."""
    if LIBDEVICE:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _log(x, LIBDEVICE: tl.constexpr):
    if LIBDEVICE:
        return libdevice.log(x)
    else:
        return tl.log(x)


@triton.jit
def _mix64(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX64_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX64_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _load_key(params_ptr, rows, row):
    """Return the key of a row's noise."""
    seed, position = tl.load(params_ptr + _SEED * rows + row), tl.load(params_ptr + _POSITION * rows + row)
    return _mix64(_mix64(seed + _GOLDEN) ^ (position * _GOLDEN))


@triton.jit
def _gumbel(key, token, LIBDEVICE: tl.constexpr):
    """Return the noise of int32 tokens, as sampling/noise.py does."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    x = (token ^ ((token >> 16) & 0xFFFF)) * _MIX32_A
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX32_B
    bits = (x ^ ((x >> 16) & 0xFFFF)) ^ low
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MIX32_A + high
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX32_B
    uniform = ((bits >> 9).to(tl.float32) + 4194304.5) * 1.1920928955078125e-07  # 2^22 + 0.5, 2^-23
    return -_log(-_log(uniform, LIBDEVICE), LIBDEVICE)


@triton.jit
def _mass(score, LIBDEVICE: tl.constexpr):
    """Return unnormalised probabilities in fixed point, int64."""
    return (_exp(score, LIBDEVICE) * _FIXED_POINT_ONE).to(tl.int64)


@triton.jit
def _order(x):
    """Return float32 x as int32 of the same order. -0 and 0 are equal; no x may be NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAX32)


@triton.jit
def _pack(x, token):
    """Return int64 whose maximum is the highest x and, among equal ones, the lowest token."""
    return (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _unpack_token(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def _load_float(params_ptr, column, rows, row):
    return tl.load(params_ptr + column * rows + row).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load_top_k(params_ptr, rows, row, V):
    """Return top_k, 0 if it keeps all tokens."""
    k = tl.load(params_ptr + _TOP_K * rows + row)
    return tl.where(k < V, k, 0)


@triton.jit
def _load_top_p(params_ptr, rows, row):
    return tl.load(params_ptr + _TOP_P * rows + row).to(tl.float64, bitcast=True)


@triton.jit
def _load_top(logits_ptr, stride, best_ids_ptr, row):
    """Return the row's maximum. The clamp avoids NaN in a row of -inf."""
    best_id = tl.maximum(tl.load(best_ids_ptr + row), 0)
    return tl.maximum(tl.load(logits_ptr + row * stride + best_id).to(tl.float32), _FLOAT_MIN)


@triton.jit
def _load_scores(logits_ptr, stride, row, token, V, top, temperature):
    """Return the scores of these tokens, -inf beyond the vocabulary."""
    x = tl.load(logits_ptr + row * stride + token, mask=token < V, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x - top, temperature)


@triton.jit(do_not_specialize=["R"])
def _draw_kernel(
    drawn_ptr, mass_ptr, logits_ptr, stride, best_ids_ptr, params_ptr, R, V,
    BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the best token with noise of each chunk, packed, and the mass of the chunk. Grid: (R, C)."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = _load_float(params_ptr, _TEMPERATURE, R, row)
    if temperature > 0:
        token = chunk * BLOCK + tl.arange(0, BLOCK)
        top = _load_top(logits_ptr, stride, best_ids_ptr, row)
        score = _load_scores(logits_ptr, stride, row, token, V, top, temperature)
        noisy = score + _gumbel(_load_key(params_ptr, R, row), token, LIBDEVICE)
        noisy = tl.where(score < _load_float(params_ptr, _LOG_MIN_P, R, row), -float("inf"), noisy)
        packed = tl.where(token < V, _pack(noisy, token), _INT64_MIN)
        out = row * tl.num_programs(1) + chunk
        tl.store(drawn_ptr + out, tl.max(packed, 0))
        if _load_top_p(params_ptr, R, row) < float("inf"):
            tl.store(mass_ptr + out, tl.sum(_mass(score, LIBDEVICE), 0))


@triton.jit(do_not_specialize=["R"])
def _above_kernel(
    count_ptr, above_ptr, drawn_ptr, logits_ptr, stride, best_ids_ptr, params_ptr, R, V,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, LIBDEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the tokens of each chunk with a higher score than the drawn one, and sum their mass. Grid: (R, C)."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    temperature = _load_float(params_ptr, _TEMPERATURE, R, row)
    filtered = (_load_top_k(params_ptr, R, row, V) > 0) | (_load_top_p(params_ptr, R, row) < float("inf"))
    if (temperature > 0) & filtered:
        c = tl.arange(0, BLOCK_C)
        drawn = _unpack_token(tl.max(tl.load(drawn_ptr + row * chunks + c, mask=c < chunks, other=_INT64_MIN), 0))
        top = _load_top(logits_ptr, stride, best_ids_ptr, row)
        drawn_score = _load_scores(logits_ptr, stride, row, drawn, V, top, temperature)
        score = _load_scores(logits_ptr, stride, row, chunk * BLOCK + tl.arange(0, BLOCK), V, top, temperature)
        higher = score > drawn_score
        tl.store(count_ptr + row * chunks + chunk, tl.sum(higher.to(tl.int32), 0))
        tl.store(above_ptr + row * chunks + chunk, tl.sum(tl.where(higher, _mass(score, LIBDEVICE), 0), 0))


@triton.jit
def _kth_logit(logits_ptr, stride, row, V, k, highest, BLOCK: tl.constexpr):
    """Return the k-th highest logit of a row, k <= V. `highest`: the row's maximum.

    A bisection over the values in order. Each round moves a bound to a value that occurs, so it takes fewer rounds than
    the type has bits where values are equal, as they are in bfloat16.
    """
    high = _order(highest).to(tl.int64)  # the result is in low .. high
    low = high * 0 + _ORDER_OF_MINUS_INFINITY
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.zeros([BLOCK], tl.int64)
        lowest_kept = tl.full([BLOCK], _MAX32, tl.int64)
        highest_left = tl.full([BLOCK], _INT64_MIN, tl.int64)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * stride + token, mask=token < V, other=-float("inf")).to(tl.float32)
            order = tl.where(token < V, _order(x).to(tl.int64), _INT64_MIN)
            kept = order >= middle
            count += kept.to(tl.int64)
            lowest_kept = tl.minimum(lowest_kept, tl.where(kept, order, _MAX32))
            highest_left = tl.maximum(highest_left, tl.where(kept, _INT64_MIN, order))
        total = tl.sum(count, 0)
        if total >= k:
            low = tl.min(lowest_kept, 0)
            high = tl.where(total == k, low, high)
        else:
            high = tl.max(highest_left, 0)
    bits = low.to(tl.int32)
    return (bits ^ ((bits >> 31) & _MAX32)).to(tl.float32, bitcast=True)


@triton.jit
def _draw_again(
    logits_ptr, stride, row, V, top, temperature, bound, strict, log_min_p, key,
    BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr,
):  # fmt: skip
    """Return the best token with noise among those whose score is at least `bound`, or above it if `strict`."""
    best = tl.full([BLOCK], _INT64_MIN, tl.int64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = _load_scores(logits_ptr, stride, row, token, V, top, temperature)
        kept = (token < V) & (score >= log_min_p) & ((score > bound) | ((score == bound) & (strict == 0)))
        if tl.max(kept.to(tl.int32), 0) > 0:  # the noise takes most of the time
            packed = _pack(score + _gumbel(key, token, LIBDEVICE), token)
            best = tl.maximum(best, tl.where(kept, packed, _INT64_MIN))
    return _unpack_token(tl.max(best, 0))


@triton.jit
def _mass_above(logits_ptr, stride, row, V, top, temperature, bound, BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr):
    """Return the number of tokens whose score is above `bound`, and their mass."""
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        score = _load_scores(logits_ptr, stride, row, start + tl.arange(0, BLOCK), V, top, temperature)
        higher = score > bound
        if tl.max(higher.to(tl.int32), 0) > 0:
            count += higher.to(tl.int32)
            mass += tl.where(higher, _mass(score, LIBDEVICE), 0)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit(do_not_specialize=["R"])
def _finish_kernel(
    out_ptr, drawn_ptr, mass_ptr, count_ptr, above_ptr, logits_ptr, stride, best_ids_ptr, params_ptr, last_ptr,
    request_slots_ptr, R, V, chunks, NONE: tl.constexpr, FEED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, LIBDEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept the drawn token of each row or draw again, and store it, with FEED also in last_tokens. Grid: (R,)."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    best_id = tl.load(best_ids_ptr + row)
    highest = tl.load(logits_ptr + row * stride + tl.maximum(best_id, 0)).to(tl.float32)
    token = best_id
    temperature = _load_float(params_ptr, _TEMPERATURE, R, row)
    if temperature > 0:
        c = tl.arange(0, BLOCK_C)
        cells, in_row = row * chunks + c, c < chunks
        top = tl.maximum(highest, _FLOAT_MIN)
        token = _unpack_token(tl.max(tl.load(drawn_ptr + cells, mask=in_row, other=_INT64_MIN), 0))
        k = _load_top_k(params_ptr, R, row, V)
        top_p = _load_top_p(params_ptr, R, row)
        number = (highest == highest) & (highest < float("inf"))
        if number & ((k > 0) | (top_p < float("inf"))):
            log_min_p = _load_float(params_ptr, _LOG_MIN_P, R, row)
            key = _load_key(params_ptr, R, row)
            score = _load_scores(logits_ptr, stride, row, token, V, top, temperature)
            count = tl.sum(tl.load(count_ptr + cells, mask=in_row, other=0), 0).to(tl.int64)
            above = tl.sum(tl.load(above_ptr + cells, mask=in_row, other=0), 0)
            total = above * 0
            if k == 0:
                total = tl.sum(tl.load(mass_ptr + cells, mask=in_row, other=0), 0)
            elif (top_p < float("inf")) | (count >= k):
                kth = _kth_logit(logits_ptr, stride, row, V, k, highest, BLOCK)
                lowest = tl.div_rn(kth - top, temperature)
                if top_p < float("inf"):
                    # Of the tokens tied at the threshold, only as many count as complete top_k.
                    higher, total = _mass_above(logits_ptr, stride, row, V, top, temperature, lowest, BLOCK, LIBDEVICE)
                    total += (k - higher) * _mass(lowest, LIBDEVICE)
                if count >= k:
                    token = _draw_again(
                        logits_ptr, stride, row, V, top, temperature, lowest, 0, log_min_p, key,
                        BLOCK, LIBDEVICE,
                    )  # fmt: skip
                    score = _load_scores(logits_ptr, stride, row, token, V, top, temperature)
                    if top_p < float("inf"):
                        _, above = _mass_above(logits_ptr, stride, row, V, top, temperature, score, BLOCK, LIBDEVICE)
            goal = tl.where(top_p < float("inf"), top_p, 0.0) * total.to(tl.float64)
            # The best token is kept even in a row without mass.
            while (top_p < float("inf")) & (above > 0) & (above.to(tl.float64) >= goal):
                token = _draw_again(
                    logits_ptr, stride, row, V, top, temperature, score, 1, log_min_p, key,
                    BLOCK, LIBDEVICE,
                )  # fmt: skip
                score = _load_scores(logits_ptr, stride, row, token, V, top, temperature)
                _, above = _mass_above(logits_ptr, stride, row, V, top, temperature, score, BLOCK, LIBDEVICE)
        token = tl.where(number, token, NONE)
    token = tl.where(highest == highest, token, NONE)
    tl.store(out_ptr + row, token)
    if FEED:
        tl.store(last_ptr + tl.load(request_slots_ptr + row), tl.maximum(token, 0))


def sample(
    logits: Tensor,  # [R, V]
    best_ids: Tensor,  # int64 [R], the argmax of each row; negative: the row has NaN
    params: Tensor,  # int64 [len(COLUMNS), R], contiguous
    none: int,
    last_tokens: Tensor | None = None,
    request_slots: Tensor | None = None,  # [R], where last_tokens gets the tokens
    pdl: bool = False,
) -> Tensor:
    """Return the token of each row, int64 [R], and `none` for a row that contains NaN or, if random, infinity."""
    logits = with_contiguous_rows(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    chunks = cdiv(vocab, _CHUNK)
    block_c = next_power_of_2(chunks)
    drawn, mass, above = torch.empty((3, rows, chunks), dtype=torch.int64, device=logits.device).unbind()
    count = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    source = (logits, logits.stride(0), best_ids, params)
    options = {"LIBDEVICE": logits.is_cuda, "PDL": pdl, **pdl_option(pdl)}
    _draw_kernel[(rows, chunks)](drawn, mass, *source, rows, vocab, BLOCK=_CHUNK, num_warps=4, **options)
    _above_kernel[(rows, chunks)](
        count, above, drawn, *source, rows, vocab, BLOCK=_CHUNK, BLOCK_C=block_c, num_warps=4, **options
    )
    feed = last_tokens is not None
    _finish_kernel[(rows,)](
        out, drawn, mass, count, above, *source, last_tokens if feed else out, request_slots if feed else out,
        rows, vocab, chunks, NONE=none, FEED=feed, BLOCK=_FINISH_CHUNK, BLOCK_C=block_c, num_warps=8, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["W", "first_token"])
def _draw_shard_kernel(
    drawn_ptr, logits_ptr, stride, top_ptr, temperature_ptr, threshold_ptr, keys_ptr, W, first_token,
    BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr,
):  # fmt: skip
    """Write the best token with noise of each chunk, packed. NaN is above all numbers. Grid: (S, C)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    top, temperature = tl.load(top_ptr + row), tl.load(temperature_ptr + row)
    score = _load_scores(logits_ptr, stride, row, index, W, top, temperature)
    noisy = score + _gumbel(tl.load(keys_ptr + row), first_token + index, LIBDEVICE)
    noisy = tl.where(score < tl.load(threshold_ptr + row), -float("inf"), noisy)
    order = tl.where(noisy != noisy, _MAX32, _order(tl.where(noisy != noisy, 0.0, noisy)))
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    tl.store(drawn_ptr + row * tl.num_programs(1) + chunk, tl.max(tl.where(index < W, packed, _INT64_MIN), 0))


def draw_shard(
    logits: Tensor,  # [S, W]
    top: Tensor,  # [S, 1], the maximum of each row over all shards
    temperature: Tensor,  # [S, 1]
    threshold: Tensor,  # [S, 1], the lowest score that a row keeps
    keys: Tensor,  # [S], of the noise
    first_token: int,  # of the shard
) -> tuple[Tensor, Tensor]:
    """Return the highest score with noise of each row in this shard and its index: [S, 1], [S, 1]."""
    logits = with_contiguous_rows(logits)
    rows, width = logits.shape
    drawn = torch.empty((rows, cdiv(width, _CHUNK)), dtype=torch.int64, device=logits.device)
    _draw_shard_kernel[drawn.shape](
        drawn, logits, logits.stride(0), top.contiguous(), temperature.contiguous(), threshold.contiguous(), keys,
        width, first_token, BLOCK=_CHUNK, LIBDEVICE=logits.is_cuda, num_warps=4,
    )  # fmt: skip
    best = drawn.amax(1, keepdim=True)
    order = (best >> 32).to(torch.int32)
    values = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, 0x7FFFFFFF - (best & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["W", "shift"])
def _histogram_kernel(
    histogram_ptr, logits_ptr, stride, rows_ptr, top_ptr, temperature_ptr, prefix_ptr, W, shift,
    BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr,
):  # fmt: skip
    """Add the mass of each chunk to the histogram of its row. Grid: (N, C)."""
    out = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + out)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = _load_scores(logits_ptr, stride, row, index, W, tl.load(top_ptr + row), tl.load(temperature_ptr + row))
    bins = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> shift
    mass = _mass(score, LIBDEVICE)
    counted = (index < W) & ((bins >> 8).to(tl.int64) == tl.load(prefix_ptr + out)) & (mass > 0)
    tl.atomic_add(histogram_ptr + out * 256 + (bins & 0xFF), mass, mask=counted)


def score_histogram(
    logits: Tensor,  # [S, W]
    rows: Tensor,  # int64 [N], the rows to count
    top: Tensor,  # [S, 1]
    temperature: Tensor,  # [S, 1]
    prefix: Tensor,  # int64 [N, 1]
    shift: int,
) -> Tensor:
    """Return the mass of the scores by 8 bits of their magnitude above `shift`, int64 [N, 256].

    Only scores whose higher bits are `prefix` count. Integers are added, so the order does not matter.
    """
    logits = with_contiguous_rows(logits)
    histogram = torch.zeros((len(rows), 256), dtype=torch.int64, device=logits.device)
    _histogram_kernel[(len(rows), cdiv(logits.shape[1], _CHUNK))](
        histogram, logits, logits.stride(0), rows, top.contiguous(), temperature.contiguous(), prefix.contiguous(),
        logits.shape[1], shift, BLOCK=_CHUNK, LIBDEVICE=logits.is_cuda, num_warps=4,
    )  # fmt: skip
    return histogram
