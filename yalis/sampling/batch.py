"""The sampling parameters of one step's rows, as device tensors. A group that no row needs is None and costs nothing.

A rank holds a shard of the vocabulary, and only the biases, penalties, bans and masks of tokens in it.

Shapes: R rows, S of them sampled at random (not greedy), W tokens in this rank's vocabulary shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yalis.kernels import ops
from yalis.sampling.noise import row_keys
from yalis.types import SamplingParams

# At a lower temperature scores could overflow. Sampling is greedy long before that, except between exact ties. A higher
# one is infinite in float32.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-10, 3e38
# Beyond this repetition_penalty, or its inverse, scores could overflow. Logits are far apart long before that.
_MAX_REPETITION = 1e10
# Up to this top_k, ranks exchange their best candidates. A larger one is found by histograms instead.
_MAX_CANDIDATES = 1024
_ALL_TOKENS = 2**31 - 1  # a top_k above any vocabulary, which may not fit in 64 bits
#: The parameters for which sampling needs the most memory per logit. The engine profiles its memory with them.
LARGEST_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=0)


#: What random sampling on a GPU reads of each row: the columns of kernels/sampling.py, which imports Triton.
RANDOM_COLUMNS = ("seed", "position", "temperature", "top_k", "top_p", "log_min_p")


@dataclass(frozen=True)
class SamplingRow:
    """How to sample a token from one row of logits."""

    params: SamplingParams
    seed: int  # 0 to 2^63 - 1
    position: int  # of the sampled token in its sequence; seed and position determine the noise
    history: tuple[Sequence[int], Sequence[int]] | None = None  # (prompt, output) ids; needed with penalties
    banned: tuple[int, ...] = ()  # token ids that must not be sampled, such as EOS before min_tokens
    #: the tokens that structured outputs allow, 32 in a word, the lowest bit first; None: any
    allowed: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if self.params.has_penalties and self.history is None:
            raise ValueError("a row with penalties needs its history")


@dataclass(frozen=True)
class LogitBias:
    """One entry for each (row, token of this rank's shard) that has a bias."""

    flat_indices: Tensor  # row * W + index in the shard, unique
    values: Tensor  # added to the logit

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_shard: range, device: torch.device) -> LogitBias | None:
        entries = [
            (i * len(vocab_shard) + token - vocab_shard.start, bias)
            for i, row in enumerate(rows)
            if row.params.logit_bias is not None
            for token, bias in row.params.logit_bias.items()
            if token in vocab_shard
        ]
        if all(row.params.logit_bias is None for row in rows):
            return None
        # Without an entry in this shard too: all ranks must convert their logits to float32, or they would disagree.
        flat_indices, values = zip(*entries, strict=True) if entries else ((), ())
        return cls(_make_tensor(flat_indices, torch.int64, device), _make_tensor(values, torch.float32, device))


@dataclass(frozen=True)
class Penalties:
    """One entry for each (row, token of this rank's shard) where the token occurs in the row's history."""

    flat_indices: Tensor  # row * W + index in the shard, unique
    repetition: Tensor
    additive: Tensor  # presence + frequency * count, subtracted from the logit

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_shard: range, device: torch.device) -> Penalties | None:
        flat_indices, repetition, additive = [], [], []
        for i, row in enumerate(rows):
            if not row.params.has_penalties or row.history is None:
                continue
            prompt, output = row.history
            tokens, inverse = np.unique(np.array((*prompt, *output), dtype=np.int64), return_inverse=True)
            count = np.bincount(inverse[len(prompt) :], minlength=len(tokens))  # in the output only
            in_shard = slice(*np.searchsorted(tokens, (vocab_shard.start, vocab_shard.stop)))
            tokens, count = tokens[in_shard] - vocab_shard.start, count[in_shard]
            flat_indices.append(i * len(vocab_shard) + tokens)
            penalty = min(max(row.params.repetition_penalty, 1 / _MAX_REPETITION), _MAX_REPETITION)
            repetition.append(np.full(len(tokens), penalty))
            additive.append(row.params.presence_penalty * (count > 0) + row.params.frequency_penalty * count)
        if not flat_indices:
            return None
        return cls(
            flat_indices=to_device(torch.from_numpy(np.concatenate(flat_indices)), device),
            repetition=to_device(torch.from_numpy(np.concatenate(repetition)).float(), device),
            additive=to_device(torch.from_numpy(np.concatenate(additive)).float(), device),
        )


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that structured outputs allow, for some of the rows."""

    rows: Tensor | None  # [M]; None: every row
    bits: Tensor  # uint8 [M, B]: 8 tokens in a byte, the lowest bit first
    offset: int  # the bit of the first token of this rank's shard

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_shard: range, device: torch.device) -> AllowedTokens | None:
        masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
        if not masks:
            return None
        first, last = vocab_shard.start // 8, -(-vocab_shard.stop // 8)
        bits = np.stack([mask.view(np.uint8)[first:last] for mask in masks.values()])
        offset = vocab_shard.start - 8 * first
        return cls(_row_index(list(masks), len(rows), device), to_device(torch.from_numpy(bits), device), offset)

    def bias(self, width: int) -> Tensor:
        """Return 0 for the tokens of this rank's shard that are allowed and -inf for the others: [M, width]."""
        found = torch.nn.functional.embedding(self.bits.to(torch.int32), _bias_of_bytes(self.bits.device))
        return found.flatten(1)[:, self.offset : self.offset + width]


@lru_cache(maxsize=8)
def _bias_of_bytes(device: torch.device) -> Tensor:
    """Return what each byte of a mask adds to the logits of its 8 tokens: [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0.0, -np.inf).astype(np.float32)).to(device)


@dataclass(frozen=True)
class Filter:
    """A top_k filter, with or without top_p, or a top_p filter alone, for some of the randomly sampled rows."""

    rows: Tensor | None  # indices into the sampled rows; None: all of them
    top_k: Tensor | None
    top_p: Tensor | None  # infinity for a row without top_p
    max_top_k: int

    @classmethod
    def build(cls, rows: list[int], top_k: list[int], top_p: list[float], device: torch.device) -> Filter | None:
        """`rows`: indices into the sampled rows, of which either all have a top_k or none has."""
        if not rows:
            return None
        ks, ps = [top_k[i] for i in rows], [top_p[i] for i in rows]
        return cls(
            rows=_row_index(rows, len(top_k), device),
            top_k=_make_tensor(ks, torch.int64, device) if any(ks) else None,
            top_p=_make_tensor(ps, torch.float64, device) if min(ps) < math.inf else None,
            max_top_k=max(ks),
        )


@dataclass(frozen=True)
class RandomRows:
    """The rows that are sampled at random."""

    rows: Tensor | None  # [S]; None: every row
    keys: Tensor  # [S], of the noise
    temperature: Tensor  # [S, 1]
    log_min_p: Tensor | None  # [S, 1]
    top_k: Filter | None  # rows with top_k <= _MAX_CANDIDATES
    large_top_k: Filter | None  # rows with a larger top_k
    top_p: Filter | None  # rows with top_p and no top_k

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> RandomRows | None:
        sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not sampled:
            return None
        params = [rows[i].params for i in sampled]
        seeds, positions = [rows[i].seed for i in sampled], [rows[i].position for i in sampled]
        keys = row_keys(torch.tensor(seeds), torch.tensor(positions))
        temperature = [[_clamp_temperature(p)] for p in params]
        log_min_p = [[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params]
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        top_p = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
        by_k = [i for i, k in enumerate(top_k) if 0 < k <= _MAX_CANDIDATES]
        by_large_k = [i for i, k in enumerate(top_k) if k > _MAX_CANDIDATES]
        by_p = [i for i, p in enumerate(top_p) if p < 1.0 and not top_k[i]]
        return cls(
            rows=_row_index(sampled, len(rows), device),
            keys=to_device(keys, device),
            temperature=_make_tensor(temperature, torch.float32, device),
            log_min_p=_make_tensor(log_min_p, torch.float32, device) if any(p.min_p > 0 for p in params) else None,
            top_k=Filter.build(by_k, top_k, top_p, device),
            large_top_k=Filter.build(by_large_k, top_k, top_p, device),
            top_p=Filter.build(by_p, top_k, top_p, device),
        )


def encode_random(params: Sequence[SamplingParams], seeds: Sequence[int]) -> NDArray[np.int64]:
    """Return the parameters of random sampling as the columns of kernels/sampling.py have them, without the position:
    seed, temperature, top_k, top_p and log_min_p, [5, R]. Greedy rows have temperature 0."""
    temperature = [0.0 if p.greedy else _clamp_temperature(p) for p in params]
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    encoded = np.empty((len(RANDOM_COLUMNS) - 1, len(params)), dtype=np.int64)
    encoded[0] = seeds
    encoded[1] = np.array(temperature, dtype=np.float32).view(np.int32)
    encoded[2] = [min(p.top_k, _ALL_TOKENS) for p in params]
    encoded[3] = np.array([p.top_p if p.top_p < 1.0 else math.inf for p in params]).view(np.int64)
    encoded[4] = np.array(log_min_p, dtype=np.float32).view(np.int32)
    return encoded


def stack_random(encoded: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Insert the positions [R] into parameters [5, R] of encode_random(): the columns of kernels/sampling.py."""
    stacked = np.empty((len(RANDOM_COLUMNS), len(positions)), dtype=np.int64)
    stacked[0], stacked[1], stacked[2:] = encoded[0], positions, encoded[1:]
    return stacked


def _clamp_temperature(params: SamplingParams) -> float:
    return min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)


def _build_fused(rows: Sequence[SamplingRow], device: torch.device) -> Tensor | None:
    if all(row.params.greedy for row in rows):
        return None
    encoded = encode_random([row.params for row in rows], [row.seed for row in rows])
    positions = np.array([row.position for row in rows], dtype=np.int64)
    return to_device(torch.from_numpy(stack_random(encoded, positions)), device)


@dataclass(frozen=True)
class LogprobRows:
    """The rows that return log-probabilities."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]  # alternatives that each of them returns
    index: Tensor | None  # `rows` on the device; None: every row

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> LogprobRows | None:
        counts = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        if not counts:
            return None
        return cls(tuple(counts), tuple(counts.values()), _row_index(list(counts), len(rows), device))


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of one step, in the order of the rows of logits."""

    logit_bias: LogitBias | None
    penalties: Penalties | None
    banned: Tensor | None  # flat indices: row * W + index in the shard
    allowed: AllowedTokens | None
    random: RandomRows | None
    logprobs: LogprobRows | None
    #: the parameters of kernels/sampling.py, in place of `random`
    fused: Tensor | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[SamplingRow],
        vocab_shard: range,
        vocab_size: int,
        device: torch.device | str,
        fused: bool | None = None,
    ) -> SamplingBatch:
        """`fused`: whether kernels/sampling.py samples, which needs the whole vocabulary; None: wherever it can."""
        device = torch.device(device)
        if fused is None:
            fused = len(vocab_shard) == vocab_size and ops.samples_with_triton(device)
        banned = [
            i * len(vocab_shard) + token - vocab_shard.start
            for i, row in enumerate(rows)
            for token in row.banned
            if token in vocab_shard
        ]
        return cls(
            logit_bias=LogitBias.build(rows, vocab_shard, device),
            penalties=Penalties.build(rows, vocab_shard, device),
            banned=_make_tensor(banned, torch.int64, device) if banned else None,
            allowed=AllowedTokens.build(rows, vocab_shard, device),
            random=None if fused else RandomRows.build(rows, vocab_size, device),
            logprobs=LogprobRows.build(rows, device),
            fused=_build_fused(rows, device) if fused else None,
        )


def select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return these rows of `x`; None: all of them."""
    return x if rows is None else x.index_select(0, rows)


def _make_tensor(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


def _row_index(rows: list[int], total: int, device: torch.device) -> Tensor | None:
    """Return the rows as a device tensor, or None if they are all rows."""
    return None if len(rows) == total else _make_tensor(rows, torch.int64, device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. Pinned memory makes the copy asynchronous."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
