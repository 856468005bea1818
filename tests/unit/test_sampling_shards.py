"""With a vocabulary split over ranks, all ranks sample the tokens of a single rank, with messages of a fixed size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.ranks import Memory, run_ranks
from yalis.comm.base import Communicator, SingleRank
from yalis.parallel.plan import shard
from yalis.sampling import batch as batch_module
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.noise import hash_tokens
from yalis.sampling.random_sampling import RandomSampling
from yalis.sampling.sampled_tokens import NO_TOKEN, SampledTokens
from yalis.sampling.sampler import Sampler
from yalis.sampling.vocab_shards import VocabShards
from yalis.types import SamplingParams


def whole(logits: Tensor, rows: list[SamplingRow]) -> SampledTokens:
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, "cpu")
    return Sampler(range(vocab), vocab, SingleRank(), "cpu").sample(logits, batch)


def split(logits: Tensor, rows: list[SamplingRow], ranks: int) -> tuple[list[SampledTokens], list[tuple[str, int]]]:
    """Return the tokens of each rank, and the messages of the first."""
    vocab = logits.shape[1]

    def sample(rank: int, group: Memory) -> tuple[SampledTokens, list[tuple[str, int]]]:
        held = shard(vocab, ranks, rank)
        batch = SamplingBatch.build(rows, held, vocab, "cpu")
        local = logits[:, held.start : held.stop]  # not contiguous, as a model's output may be
        return Sampler(held, vocab, group, "cpu").sample(local, batch), group.calls

    found = run_ranks(ranks, sample)
    return [sampled for sampled, _ in found], found[0][1]


def check(logits: Tensor, rows: list[SamplingRow], ranks: int) -> list[tuple[str, int]]:
    """Compare every rank with a single rank; returns the messages of one rank."""
    expected = whole(logits, rows)
    found, calls = split(logits, rows, ranks)
    for each in found:
        assert torch.equal(each.tokens, expected.tokens)
        if expected.logprobs is None:
            assert each.logprobs is None
            continue
        assert each.logprobs is not None
        actual, single = each.logprobs.packed, expected.logprobs.packed
        assert actual.numpy().tobytes() == found[0].logprobs.packed.numpy().tobytes()  # type: ignore[union-attr]
        torch.testing.assert_close(
            actual, single, rtol=0, atol=1e-12, equal_nan=True
        )  # includes the token ids of alternatives
    return calls


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.1, "top_k": 12},
    "top_k 1": {"temperature": 1.1, "top_k": 1},
    "large top_k": {"temperature": 1.4, "top_k": 1500},
    "large top_k, top_p": {"temperature": 1.4, "top_k": 1100, "top_p": 0.8},
    "top_k, top_p": {"temperature": 1.1, "top_k": 9, "top_p": 0.6},
    "top_p": {"temperature": 0.9, "top_p": 0.7},
    "high top_p": {"temperature": 3.0, "top_p": 0.9999},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all": {"temperature": 2.0, "top_k": 40, "top_p": 0.97, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "greedy with penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {0: 4.0, 1: 5.0, 700: -100.0, 1501: 6.0}},
    "random logit_bias": {"temperature": 0.9, "top_k": 5, "logit_bias": {2: 7.0, 1001: 8.0}, "logprobs": 2},
    "logprobs": {"logprobs": 3},
    "random logprobs": {"temperature": 1.0, "top_p": 0.9, "logprobs": 30},
    "logprob alone": {"temperature": 1.0, "logprobs": 0},
    "masked": {},
    "random masked": {"temperature": 0.9, "top_p": 0.8, "logprobs": 2, "presence_penalty": 0.4},
}


def row(kind: str, i: int, vocab: int, banned: tuple[int, ...] = ()) -> SamplingRow:
    history = [t * 7 % vocab for t in range(i, i + 9)], [t * 3 % vocab for t in range(i, i + 5)] * 2
    allowed = some_mask(i, vocab) if "masked" in kind else None
    return SamplingRow(SamplingParams(**KINDS[kind]), i, 50 + i, history, banned, allowed)


def some_mask(seed: int, vocab: int) -> NDArray[np.int32]:
    """Return a mask of structured outputs that allows from none to most tokens."""
    rng = np.random.default_rng(seed)
    bits = rng.random(-(-vocab // 32) * 32) < rng.choice([0.0, 0.01, 0.3, 0.95])
    return np.packbits(bits, bitorder="little").view(np.int32)


def some_logits(count: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_all_sampling_parameters_alone_and_mixed(ranks: int, dtype: torch.dtype) -> None:
    vocab = 2003  # a prime
    for kind in KINDS:
        logits = some_logits(12, vocab, dtype)
        check(logits, [row(kind, i, vocab, (i, 700, 2002)) for i in range(12)], ranks)
    kinds = list(KINDS) * 3
    check(some_logits(len(kinds), vocab, dtype), [row(kind, i, vocab) for i, kind in enumerate(kinds)], ranks)


@settings(max_examples=100, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6),
    ranks=st.integers(2, 6),
    extra=st.integers(0, 40),
    levels=st.sampled_from([0, 2, 5, 40]),
    holes=st.sampled_from(["none", "many", "a whole shard", "all but one"]),
    seed=st.integers(0, 2**31),
)
def test_any_rows_over_any_ranks(kinds: list[str], ranks: int, extra: int, levels: int, holes: str, seed: int) -> None:
    """Small vocabularies, with shards smaller than top_k. Few distinct logits create many ties."""
    vocab = ranks + extra
    logits = some_logits(len(kinds), vocab, torch.float32, seed)
    if levels:
        logits = (logits * levels / 12).round()
    gone = {
        "none": [],
        "many": list(range(0, vocab, 2)),
        "a whole shard": list(shard(vocab, ranks, seed % ranks)),
        "all but one": [t for t in range(vocab) if t != seed % vocab],
    }[holes]
    rows = [row(kind, i, vocab, tuple(gone) if seed % 2 else ()) for i, kind in enumerate(kinds)]
    if seed % 2 == 0:
        logits[:, gone] = -math.inf
    check(logits, rows, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_the_lowest_token_id_among_equals_wins_across_ranks(ranks: int) -> None:
    vocab = 101
    starts = [shard(vocab, ranks, rank).start for rank in range(ranks)]
    logits = torch.zeros(4, vocab)
    logits[1, [start + 1 for start in starts[1:]]] = 5.0
    logits[2, [start - 1 for start in starts[1:]] + starts[1:]] = 5.0
    logits[3] = -math.inf
    rows = [row("greedy", 0, vocab)] * 4
    check(logits, rows, ranks)
    assert split(logits, rows, ranks)[0][-1].tokens.tolist() == [0, starts[1] + 1, starts[1] - 1, 0]
    for kind in KINDS:
        check(torch.zeros(20, vocab), [row(kind, i, vocab) for i in range(20)], ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_row_with_nan_has_no_token_on_any_rank(ranks: int) -> None:
    vocab = 31
    logits = some_logits(len(KINDS) * 4, vocab, torch.float32)
    for i in range(len(KINDS)):
        logits[4 * i] = math.nan
        logits[4 * i + 1, 0] = math.nan
        logits[4 * i + 2, 30] = math.nan
    found, _ = split(logits, [row(kind, i, vocab) for i, kind in enumerate(KINDS) for _ in range(4)], ranks)
    for each in found:
        assert [token == NO_TOKEN for token in each.tokens.tolist()] == [True, True, True, False] * len(KINDS)
        assert torch.equal(each.tokens, found[0].tokens)


MESSAGES = {
    "greedy": 1, "temperature": 2, "min_p": 2, "top_k": 2, "top_k, top_p": 2, "all": 2, "penalties": 2,
    "greedy with penalties": 1, "masked": 1, "logit_bias": 1, "logprobs": 2, "top_p": 6, "random logprobs": 6,
    "large top_k": 6, "large top_k, top_p": 11,
}  # fmt: skip


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_are_few_and_do_not_grow_with_the_vocabulary(kind: str) -> None:
    small, large = (
        check(some_logits(3, vocab, torch.float32), [row(kind, i, vocab) for i in range(3)], 4)
        for vocab in (4_001, 400_009)
    )
    assert small == large
    assert len(small) == MESSAGES[kind]
    assert max(elements for _, elements in small) <= 3 * 256


def test_all_rows_share_the_same_messages() -> None:
    kinds = [kind for kind, count in MESSAGES.items() if count in (1, 2, 6) and kind != "large top_k"]
    assert len(check(some_logits(len(kinds), 4_001, torch.float32), [row(k, 0, 4_001) for k in kinds], 3)) == 6


def test_one_rank_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(SingleRank, name, None)
    whole(some_logits(len(KINDS), 2_003, torch.float32), [row(kind, 0, 2_003) for kind in KINDS]).to_host()


def test_biases_penalties_and_bans_are_limited_to_the_vocabulary_shard() -> None:
    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={9: 1.0, 11: 2.0, 19: -3.0}
    )
    rows = [SamplingRow(params, 0, 0, ([1, 12, 19], [12, 12, 15, 30]), (3, 11, 99))] * 2
    batch = SamplingBatch.build(rows, range(10, 20), 40, "cpu")
    assert batch.penalties is not None
    assert batch.banned is not None
    assert batch.penalties.flat_indices.tolist() == [2, 5, 9, 12, 15, 19]
    assert batch.penalties.additive.tolist() == [1.0, 0.75, 0.0] * 2
    assert batch.banned.tolist() == [1, 11]
    assert batch.logit_bias is not None
    assert batch.logit_bias.flat_indices.tolist() == [1, 9, 11, 19]
    assert batch.logit_bias.values.tolist() == [2.0, -3.0] * 2


def noisy_scores(logits: Tensor, rows: list[SamplingRow], held: range, group: Communicator) -> Tensor:
    """Return scores with noise, -inf where a filter drops a token."""
    vocab = logits.shape[1]
    random = SamplingBatch.build(rows, held, vocab, "cpu").random
    assert random is not None
    shards = VocabShards(held, vocab, group)
    sampling = RandomSampling(logits[:, held.start : held.stop], random, shards)
    return sampling.perturbed_scores(
        hash_tokens(torch.arange(held.start, held.stop)), shards.gather(*sampling.first_message())
    )


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the histogram search for every top_k above 4."""
    monkeypatch.setattr(batch_module, "_MAX_CANDIDATES", 4)


@pytest.mark.usefixtures("few_candidates")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([1e-30, 0.5, 1.0, 1e30]),
            top_k=st.sampled_from([0, 1, 3, 4, 5, 9, 30]),
            top_p=st.sampled_from([1.0, 1e-6, 0.25, 0.5, 0.9, 0.999999]),
            min_p=st.sampled_from([0.0, 0.01, 0.5]),
        ),
        min_size=1,
        max_size=6,
    ),
    ranks=st.integers(2, 6),
    extra=st.integers(0, 40),
    levels=st.sampled_from([0, 1, 4, 40]),
    seed=st.integers(0, 2**31),
)
def test_filters_keep_the_same_tokens(
    params: list[SamplingParams], ranks: int, extra: int, levels: int, seed: int
) -> None:
    """Equal samples could hide a threshold that is one token off, so the noisy scores are compared bit by bit."""
    vocab = ranks + extra
    logits = some_logits(len(params), vocab, torch.float32, seed)
    if levels:
        logits = (logits * levels / 12).round()
    logits[:, seed % vocab :: 5] = -math.inf
    rows = [SamplingRow(p, seed, i) for i, p in enumerate(params)]
    expected = noisy_scores(logits, rows, range(vocab), SingleRank())
    found = run_ranks(ranks, lambda rank, comm: noisy_scores(logits, rows, shard(vocab, ranks, rank), comm))
    assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_with_all_tokens_banned(ranks: int) -> None:
    """There is no correct token, but nothing may fail, and all ranks must agree."""
    vocab = 31
    rows = [row(kind, i, vocab, tuple(range(vocab))) for i, kind in enumerate(KINDS)]
    found, _ = split(some_logits(len(rows), vocab, torch.float32), rows, ranks)
    assert all(each.tokens.tolist() == [0] * len(rows) for each in found)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_alternatives_of_probability_zero_are_distinct(ranks: int) -> None:
    vocab = 11
    logits = torch.full((1, vocab), -math.inf)
    logits[0, 4:6] = torch.tensor([1.0, 2.0])
    rows = [SamplingRow(SamplingParams(logprobs=vocab), 0, 0)]
    check(logits, rows, ranks)
    _, (found,) = split(logits, rows, ranks)[0][0].to_host()
    assert found is not None
    assert list(found.top) == [5, 4, 0, 1, 2, 3, 6, 7, 8, 9, 10]


def test_a_bias_in_one_shard_is_exact_on_all_ranks() -> None:
    """The biased logit, 3.004, is 3.0 in bfloat16: a rank that compared in bfloat16 would see a tie."""
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    logits[0, 1], logits[0, 6] = 3.0, 2.0
    rows = [SamplingRow(SamplingParams(logit_bias={6: 1.004}), 0, 0)]
    assert whole(logits, rows).tokens.tolist() == [6]
    check(logits, rows, 2)
