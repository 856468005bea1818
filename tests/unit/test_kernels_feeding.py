"""Tokens on their way from step to step, in Triton's interpreter."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

feeding = pytest.importorskip("yalis.kernels.feeding", reason="triton is not installed")


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_feed_takes_the_owners_last_token(rows: int) -> None:
    torch.manual_seed(rows)
    last = torch.randint(0, 1000, (rows + 3,))
    owners = torch.randperm(rows + 3)[:rows]
    ids = torch.randint(0, 1000, (rows,))
    ids[::2] = -1
    expected = torch.where(ids < 0, last[owners], ids)
    assert torch.equal(feeding.feed(ids, last, owners), expected)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_settle_writes_the_best_token_to_its_owner(rows: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, 70).round()  # equals: the first wins
    logits[-1, 3] = math.nan
    last = torch.full((rows + 2,), 99)
    owners = torch.randperm(rows + 2)[:rows]
    tokens = feeding.settle(logits, last, owners, none=-1)
    best = [-1 if row.isnan().any() else int((row == row.max()).nonzero()[0]) for row in logits]
    assert tokens.tolist() == best
    assert last[owners].tolist() == [max(0, token) for token in best]
    assert (last == 99).sum() == 2
