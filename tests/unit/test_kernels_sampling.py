"""The Triton kernels that sample, in Triton's interpreter: the tokens of plain torch, for any filters and logits."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ranks import Memory, run_ranks
from yalis.comm.base import SingleRank
from yalis.parallel.plan import shard
from yalis.sampling.batch import RANDOM_COLUMNS, SamplingBatch, SamplingRow
from yalis.sampling.random_sampling import FusedShardSampling
from yalis.sampling.sampled_tokens import NO_TOKEN, SampledTokens
from yalis.sampling.sampler import Sampler
from yalis.types import SamplingParams

kernels = pytest.importorskip("yalis.kernels.sampling", reason="triton is not installed")

# In the interpreter, inf - inf warns, and so does the conversion of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Several chunks in a small vocabulary."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kernels, "_CHUNK", 64)
        patches.setattr(kernels, "_FINISH_CHUNK", 64)
        yield


def sample(logits: Tensor, rows: list[SamplingRow], fused: bool) -> SampledTokens:
    vocab = logits.shape[1]
    batch = SamplingBatch.build(rows, range(vocab), vocab, "cpu", fused)
    assert (batch.random if fused else batch.fused) is None
    return Sampler(range(vocab), vocab, SingleRank(), "cpu").sample(logits, batch)


def check(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    tokens = sample(logits, rows, fused=True).tokens.tolist()
    assert tokens == sample(logits, rows, fused=False).tokens.tolist()
    return tokens


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.5, 1.0, 3.0, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 30, 100, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.25, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
)


@settings(max_examples=15, deadline=None)  # a launch takes the interpreter 20 ms
@given(
    params=st.lists(PARAMS, min_size=1, max_size=3),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 97]),
    levels=st.sampled_from([0, 0, 1, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    holes=st.sampled_from(["none", "none", "half", "all but one", "all"]),
    seed=st.integers(0, 2**31),
)
def test_tokens_equal_those_of_torch(
    params: list[SamplingParams], vocab: int, levels: int, dtype: torch.dtype, holes: str, seed: int
) -> None:
    """Few levels create ties, and so does bfloat16."""
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if levels:
        logits = (logits * levels / 12).round()
    gone = {"none": [], "half": slice(1, None, 2), "all": slice(None), "all but one": slice(0, vocab - 1)}[holes]
    logits[:, gone] = -math.inf
    check(logits.to(dtype), [SamplingRow(p, seed + i, 7 * i) for i, p in enumerate(params)])


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.4},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.2},
]


def test_flat_logits_are_drawn_again_until_the_filters_keep_the_token() -> None:
    """Most tokens are dropped, so that the first draw is seldom kept; the drawn tokens cover what is kept."""
    vocab, count = 96, 20
    logits = torch.linspace(0.0, 0.5, vocab).repeat(count, 1)
    for fields in ({"top_k": 3}, {"top_p": 0.05}, {"top_k": 20, "top_p": 0.2}):
        tokens = check(logits, [SamplingRow(SamplingParams(temperature=1.0, **fields), 5, i) for i in range(count)])
        assert set(tokens) == set(range(vocab - len(set(tokens)), vocab))
        assert 1 < len(set(tokens)) < 7
        assert max(Counter(tokens).values()) < count / 2


def test_rows_of_nan_infinity_and_equal_logits() -> None:
    vocab = 70
    logits = torch.zeros(6, vocab)
    logits[1], logits[2, 69], logits[3, 40], logits[4] = math.nan, math.nan, math.inf, -math.inf
    for fields in FILTERS:
        tokens = check(logits, [SamplingRow(SamplingParams(temperature=1.0, **fields), 3, i) for i in range(6)])
        assert tokens[1:5] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
    greedy = check(
        logits, [SamplingRow(SamplingParams(), 0, 0)] * 5 + [SamplingRow(SamplingParams(temperature=1), 0, 0)]
    )
    assert greedy[:5] == [0, NO_TOKEN, NO_TOKEN, 40, 0]


def test_penalties_biases_bans_masks_and_logprobs_around_the_kernels() -> None:
    vocab = 100
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(1)) * 2
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (10, 4), dtype=np.int32)
    rows = [
        SamplingRow(
            SamplingParams(
                temperature=0.9 * (i % 3 > 0), repetition_penalty=1.3, frequency_penalty=0.2, logprobs=i % 4,
                logit_bias={3: 2.0, 50: -100.0}, **FILTERS[i % len(FILTERS)],
            ),
            i, 10 + i, ([1, 2], [2, 3, 3]), (5, 6), masks[i] if i % 2 else None,
        )
        for i in range(10)
    ]  # fmt: skip
    found, expected = sample(logits, rows, fused=True).to_host(), sample(logits, rows, fused=False).to_host()
    assert found == expected
    logits[4, 17] = math.nan
    assert sample(logits, rows, fused=True).tokens[4] == NO_TOKEN


def test_rows_may_be_part_of_a_wider_tensor_and_tokens_are_fed_to_the_next_step() -> None:
    wide = torch.randn(5, 80, generator=torch.Generator().manual_seed(2))
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_k=9), i, i) for i in range(5)]
    assert check(wide[:, :61], rows) == check(wide[:, :61].contiguous(), rows)
    params = SamplingBatch.build(rows, range(61), 61, "cpu", fused=True).fused
    assert params is not None
    assert params.shape == (len(RANDOM_COLUMNS), 5)
    assert kernels.COLUMNS == RANDOM_COLUMNS
    last, slots = torch.full((9,), 99), torch.tensor([7, 0, 3, 8, 5])
    best_ids = wide[:, :61].argmax(1)
    best_ids[2] = -1
    wide[2, 0] = math.nan
    tokens = kernels.sample(wide[:, :61], best_ids, params, -1, last, slots)
    assert tokens[2] == -1
    assert last[slots].tolist() == tokens.clamp(min=0).tolist()
    assert (last == 99).sum() == 4


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and the interpreter runs one kernel at a time."""
    lock = threading.Lock()
    for name in ("draw_shard", "score_histogram"):
        kernel = getattr(kernels, name)

        def locked(*args: Any, kernel: Any = kernel) -> Any:
            with lock:
                return kernel(*args)

        monkeypatch.setattr(kernels, name, locked)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_vocabulary_shards_sample_the_tokens_of_one_rank(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yalis.sampling.batch._MAX_CANDIDATES", 9)  # top_k 20 is found by histograms
    vocab, count = 101, 12
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)).mul_(2).to(dtype)
    logits[0], logits[1, 70], logits[2, 3], logits[3] = -math.inf, math.nan, math.inf, 1.0
    kinds: list[dict[str, Any]] = [*FILTERS, {"top_p": 0.95, "logprobs": 1}]
    rows = [
        SamplingRow(SamplingParams(temperature=0.8 * (i % 4 < 3), **kinds[i % len(kinds)]), i, 9 + i)
        for i in range(count)
    ]

    def sample_shard(rank: int, group: Memory) -> list[int]:
        held = shard(vocab, ranks, rank)
        sampler = Sampler(held, vocab, group, "cpu")
        sampler._random_type = FusedShardSampling
        batch = SamplingBatch.build(rows, held, vocab, "cpu")
        return sampler.sample(logits[:, held.start : held.stop], batch).tokens.tolist()

    expected = sample(logits, rows, fused=False).tokens.tolist()
    assert expected[:3] == [0, NO_TOKEN, NO_TOKEN]
    assert run_ranks(ranks, sample_shard) == [expected] * ranks
