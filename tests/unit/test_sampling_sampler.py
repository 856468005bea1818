"""Samples follow the distribution, pass the same filters as in transformers, and depend only on their row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yalis.comm.base import SingleRank
from yalis.kernels import native
from yalis.sampling import filters, random_sampling
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.noise import hash_tokens
from yalis.sampling.random_sampling import RandomSampling
from yalis.sampling.sampled_tokens import SampledTokens
from yalis.sampling.sampler import Sampler
from yalis.sampling.vocab_shards import VocabShards
from yalis.types import SamplingParams


def sample(logits: Tensor, rows: list[SamplingRow]) -> SampledTokens:
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, "cpu")
    return Sampler(range(vocab), vocab, SingleRank(), "cpu").sample(logits, batch)


def tokens_of(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    return sample(logits, rows).to_host()[0]


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the logits processed by transformers: [R, V], -inf where a token is filtered out."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores


def kept_tokens(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return which tokens our filters keep: bool [R, V]."""
    vocab = logits.shape[1]
    batch = SamplingBatch.build([SamplingRow(params, 0, 0)] * len(logits), range(vocab), vocab, "cpu")
    assert batch.random is not None
    sampling = RandomSampling(logits, batch.random, VocabShards(range(vocab), vocab, SingleRank()))
    return sampling.perturbed_scores(hash_tokens(torch.arange(vocab)), sampling.first_message()) > -math.inf


FILTERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
}


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_distribution(name: str) -> None:
    params = SamplingParams(**FILTERS[name])
    vocab, count = 40, 40_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens = tokens_of(logits.expand(count, -1), [SamplingRow(params, 5, position) for position in range(count)])
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    expected = warp(logits, params)[0].double().softmax(0) * count
    assert (counts[expected == 0] == 0).all()
    alive = expected > 0
    chi2 = ((counts - expected)[alive] ** 2 / expected[alive]).sum().item()
    free = int(alive.sum()) - 1
    assert free > 2
    assert chi2 < free + 5 * math.sqrt(2 * free)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "given_params",
    [
        {"top_k": 1}, {"top_k": 50}, {"top_k": 4999}, {"top_k": 5000}, {"top_k": 10**9},
        {"top_p": 1e-9}, {"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999},
        {"min_p": 1e-4}, {"min_p": 0.05}, {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.9}, {"top_k": 3000, "top_p": 0.7}, {"top_p": 0.9, "min_p": 0.02},
        {"top_k": 30, "min_p": 0.1}, {"top_k": 100, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)  # fmt: skip
def test_filters_keep_the_same_tokens_as_transformers(given_params: dict, seed: int) -> None:
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(seed)) * 2.5
    logits[:, ::97] = -math.inf
    for temperature in (0.3, 1.0, 1.7):
        params = SamplingParams(temperature=temperature, **given_params)
        # In float64, because transformers' cumulative sum rounds and ours is exact.
        assert torch.equal(kept_tokens(logits, params), warp(logits.double(), params) > -math.inf)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 4), vocab=st.integers(1, 3000), scale=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    top_p=st.floats(1e-6, 1 - 1e-9), seed=st.integers(0, 99),
)  # fmt: skip
def test_native_top_p_threshold_equals_that_of_a_sort(
    rows: int, vocab: int, scale: float, top_p: float, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=gen).mul_(scale)
    if seed % 2:
        scores = scores.round()  # with ties
    if seed % 5 == 0:
        scores[:, 1:][torch.rand(rows, vocab - 1, generator=gen) < 0.3] = -math.inf
    scores -= scores.amax(1, keepdim=True)
    if seed % 7 == 0:
        scores[-1] = math.nan
    found, expected = both_top_p_thresholds(scores, torch.full((rows,), top_p, dtype=torch.float64))
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def both_top_p_thresholds(scores: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the threshold by native code, and that by plain torch."""
    whole = VocabShards(range(scores.shape[1]), scores.shape[1], SingleRank())
    assert native.load() is not None
    found = filters.top_p_threshold(scores, top_p, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        return found, filters.top_p_threshold(scores, top_p, whole)


def test_noise_of_few_tokens_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU noise is computed only for the tokens that a filter keeps, if they are few."""
    logits = torch.randn(9, 4099, generator=torch.Generator().manual_seed(0)) * 3
    logits[3] = math.nan
    params = [SamplingParams(temperature=0.5 + i / 10, top_p=0.5) for i in range(9)]
    rows = [SamplingRow(one, seed, 7) for seed, one in enumerate(params)]
    shards, hashes = VocabShards(range(4099), 4099, SingleRank()), hash_tokens(torch.arange(4099))

    def scores() -> Tensor:
        random = SamplingBatch.build(rows, range(4099), 4099, "cpu").random
        assert random is not None
        sampling = RandomSampling(logits, random, shards)
        return sampling.perturbed_scores(hashes, sampling.first_message())

    few = scores()
    calls: list[int] = []
    pairs = random_sampling.gumbel_of_pairs
    monkeypatch.setattr(random_sampling, "gumbel_of_pairs", lambda k, h: calls.append(len(k)) or pairs(k, h))
    scores()
    assert calls
    monkeypatch.setattr(random_sampling, "_FEW", 0.0)
    monkeypatch.setattr(random_sampling, "_CACHED", 10_000)
    assert torch.equal(scores().nan_to_num(7), few.nan_to_num(7))
    assert len(calls) == 1
    assert (few > -math.inf).sum() > 9


def mixed_rows(count: int, vocab: int) -> list[SamplingRow]:
    """Return rows with all sampling parameters, mixed."""
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.1, "top_k": 12},
        {"temperature": 1.1, "top_k": 5, "top_p": 0.6},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.97, "min_p": 0.01},
        {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 1e-5, "logprobs": 0},
        {"temperature": 0.7, "logit_bias": {4: 3.0, 16: -100.0}, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_k": 2 * vocab},
    ]
    history = ([1, 2, 3, 3], [5, 5, 6])
    params = [SamplingParams(**kinds[i * 7 % len(kinds)]) for i in range(count)]
    return [SamplingRow(params[i], i, 100 + i, history, (i % vocab,)) for i in range(count)]


@pytest.mark.parametrize("vocab", [17, 1009, 8191])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab: int) -> None:
    rows = mixed_rows(30, vocab)
    logits = torch.randn(30, vocab, generator=torch.Generator().manual_seed(2)) * 2
    tokens, logprobs = sample(logits, rows).to_host()
    for i, row in enumerate(rows):
        alone, its_logprobs = sample(logits[i : i + 1], [row]).to_host()
        assert alone == [tokens[i]]
        assert its_logprobs == [logprobs[i]]
    gen = torch.Generator().manual_seed(3)
    for size in (2, 3, 11, 30):
        some = torch.randperm(30, generator=gen)[:size].tolist()
        assert tokens_of(logits[some], [rows[i] for i in some]) == [tokens[i] for i in some]


def test_noisy_scores_have_the_same_bits_in_any_batch() -> None:
    """Equal tokens could hide a difference in the last bit, so the scores are compared."""
    from yalis.sampling.noise import gumbel

    vocab = 4099
    seeds, positions, ids = torch.arange(13), torch.arange(13) * 3, torch.arange(vocab)
    noise = gumbel(seeds, positions, ids)
    for i in range(13):
        assert torch.equal(gumbel(seeds[i : i + 1], positions[i : i + 1], ids)[0], noise[i])
    scores = torch.randn(13, vocab, generator=torch.Generator().manual_seed(0)).mul_(3)
    scores -= scores.amax(1, keepdim=True)
    top_p = torch.linspace(0.1, 0.99, 13, dtype=torch.float64)
    whole = VocabShards(range(vocab), vocab, SingleRank())
    together = filters.top_p_threshold(scores, top_p, whole)
    for i in range(13):
        assert torch.equal(filters.top_p_threshold(scores[i : i + 1].clone(), top_p[i : i + 1], whole)[0], together[i])


def test_seeds_and_positions_change_the_sample() -> None:
    logits = torch.zeros(64, 5000)
    params = SamplingParams(temperature=1.0)
    by_seed = tokens_of(logits, [SamplingRow(params, seed, 9) for seed in range(64)])
    by_position = tokens_of(logits, [SamplingRow(params, 9, position) for position in range(64)])
    assert len(set(by_seed)) > 55
    assert len(set(by_position)) > 55
    assert tokens_of(logits, [SamplingRow(params, seed, 9) for seed in range(64)]) == by_seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_selects_the_lowest_token_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 999, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [40, 700, 998]] = 50
    logits[1] = 0
    logits[2] = -math.inf
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert expected[:3] == [40, 0, 0]
    assert tokens_of(logits, [SamplingRow(SamplingParams(), 0, 0)] * 5) == expected
    mixed = [SamplingRow(SamplingParams(), 0, 0)] * 5 + [SamplingRow(SamplingParams(temperature=1), 0, 0)]
    assert tokens_of(torch.cat((logits, logits[:1])), mixed)[:5] == expected


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float, scale: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * scale
    logits[:, 7] = -math.inf
    for extra in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, **extra)
        tokens = tokens_of(logits, [SamplingRow(params, i, i) for i in range(4)])
        assert 7 not in tokens
        if temperature < 1e-4:
            assert tokens == logits.argmax(1).tolist()


def test_exact_ties_are_sampled_evenly_at_low_temperature() -> None:
    logits = torch.full((200, 50), -3.0)
    logits[:, [11, 30]] = 1000.0
    tokens = tokens_of(logits, [SamplingRow(SamplingParams(temperature=1e-9), 0, i) for i in range(200)])
    assert set(tokens) == {11, 30}
    assert 60 < tokens.count(11) < 140


def test_penalties_equal_those_of_transformers_and_openai() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    prompt, output = [1, 2, 2, 30], [4, 4, 4, 2, 49]
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.4, frequency_penalty=-0.7),
        SamplingParams(repetition_penalty=0.6, presence_penalty=-0.3, frequency_penalty=1.1),
    ]
    batch = SamplingBatch.build([SamplingRow(p, 0, 0, (prompt, output)) for p in params], range(50), 50, "cpu")
    from yalis.sampling.sampler import _adjust

    adjusted = _adjust(logits, batch)
    count = torch.bincount(torch.tensor(output), minlength=50)
    for i, p in enumerate(params):
        ids = torch.tensor([prompt + output])
        expected = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, logits[i : i + 1].clone())[0]
        expected = expected - p.frequency_penalty * count - p.presence_penalty * (count > 0)
        torch.testing.assert_close(adjusted[i], expected)
    assert torch.equal(logits, before)  # the input is not modified


def test_logit_bias_equals_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    from yalis.sampling.sampler import _adjust

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    biases = [{0: 100.0, 49: -7.5}, {3: -100.0}, None]
    params = [SamplingParams(logit_bias=bias, repetition_penalty=1.7) for bias in biases]
    rows = [SamplingRow(p, 0, 0, ([3, 49], [5])) for p in params]
    adjusted = _adjust(logits, SamplingBatch.build(rows, range(50), 50, "cpu"))
    ids = torch.tensor([[3, 49, 5]])
    for i, bias in enumerate(biases):
        expected = logits[i : i + 1]
        if bias is not None:
            expected = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, expected)
        torch.testing.assert_close(adjusted[i], RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)[0])
    assert torch.equal(logits, before)  # the input is not modified


def test_penalties_need_a_history() -> None:
    with pytest.raises(ValueError, match="history"):
        SamplingRow(SamplingParams(presence_penalty=1.0), 0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_sampled(temperature: float) -> None:
    logits = torch.zeros(500, 6)
    logits[:, [2, 4]] = 20.0
    params = SamplingParams(temperature=temperature)
    free = tokens_of(logits, [SamplingRow(params, 1, i) for i in range(500)])
    banned = tokens_of(logits, [SamplingRow(params, 1, i, banned=(2, 4, 6_000)) for i in range(500)])
    assert set(free) <= {2, 4}
    assert set(banned) == ({0} if temperature == 0 else {0, 1, 3, 5})


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 2
    requested = [None, 0, 5, 1, None, 1000]
    rows = [
        SamplingRow(SamplingParams(temperature=0.5, logprobs=n, repetition_penalty=2.0), i, i, ([1, 2], [3]), (9,))
        for i, n in enumerate(requested)
    ]
    tokens, logprobs = sample(logits, rows).to_host()
    expected = logits.double().log_softmax(1)
    for i, n in enumerate(requested):
        found = logprobs[i]
        assert (found is None) == (n is None)
        if found is None or n is None:
            continue
        assert found.token_id == tokens[i]
        assert found.logprob == pytest.approx(expected[i, tokens[i]].item(), abs=1e-6)
        best = expected[i].topk(min(n, 300))
        assert list(found.top) == best.indices.tolist()
        assert list(found.top.values()) == pytest.approx(best.values.tolist(), abs=1e-6)


def test_unused_parameters_cost_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    noise = random_sampling.gumbel_from
    monkeypatch.setattr(random_sampling, "gumbel_from", lambda *a: calls.append("noise") or noise(*a))
    few = random_sampling.gumbel_of_pairs
    monkeypatch.setattr(random_sampling, "gumbel_of_pairs", lambda *a: calls.append("noise of few") or few(*a))
    for name in ("topk", "sort", "exp_"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *a, f=plain, n=name, **k: calls.append(n) or f(*a, **k))
    logits = torch.randn(4, 100)

    def work(*params: SamplingParams) -> list[str]:
        calls.clear()
        tokens_of(logits, [SamplingRow(p, 0, 0) for p in params])
        return calls

    greedy, plain = SamplingParams(), SamplingParams(temperature=1.0)
    assert work(*[greedy] * 4) == []
    assert work(*[plain] * 4) == ["noise"]
    assert work(greedy, plain, greedy, SamplingParams(temperature=1.0, min_p=0.1)) == ["noise"]
    assert work(plain, plain, plain, SamplingParams(temperature=1.0, top_k=3)) == ["topk", "noise"]
    assert work(*[SamplingParams(temperature=1.0, top_k=3)] * 4) == ["topk", "noise of few"]
    assert work(greedy, greedy, greedy, SamplingParams(logprobs=1)) == ["topk", "exp_", "sort", "sort"]


SOME_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 30, 100]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(SOME_PARAMS, min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 2**63 - 1), st.booleans())
def test_filtered_tokens_are_never_sampled(params: list[SamplingParams], vocab: int, seed: int, holes: bool) -> None:
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed % 2**31)) * 3
    if holes:
        logits[:, 1::2] = -math.inf
    tokens = tokens_of(logits, [SamplingRow(p, seed, i) for i, p in enumerate(params)])
    for i, (p, token) in enumerate(zip(params, tokens, strict=True)):
        row = logits[i : i + 1]
        if p.greedy:
            assert token == row.argmax().item()
        else:
            assert kept_tokens(row, p)[0, token]
