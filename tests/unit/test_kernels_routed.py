"""Products with the matrix of an expert each equal one product per pair, for any routing and number of rows."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

from typing import Any

import pytest
import torch

from yalis.kernels import ops, routed

SHAPES = [(1, 5, 1), (1, 7, 7), (3, 4, 2), (40, 3, 2), (131, 11, 5), (0, 5, 2)]  # rows, experts, experts of a row


def draw(rows: int, count: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 19, generator=generator)
    weight = torch.randn(count, 13, 19, generator=generator)
    experts = torch.rand(rows, count, generator=generator).topk(top_k).indices.flatten()
    return x, weight, experts


def one_by_one(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    repeated = len(experts) // max(1, len(x))
    products = [weight[expert] @ x[pair // repeated] for pair, expert in enumerate(experts.tolist())]
    return torch.stack(products) if products else x.new_empty(0, weight.shape[1])


@pytest.mark.parametrize(("rows", "count", "top_k"), SHAPES)
def test_both_implementations(rows: int, count: int, top_k: int) -> None:
    x, weight, experts = draw(rows, count, top_k)
    expected = one_by_one(x, weight, experts)
    torch.testing.assert_close(ops.expert_linear(x, weight, experts), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(routed.blocked_linear(x, weight, experts), expected, rtol=1e-4, atol=1e-4)
    pairs = torch.randn(len(experts), 19, generator=torch.Generator().manual_seed(1))  # a row for each pair
    expected = one_by_one(pairs, weight, experts)
    torch.testing.assert_close(ops.expert_linear(pairs, weight, experts), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(routed.blocked_linear(pairs, weight, experts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts", [[4] * 300, [0] * 299 + [4], list(range(5)) * 60], ids=["last", "two", "even"])
def test_blocks_hold_any_routing(experts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "_MAX_COPY", 3 * 13 * 19 * 4)  # three blocks at a time
    x, weight, _ = draw(300, 5, 1)
    chosen = torch.tensor(experts)
    found = routed.blocked_linear(x, weight, chosen)
    torch.testing.assert_close(found, one_by_one(x, weight, chosen), rtol=1e-4, atol=1e-4)


def test_blocks_need_no_value_on_the_host() -> None:
    """Meta tensors have no values: reading one on the host, or a shape that depends on it, raises."""
    x, weight, experts = (tensor.to("meta") for tensor in draw(131, 11, 5))
    assert routed.blocked_linear(x, weight, experts).shape == (131 * 5, 13)
    weights, chosen = routed.route(x, 4, renormalize=True)
    assert routed.combine(x.new_empty(131 * 4, 13), weights).shape == (131, 13)
    assert chosen.dtype == torch.int64
    with pytest.raises(RuntimeError):
        routed.grouped_linear(x, weight, experts, torch.nn.functional.linear)


def test_route_and_combine() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    probabilities = logits.softmax(-1)
    weights, experts = routed.route(logits, 2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, probabilities[:, 1:3])
    renormalized, _ = routed.route(logits, 2, renormalize=True)
    torch.testing.assert_close(renormalized, logits[:, 1:3].softmax(-1))  # a softmax after the choice
    torch.testing.assert_close(routed.combine(torch.eye(2), renormalized), renormalized)


def test_only_chosen_experts_are_read() -> None:
    x, weight, _ = draw(3, 6, 1)
    weight[[0, 2, 3, 5]] = torch.nan
    assert not ops.expert_linear(x, weight, torch.tensor([4, 1, 4])).isnan().any()


def choose(rows: int, count: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, count, generator=generator).topk(top_k).indices


@pytest.mark.parametrize(("rows", "count", "top_k"), [shape for shape in SHAPES if shape[1] > 3])
@pytest.mark.parametrize("linear", [ops.expert_linear, routed.blocked_linear])
def test_pairs_left_out_are_zeros(rows: int, count: int, top_k: int, linear: Any) -> None:
    """The experts of two ranks: the sum of their products is that of one rank, and padding has none."""
    x, weight, _ = draw(rows, count, top_k)
    slots = torch.arange(rows) % 4 - 1  # every fourth row is padding
    experts, counts = choose(rows, count, top_k), torch.zeros(count + 1, dtype=torch.int64)
    total = torch.zeros(rows * top_k, weight.shape[1])
    for held in (range(3), range(3, count)):
        own = ops.own_experts(experts, slots, counts, held.start, len(held))
        found = linear(x, weight[held.start : held.stop], own)
        assert not found[own < 0].any()
        total += found
    expected = one_by_one(x, weight, experts.flatten())
    expected[(slots < 0).repeat_interleave(top_k)] = 0
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    real = torch.bincount(experts[slots >= 0].flatten(), minlength=count)
    assert counts.tolist() == [2 * size for size in [*real.tolist(), int((slots < 0).sum()) * top_k]]


@pytest.mark.parametrize("rows", [0, 1, 131])
@pytest.mark.parametrize("padded", [False, True])
def test_own_experts_in_triton(rows: int, padded: bool) -> None:
    kernels = pytest.importorskip("yalis.kernels.expert_choices", reason="triton is not installed")
    experts, slots = choose(rows, 11, 5), torch.arange(rows) % 3 - 1 if padded else None
    counts, expected_counts = torch.full((12,), 7), torch.full((12,), 7)
    found = kernels.own_experts(experts, slots, counts, 4, 3)
    assert torch.equal(found, routed.own_experts(experts, slots, expected_counts, 4, 3))
    assert torch.equal(counts, expected_counts)
