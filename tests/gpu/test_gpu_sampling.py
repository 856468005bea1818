"""Sampling on a GPU: the same noise and tokens as on a CPU, in any batch, without synchronisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import CASES, make_prompts, make_reference
from tests.ranks import run_ranks
from yalis import LLM
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


def tokens_on(device: str, logits: torch.Tensor, rows: list[SamplingRow], fused: bool | None = None) -> list[int]:
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, device, fused)
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


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 3000},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 3000, "top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [1009, 128_256])
def test_kernels_draw_the_tokens_of_torch(vocab: int, scale: float, dtype: torch.dtype) -> None:
    """Bit for bit, with equal, flat and peaked logits; in bfloat16 many logits are equal."""
    logits = torch.randn(80, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).mul_(scale)
    logits = logits.to(dtype)
    logits[3], logits[4, 7], logits[5, 9], logits[6] = float("nan"), float("nan"), float("inf"), float("-inf")
    logits[10:20, ::3] = float("-inf")
    rows = [
        SamplingRow(
            SamplingParams(temperature=(0.6, 0.8, 1.0, 2.0, 0.0)[i % 5], **FILTERS[i % len(FILTERS)]), i, 50 + i
        )
        for i in range(80)
    ]
    found = tokens_on_raw(logits, rows, fused=True)
    assert found == tokens_on_raw(logits, rows, fused=False)
    for i in (0, 3, 11, 42):
        assert tokens_on_raw(logits[i : i + 1], rows[i : i + 1], fused=True) == [found[i]]


def tokens_on_raw(logits: torch.Tensor, rows: list[SamplingRow], fused: bool) -> list[int]:
    """Return the tokens, -1 for rows with NaN, which to_host() would refuse."""
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, "cuda", fused)
    return Sampler(range(vocab), vocab, SingleRank(), "cuda").sample(logits, batch).tokens.tolist()


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_follow_the_filtered_softmax(fields: dict[str, Any]) -> None:
    """100,000 draws for each filter, by a chi-square test against the exact probabilities."""
    vocab, draws, at_once = 5000, 100_000, 5000
    logits = torch.linspace(4.0, -4.0, vocab, dtype=torch.float64, device="cuda").float()
    kept = logits.double() / 0.9
    if k := fields.get("top_k"):
        kept[k:] = -torch.inf
    probabilities = kept.softmax(0)
    if "top_p" in fields:
        kept[(probabilities.cumsum(0) - probabilities) >= fields["top_p"]] = -torch.inf
    if "min_p" in fields:
        kept[(logits.double() / 0.9).softmax(0) < fields["min_p"] * (logits.double() / 0.9).softmax(0)[0]] = -torch.inf
    expected = kept.softmax(0) * draws
    params = SamplingParams(temperature=0.9, **fields)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for start in range(0, draws, at_once):
        rows = [SamplingRow(params, 17, start + i) for i in range(at_once)]
        counts += torch.tensor(tokens_on("cuda", logits.expand(at_once, vocab), rows, True)).bincount(minlength=vocab)
    assert counts[expected.cpu() == 0].sum() == 0
    bins = (expected.cumsum(0) / 50).floor().clamp(max=draws // 50 - 1).long().cpu()  # about 50 draws in each
    seen = torch.zeros(draws // 50, dtype=torch.float64).index_add_(0, bins, counts.double())
    wanted = torch.zeros(draws // 50, dtype=torch.float64).index_add_(0, bins, expected.cpu())
    seen, wanted = seen[wanted > 5], wanted[wanted > 5]
    statistic, freedom = ((seen - wanted) ** 2 / wanted).sum().item(), len(wanted) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 1


def test_steps_with_any_sampling_replay_and_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    """Mixed temperatures, filters and seeds, with prompts that arrive while others decode."""
    case = next(case for case in CASES if case.name == "llama3-gqa4")
    ref = make_reference(case, tmp_path, 5, make_prompts(5, (21, 1, 30, 7, 6, 26, 3, 44, 12), shared=0), 4)
    params = [
        SamplingParams(max_tokens=8 + i % 5, ignore_eos=True, seed=i, temperature=(0.0, 0.8, 1.5)[i % 3], **FILTERS[i])
        for i in range(9)
    ]
    outputs = []
    for eager in (False, True):
        settings = {"block_size": 16, "kv_blocks": 64, "max_model_len": 64, "max_num_seqs": 4, "eager": eager}
        with LLM(str(ref.path), device="cuda", dtype="float32", **settings) as llm:
            runner = llm._engine.runner
            outputs.append([output.token_ids for output in llm.generate(ref.prompts, params)])
            assert (runner.recorded_picks > 8) != eager
            assert (llm.stats.replayed_steps > 8) != eager
    assert outputs[0] == outputs[1]
