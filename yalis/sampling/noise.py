"""Counter-based random numbers: a pure function of (seed, position, token id), whatever the batch or vocabulary split.

(seed, position) is hashed to a 64-bit key and the token id to 32 bits; a short keyed mixer combines the two. This is
wrapping integer arithmetic, so the uniform numbers are the same on every device. Only the logarithms of `gumbel` may
differ between devices.

Shapes: R rows, V token ids. Any ids: a slice of the vocabulary gets the same slice of the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The mixers are splitmix64 (keys) and lowbias32 (token hashes), both with good avalanche behaviour.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MIX_A, _MIX_B = 0x7FEB352D, 0x846CA68B


def uniform(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Return float32 numbers in the open interval (0, 1): [R], [R], [V] -> [R, V]."""
    return uniform_from(row_keys(seed, position), hash_tokens(token_id))


def gumbel(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Return standard Gumbel noise [R, V]: argmax(logits + noise) is a sample from softmax(logits)."""
    return gumbel_from(row_keys(seed, position), hash_tokens(token_id))


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """Return the key of each row of noise: int64 [R], [R] -> int64 [R]."""
    return _mix64(_mix64(seed + _signed(_GOLDEN, 64)) ^ (position * _signed(_GOLDEN, 64)))


def hash_tokens(token_id: Tensor) -> Tensor:
    """Return the hash of each token id, which is the same for every row and step: int [V] -> int32 [V]."""
    x = _xor_shift(token_id.to(torch.int32), 16) * _signed(_MIX_A, 32)
    x = _xor_shift(x, 15) * _signed(_MIX_B, 32)
    return _xor_shift(x, 16)


def uniform_from(keys: Tensor, token_hashes: Tensor) -> Tensor:
    """`uniform` from precomputed keys int64 [R] and token hashes int32 [V]."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2, 1).unbind(1)
    return _uniform(low, high, token_hashes)


def _uniform(low: Tensor, high: Tensor, token_hashes: Tensor) -> Tensor:
    """Mix the halves of keys with token hashes, all int32, which are broadcast."""
    bits = token_hashes ^ low
    scratch = torch.empty_like(bits)  # everything is in place: on a CPU, allocation costs more than arithmetic
    bits ^= torch.bitwise_right_shift(bits, 16, out=scratch).bitwise_and_(0xFFFF)
    bits *= _signed(_MIX_A, 32)
    bits += high
    bits ^= torch.bitwise_right_shift(bits, 15, out=scratch).bitwise_and_(0x1FFFF)
    bits *= _signed(_MIX_B, 32)
    bits >>= 9
    # The top 23 bits plus one half: every value is exact in float32, and none is 0 or 1.
    return scratch.view(torch.float32).copy_(bits).add_(2**22 + 0.5).mul_(2.0**-23)


def gumbel_from(keys: Tensor, token_hashes: Tensor) -> Tensor:
    """`gumbel` from precomputed keys int64 [R] and token hashes int32 [V]."""
    return _gumbel(uniform_from(keys, token_hashes))


def gumbel_of_pairs(keys: Tensor, token_hashes: Tensor) -> Tensor:
    """The noise of pairs of a key int64 [N] and a token hash int32 [N]: the same numbers as in `gumbel_from`."""
    low, high = keys.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    return _gumbel(_uniform(low, high, token_hashes))


def _gumbel(uniform: Tensor) -> Tensor:
    return uniform.log_().neg_().log_().neg_()


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of a request's completion `index`; the first uses the request's seed."""
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
    """x ^ (x >> by) with a logical shift; torch's shift is arithmetic."""
    width = 64 if x.dtype == torch.int64 else 32
    return x ^ ((x >> by) & ((1 << (width - by)) - 1))


def _signed(value: int, width: int) -> int:
    """Return an unsigned constant as a signed integer of the same bits."""
    return value - (1 << width) if value >> (width - 1) else value
