"""Samples a token from each row of logits: biases, penalties, bans and masks, then greedy or random sampling.

Each rank has the logits of its vocabulary shard, and all ranks sample the same tokens. Messages of a step:
- greedy rows: one, with the best token of each rank;
- randomly sampled rows: one before it, with the maximum of each row and the candidates for top_k;
- log-probabilities: the same two;
- filters that search over all shards, such as top_p alone: the rounds of VocabShards.find_threshold.
All rows share these messages; MESSAGES in tests/unit/test_sampling_shards.py has their number by parameter. Only
`SampledTokens.to_host` waits for the device.

Shapes: R rows, W tokens in this rank's vocabulary shard.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.kernels import ops
from yalis.sampling.batch import AllowedTokens, Penalties, SamplingBatch, to_device
from yalis.sampling.logprobs import LogprobsBuilder
from yalis.sampling.noise import hash_tokens
from yalis.sampling.random_sampling import FusedShardSampling, RandomSampling
from yalis.sampling.sampled_tokens import NO_TOKEN, SampledTokens
from yalis.sampling.vocab_shards import VocabShards, row_max


class Sampler:
    """Samples one token for each row of logits. It depends on that row alone, whatever else is in the batch."""

    def __init__(self, vocab_shard: range, vocab_size: int, tp_group: Communicator, device: torch.device | str) -> None:
        """`vocab_shard`: the token ids whose logits this rank has. Shards are in the order of ranks in `tp_group`."""
        self._shards, self._device = VocabShards(vocab_shard, vocab_size, tp_group), torch.device(device)
        #: whether sample_packed() may be called: this rank has the whole vocabulary, and Triton runs on its device
        self.fused = not self._shards.sharded and ops.samples_with_triton(self._device)
        on_shard = self._shards.sharded and ops.samples_with_triton(self._device)
        self._random_type = FusedShardSampling if on_shard else RandomSampling
        self._token_hashes = hash_tokens(torch.arange(vocab_shard.start, vocab_shard.stop, device=device))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample from logits [R, W] of any float type, which are not modified."""
        adjusted, shards = _adjust(logits, batch), self._shards
        if batch.fused is not None:
            return self._sample_fused(logits, adjusted, batch.fused, batch)
        random = self._random_type(adjusted, batch.random, shards) if batch.random is not None else None
        logprobs = LogprobsBuilder(logits, batch.logprobs, shards) if batch.logprobs is not None else None
        for_random = random.first_message() if random is not None else []
        for_logprobs = logprobs.first_message() if logprobs is not None else []
        gathered = shards.gather(*for_random, *for_logprobs)
        for_random, for_logprobs = gathered[: len(for_random)], gathered[len(for_random) :]

        values, indices = self._select(adjusted, random, for_random)
        last = logprobs.last_message(indices, for_logprobs) if logprobs is not None else []
        values, tokens, winner, last = shards.select_best(values, indices, *last)
        # A row of NaN has no best token. to_host() raises an error for it.
        tokens = torch.where(values.isnan(), NO_TOKEN, tokens)[:, 0]
        return SampledTokens(tokens, logprobs.build(for_logprobs, winner, last) if logprobs is not None else None)

    def sample_packed(
        self, logits: Tensor, random: NDArray[np.int64] | None, last_tokens: Tensor, request_slots: Tensor
    ) -> Tensor:
        """Sample from logits [R, V] with nothing but `random`, the columns of kernels/sampling.py; None: all greedy.

        Returns the tokens [R], NO_TOKEN for a row with NaN, and stores them in `last_tokens` at `request_slots`.
        """
        from yalis.kernels import fused, sampling

        if random is None:
            random = np.zeros((len(sampling.COLUMNS), len(logits)), dtype=np.int64)
        params = to_device(torch.from_numpy(random), self._device)
        return sampling.sample(logits, fused.argmax(logits), params, NO_TOKEN, last_tokens, request_slots)

    def _sample_fused(self, logits: Tensor, adjusted: Tensor, params: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample from the whole vocabulary with the kernels of a GPU."""
        from yalis.kernels import fused, sampling

        tokens = sampling.sample(adjusted, fused.argmax(adjusted), params, NO_TOKEN)
        if batch.logprobs is None:
            return SampledTokens(tokens, None)
        logprobs = LogprobsBuilder(logits, batch.logprobs, self._shards)
        first = logprobs.first_message()
        last = logprobs.last_message(tokens[:, None].clamp(min=0), first)
        return SampledTokens(tokens, logprobs.build(first, None, last))

    def _select(self, logits: Tensor, random: RandomSampling | None, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the best value of each row in this shard and its index: [R, W] -> [R, 1], [R, 1]."""
        if random is None:
            return row_max(logits)
        random_values, random_indices = random.select(self._token_hashes, gathered)
        if random.rows is None:
            return random_values, random_indices
        values, indices = row_max(logits)
        values = values.float().index_copy_(0, random.rows, random_values)
        return values, indices.index_copy_(0, random.rows, random_indices)


def _adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply biases, penalties, bans and masks to a copy; returns the logits themselves if there are none."""
    if batch.logit_bias is None and batch.penalties is None and batch.banned is None and batch.allowed is None:
        return logits
    logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if batch.logit_bias is not None:
        logits.view(-1).index_add_(0, batch.logit_bias.flat_indices, batch.logit_bias.values)
    if batch.penalties is not None:
        _apply_penalties(logits.view(-1), batch.penalties)
    if batch.banned is not None:
        logits.view(-1).index_fill_(0, batch.banned, float("-inf"))
    if batch.allowed is not None:
        _apply_mask(logits, batch.allowed)
    return logits


def _apply_mask(logits: Tensor, allowed: AllowedTokens) -> None:
    bias = allowed.bias(logits.shape[1])
    if allowed.rows is None:
        logits.add_(bias)
    else:
        logits.index_add_(0, allowed.rows, bias)


def _apply_penalties(flat: Tensor, penalties: Penalties) -> None:
    value = flat.index_select(0, penalties.flat_indices)
    value = torch.where(value > 0, value / penalties.repetition, value * penalties.repetition) - penalties.additive
    flat.index_copy_(0, penalties.flat_indices, value)
