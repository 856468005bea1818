"""Counter-based noise: a pure function of (seed, position, token id), whatever the batch or split of the vocabulary.

A (seed, position) pair is hashed to a 64-bit key and a token id to a 32-bit word; a short keyed mixer joins the two.
All of it is integer arithmetic that wraps, so every device computes the same uniform numbers; only the logarithms of
`gumbel` are a device's own.

Shapes: R rows, V token ids (any ids: a slice of the vocabulary gives the same slice of the noise).
"""

from __future__ import annotations

import torch
from torch import Tensor

# The finalisers below are splitmix64's (for keys) and lowbias32's (for words), both known for an even avalanche.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MIX_A, _MIX_B = 0x7FEB352D, 0x846CA68B


def uniform(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """float32 in (0, 1), ends excluded: [R], [R], [V] -> [R, V]."""
    return uniform_from(row_keys(seed, position), token_words(token_id))


def gumbel(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Standard Gumbel noise: the argmax of logits + noise is a draw from softmax(logits). [R], [R], [V] -> [R, V]."""
    return gumbel_from(row_keys(seed, position), token_words(token_id))


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """The key of each row of noise: int64 [R], [R] -> int64 [R]."""
    return _mix64(_mix64(seed + _signed(_GOLDEN, 64)) ^ (position * _signed(_GOLDEN, 64)))


def token_words(token_id: Tensor) -> Tensor:
    """What a token id contributes to the noise of every row, so it may be kept: int [V] -> int32 [V]."""
    word = _xor_shift(token_id.to(torch.int32), 16) * _signed(_MIX_A, 32)
    word = _xor_shift(word, 15) * _signed(_MIX_B, 32)
    return _xor_shift(word, 16)


def uniform_from(keys: Tensor, words: Tensor) -> Tensor:
    """`uniform` with its keys int64 [R] and words int32 [V] at hand."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2, 1).unbind(1)
    bits = words ^ low
    spare = torch.empty_like(bits)  # in place throughout: on a CPU, fresh memory costs more than the arithmetic
    bits ^= torch.bitwise_right_shift(bits, 16, out=spare).bitwise_and_(0xFFFF)
    bits *= _signed(_MIX_A, 32)
    bits += high
    bits ^= torch.bitwise_right_shift(bits, 15, out=spare).bitwise_and_(0x1FFFF)
    bits *= _signed(_MIX_B, 32)
    bits >>= 9
    # The top 23 bits, centred in their bins: every value is exact in float32 and none is 0 or 1.
    return spare.view(torch.float32).copy_(bits).add_(2**22 + 0.5).mul_(2.0**-23)


def gumbel_from(keys: Tensor, words: Tensor) -> Tensor:
    """`gumbel` with its keys int64 [R] and words int32 [V] at hand."""
    return uniform_from(keys, words).log_().neg_().log_().neg_()


def derive_seed(seed: int, index: int) -> int:
    """The seed of a request's completion `index`; the first keeps the request's own."""
    if index == 0:
        return seed
    x = (seed + index * _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (x ^ (x >> 31)) >> 1


def _mix64(x: Tensor) -> Tensor:
    x = _xor_shift(x, 30) * _signed(0xBF58476D1CE4E5B9, 64)
    x = _xor_shift(x, 27) * _signed(0x94D049BB133111EB, 64)
    return _xor_shift(x, 31)


def _xor_shift(x: Tensor, by: int) -> Tensor:
    """x ^ (x >> by) with zeros shifted in: torch's own shift copies the sign."""
    width = 64 if x.dtype == torch.int64 else 32
    return x ^ ((x >> by) & ((1 << (width - by)) - 1))


def _signed(value: int, width: int) -> int:
    """The two's complement reading of an unsigned constant, which is what torch's integers hold."""
    return value - (1 << width) if value >> (width - 1) else value
