"""Sampling on a GPU: the same noise and tokens as on a CPU, in any batch, without synchronisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from yalis.comm.base import Communicator, SingleRank
from yalis.parallel.plan import shard
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.noise import uniform
from yalis.sampling.sampled_tokens import SampledTokens
from yalis.sampling.sampler import Sampler
from yalis.types import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 12},
    {"temperature": 1.1, "top_k": 5, "top_p": 0.6},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.97, "min_p": 0.01},
    {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1e-5, "logprobs": 0},
    {"temperature": 0.7, "logit_bias": {4: 3.0, 1001: 4.0, 40_000: -100.0}},
]
HISTORY = ([1, 2, 3, 3], [5, 5, 6])


def mixed_rows(count: int, vocab: int) -> list[SamplingRow]:
    """Return rows with all sampling parameters; every third has a mask of structured outputs."""
    params = [SamplingParams(**KINDS[i * 7 % len(KINDS)]) for i in range(count)]
    rng = np.random.default_rng(0)
    masks = rng.integers(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=np.int32)
    return [SamplingRow(params[i], i, 100 + i, HISTORY, (i,), None if i % 3 else masks[i]) for i in range(count)]


def tokens_on(device: str, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, device)
    return Sampler(range(vocab), vocab, SingleRank(), device).sample(logits.to(device), batch).to_host()[0]


def test_uniform_noise_equals_the_cpu_bit_for_bit() -> None:
    seeds, positions, ids = torch.arange(20) << 40, torch.arange(20) * 7, torch.arange(50_021)
    there = uniform(seeds.cuda(), positions.cuda(), ids.cuda()).cpu()
    assert torch.equal(there, uniform(seeds, positions, ids))


@pytest.mark.parametrize("vocab", [1009, 50_021])
def test_tokens_equal_the_cpu_in_any_batch(vocab: int) -> None:
    rows = mixed_rows(54, vocab)
    logits = torch.randn(54, vocab, generator=torch.Generator().manual_seed(2)) * 2
    tokens = tokens_on("cuda", logits, rows)
    assert tokens == tokens_on("cpu", logits, rows)
    for i in range(54):
        assert tokens_on("cuda", logits[i : i + 1], rows[i : i + 1]) == [tokens[i]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_vocabulary_shards_sample_the_tokens_of_one_rank(ranks: int) -> None:
    vocab = 50_021
    rows = mixed_rows(54, vocab)
    logits = torch.randn(54, vocab, generator=torch.Generator().manual_seed(2)).mul_(2).cuda()

    def sample(rank: int, group: Communicator) -> SampledTokens:
        vocab_shard = shard(vocab, ranks, rank)
        batch = SamplingBatch.build(rows, vocab_shard, vocab, "cuda")
        return Sampler(vocab_shard, vocab, group, "cuda").sample(logits[:, vocab_shard.start : vocab_shard.stop], batch)

    run_ranks(ranks, sample)  # one-time set-up of the kernels may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run_ranks(ranks, sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = tokens_on("cuda", logits, rows)
    for each in found:
        assert each.to_host() == found[0].to_host()
        assert each.tokens.tolist() == expected


def test_greedy_selects_the_lowest_token_id_among_equals() -> None:
    logits = torch.zeros(3, 128_256, dtype=torch.bfloat16)
    logits[1, [70, 5_000, 128_255]] = 3
    assert tokens_on("cuda", logits, [SamplingRow(SamplingParams(), 0, 0)] * 3) == [0, 70, 0]


def test_building_and_sampling_do_not_synchronise() -> None:
    rows = mixed_rows(18, 8191)
    logits = torch.randn(18, 8191, device="cuda", dtype=torch.bfloat16)
    sampler = Sampler(range(8191), 8191, SingleRank(), "cuda")
    sampler.sample(
        logits, SamplingBatch.build(rows, range(8191), 8191, "cuda")
    )  # one-time set-up of the kernels may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        waiting = sampler.sample(logits, SamplingBatch.build(rows, range(8191), 8191, "cuda")).start_copy()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tokens, logprobs = waiting.to_host()
    assert len(tokens) == 18
    assert [found is not None for found in logprobs] == [row.params.logprobs is not None for row in rows]
