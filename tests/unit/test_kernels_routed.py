"""Products with the matrix of an expert each equal one product per pair, for any routing and number of rows."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from yalis.kernels import native, ops, reference, routed
from yalis.moe import MoESpec

SPEC = MoESpec(num_experts=4, top_k=2, width=1, layers=(True,), renormalize=True)

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
    moe = replace(SPEC, num_experts=19, top_k=4, scoring="sigmoid")
    weights, chosen = routed.route(x, moe, x.new_empty(19))
    assert routed.combine(x.new_empty(131 * 4, 13), weights).shape == (131, 13)
    assert chosen.dtype == torch.int64
    with pytest.raises(RuntimeError):
        routed.grouped_linear(x, weight, experts, torch.nn.functional.linear)


@pytest.mark.parametrize(("rows", "count", "top_k"), SHAPES)
def test_native_kernels(rows: int, count: int, top_k: int) -> None:
    """Routing, biases, pairs that are left out and shared experts are those of plain torch, for any threads."""
    assert native.load() is not None, native.reason()
    x, weight, experts = draw(rows, count, top_k)
    logits, bias = torch.randn(rows, count + 1), torch.randn(count, 13)
    spec = MoESpec(count, top_k, 1, (True,), renormalize=True)
    weights = ops.route(logits[:, :count], spec)[0]
    experts = torch.where(torch.rand(experts.shape) < 0.3, -1, experts)
    expected_y = reference.expert_linear(x, weight, experts, bias)
    y = ops.expert_linear(x, weight, experts, bias)
    torch.testing.assert_close(y, expected_y, rtol=1e-4, atol=1e-4)
    for other in (
        routed.grouped_linear(x, weight, experts, torch.nn.functional.linear, bias),
        routed.blocked_linear(x, weight, experts, bias),
    ):
        torch.testing.assert_close(other, expected_y, rtol=1e-4, atol=1e-4)
    shared, gate = torch.randn(rows, 13), logits[:, count:]
    for extra in ((), (shared,), (shared, gate)):
        torch.testing.assert_close(ops.combine_experts(y, weights, *extra), routed.combine(y, weights, *extra))


@pytest.mark.parametrize("scoring", routed.SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_native_routing(scoring: str, renormalize: bool) -> None:
    logits = torch.randn(50, 13, generator=torch.Generator().manual_seed(1))[:, :12]
    for groups, top_groups, correction in (
        (1, 1, None),
        (1, 1, torch.randn(12)),
        (4, 2, torch.randn(12)),
        (4, 2, None),
    ):
        if scoring == "softmax_chosen" and (correction is not None or groups > 1):
            continue
        spec = MoESpec(12, 5, 1, (True,), renormalize, scoring=scoring, groups=groups, top_groups=top_groups, scale=2.5)
        weights, found = ops.route(logits, spec, correction)
        expected = routed.route(logits, spec, correction)
        assert torch.equal(found, expected[1])
        torch.testing.assert_close(weights, expected[0])


def test_nan_routes_to_valid_experts() -> None:
    assert ops.route(torch.full((1, 4), torch.nan), replace(SPEC, top_k=3))[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("rows", [1, 6, 90])
def test_bits_do_not_depend_on_threads_or_other_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 300, generator=generator), torch.randn(7, 250, 300, generator=generator)
    experts = torch.rand(rows, 7, generator=generator).topk(3).indices.flatten()
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(ops.expert_linear(x, weight, experts))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(ops.expert_linear(x[:1], weight, experts[:3]), results[0][:3])


def test_route_and_combine() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, experts = routed.route(logits, replace(SPEC, renormalize=False))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 1:3])
    renormalized, _ = routed.route(logits, SPEC)
    torch.testing.assert_close(renormalized, logits[:, 1:3].softmax(-1))  # a softmax after the choice
    chosen, _ = routed.route(logits, replace(SPEC, renormalize=False, scoring="softmax_chosen"))
    torch.testing.assert_close(chosen, renormalized)
    torch.testing.assert_close(routed.combine(torch.eye(2), renormalized), renormalized)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (6, 5)])
@pytest.mark.parametrize("corrected", [False, True])
def test_every_router(scoring: str, renormalize: bool, groups: int, top_groups: int, corrected: bool) -> None:
    """Routing equals a loop over rows and experts, in float64."""
    if scoring == "softmax_chosen" and (corrected or groups > 1):
        pytest.skip("no model has it")
    moe = MoESpec(
        12, 3, 1, (True,), renormalize, scoring=scoring, scale=1.5, groups=groups, top_groups=top_groups,
        correction_bias=corrected,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(groups)
    logits = 2 * torch.randn(20, 12, generator=generator)
    correction = 0.3 * torch.randn(12, generator=generator) if corrected else None
    weights, experts = routed.route(logits, moe, correction)
    assert weights.dtype == torch.float32
    for row in range(20):
        exact = [float(logit) for logit in logits[row].double()]
        total = sum(map(math.exp, exact))
        scores = [1 / (1 + math.exp(-logit)) if scoring == "sigmoid" else math.exp(logit) / total for logit in exact]
        choice = [score + (0.0 if correction is None else float(correction[i])) for i, score in enumerate(scores)]
        size = 12 // groups
        best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        allowed = sorted(range(groups), key=best.__getitem__)[-top_groups:]
        expected = sorted((i for i in range(12) if i // size in allowed), key=choice.__getitem__)[-3:]
        assert sorted(experts[row].tolist()) == sorted(expected)
        total = sum(scores[i] for i in expected) if renormalize or scoring == "softmax_chosen" else 1.0
        for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
            assert weight == pytest.approx(1.5 * scores[expert] / total, rel=1e-5)


def test_the_clamped_gate() -> None:
    gate, up = torch.tensor([[-9.0, 0.5, 2.0, 9.0]]), torch.tensor([[-9.0, 0.5, 9.0, 2.0]])
    expected = [
        min(g, 2.5) / (1 + math.exp(-1.7 * min(g, 2.5))) * (min(max(u, -2.5), 2.5) + 1)
        for g, u in zip(gate[0].tolist(), up[0].tolist(), strict=True)
    ]
    found = ops.clamped_gate(torch.cat((gate, up), dim=1), alpha=1.7, limit=2.5)
    torch.testing.assert_close(found, torch.tensor([expected]))


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
