"""The kernels that pass sampled tokens from step to step, in Triton's interpreter."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

token_feedback = pytest.importorskip("yalis.kernels.token_feedback", reason="triton is not installed")


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_negative_ids_become_the_last_token_of_their_request_slot(rows: int) -> None:
    torch.manual_seed(rows)
    last = torch.randint(0, 1000, (rows + 3,))
    request_slots = torch.randperm(rows + 3)[:rows]
    ids = torch.randint(0, 1000, (rows,))
    ids[::2] = -1
    expected = torch.where(ids < 0, last[request_slots], ids)
    assert torch.equal(token_feedback.use_last_tokens(ids, last, request_slots), expected)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_greedy_pick_is_stored_in_last_tokens(rows: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, 70).round()  # with ties, which the first id wins
    logits[-1, 3] = math.nan
    last = torch.full((rows + 2,), 99)
    request_slots = torch.randperm(rows + 2)[:rows]
    tokens = token_feedback.pick_greedy(logits, last, request_slots, none=-1)
    best = [-1 if row.isnan().any() else int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens.tolist() == best
    assert last[request_slots].tolist() == [max(0, token) for token in best]
    assert (last == 99).sum() == 2


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_greedy_pick_over_shards_of_the_vocabulary(rows: int) -> None:
    """As the pick from all logits: ties go to the first id, also between ranks, and NaN of any rank wins."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, 70).round()
    logits[-1, 60] = math.nan
    logits[0] = -math.inf
    if rows > 1:
        logits[1, ::7] = 9.0  # the best of every rank
    slots = torch.randperm(rows + 2)[:rows]
    expected_last, last = torch.full((rows + 2,), 99), torch.full((rows + 2,), 99)
    expected = token_feedback.pick_greedy(logits, expected_last, slots, none=-1)
    shards = [range(30), range(30, 50), range(50, 70)]
    parts = [
        token_feedback.find_best(logits[:, shard.start : shard.stop], rank, 3, shard.start)
        for rank, shard in enumerate(shards)
    ]
    tokens = token_feedback.pick_best(torch.stack(parts).sum(0), last, slots, none=-1)
    assert tokens.dtype == expected.dtype
    assert torch.equal(tokens, expected)
    assert torch.equal(last, expected_last)
