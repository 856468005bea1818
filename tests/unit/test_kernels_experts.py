"""The Triton kernels of mixtures of experts in Triton's interpreter against plain torch, and the choice of launches."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

from yalis.kernels import reference, routed
from yalis.kernels.experts_config import (
    ExpertShape,
    block_rows,
    candidates,
    choose_gemm,
    choose_gemv,
    count_blocks,
    shared_bytes,
)
from yalis.kernels.gpu_limits import GpuLimits

experts = pytest.importorskip("yalis.kernels.experts", reason="triton is not installed")

H200 = GpuLimits(132, 227 << 10, True)
# rows, experts, experts of a row; the last has more pairs than one launch sorts
SHAPES = [(1, 5, 1), (1, 33, 4), (2, 70, 4), (2, 6, 3), (20, 3, 2), (67, 11, 4), (230, 6, 5)]


def draw(rows: int, count: int, top_k: int, left_out: bool) -> torch.Tensor:
    """Return the experts of each pair; with `left_out`, -1 for about a third."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, count, generator=generator).topk(top_k).indices.flatten()
    return torch.where(torch.rand(chosen.shape, generator=generator) < 0.3, -1, chosen) if left_out else chosen


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize(("rows", "count", "top_k"), SHAPES)
def test_products(rows: int, count: int, top_k: int, left_out: bool) -> None:
    torch.manual_seed(rows)
    chosen, dtype = draw(rows, count, top_k, left_out), torch.float16 if rows % 2 else torch.float32
    x, bias = torch.randn(rows, 37).to(dtype), torch.randn(count, 26).to(dtype)
    weight = (torch.randn(count, 26, 37) / 6).to(dtype)
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    expected = reference.expert_linear(x, weight, chosen)
    torch.testing.assert_close(experts.expert_linear(x, weight, chosen), expected, **tolerance)
    plan = experts.group(chosen, count)
    gated = experts.expert_linear(x, weight, chosen, plan, bias, "silu")
    expected = reference.gated(reference.expert_linear(x, weight, chosen, bias), "silu")
    torch.testing.assert_close(gated, expected, **tolerance)
    pairs = torch.randn(len(chosen), 37).to(dtype)  # a row for each pair
    found = experts.expert_linear(pairs, weight, chosen, plan, bias)
    torch.testing.assert_close(found, reference.expert_linear(pairs, weight, chosen, bias), **tolerance)


@pytest.mark.parametrize("routing", [[4] * 300, [-1] * 300, [0] * 299 + [4], list(range(5)) * 260], ids=str)
def test_a_plan_has_every_pair_once(routing: list[int]) -> None:
    """Both ways to sort: all pairs are in the blocks of their expert, in order, and other blocks are empty."""
    chosen = torch.tensor(routing)
    plan = experts.group(chosen, 5).tolist()
    order, blocks = plan[: len(routing)], list(zip(*[iter(plan[len(routing) :])] * 3, strict=True))
    block_m = block_rows(len(routing), 5)
    assert len(blocks) == count_blocks(len(routing), 5, block_m)
    assert order == sorted(range(len(routing)), key=lambda pair: (routing[pair] < 0, routing[pair]))
    seen: list[int] = []
    for expert, start, end in blocks:
        assert 0 <= end - start <= block_m
        assert all(routing[pair] == (expert if expert < 5 else -1) for pair in order[start:end])
        seen += order[start:end]
    assert seen == order


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy subtracts NaN
@pytest.mark.parametrize("scoring", routed.SCORINGS)
@pytest.mark.parametrize(("renormalize", "corrected"), [(False, False), (True, False), (True, True)])
def test_routing(scoring: str, renormalize: bool, corrected: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 12, generator=generator)[:, :11]
    correction = torch.randn(11, generator=generator) if corrected and scoring != "softmax_chosen" else None
    weights, chosen = experts.route(logits, correction, 4, scoring, renormalize, 2.5)
    expected, expected_experts = routed.choose_experts(logits, correction, 4, scoring, renormalize, 1, 1, 2.5)
    assert torch.equal(chosen, expected_experts)
    torch.testing.assert_close(weights, expected)
    nan = experts.route(torch.full((1, 11), torch.nan), correction, 4, scoring, renormalize)[1]
    assert 0 <= nan.min() <= nan.max() < 11, "indices are valid even for NaN"
    assert experts.route(torch.zeros(1, 6), None, 3, scoring, renormalize)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weighted_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, weights = torch.randn(21, 50).to(dtype), torch.rand(7, 3)
    shared, gate = torch.randn(7, 50).to(dtype), torch.randn(7, 9).to(dtype)[:, 8:]
    for extra in ((None, None), (shared, None), (shared, gate)):
        torch.testing.assert_close(experts.combine(y, weights, *extra), routed.combine(y, weights, *extra))


def test_launches_suit_every_shape() -> None:
    for limits in (H200, GpuLimits(4, 99 << 10)):
        for pairs in (2, 16, 128, 512, 4096, 131072):
            for count, outputs, inputs in ((8, 14336, 4096), (64, 1024, 2048), (128, 768, 2048), (10, 21, 33)):
                for itemsize in (2, 4):
                    shape = ExpertShape(pairs, count, outputs, inputs, itemsize, True)
                    launch = choose_gemm(shape, limits)
                    assert shared_bytes(shape, launch) <= limits.max_shared_memory
                    assert itemsize == 4 or launch.block_n >= 16
                    assert choose_gemv(shape).block_k <= 2048
                    assert all(
                        shared_bytes(shape, one) <= limits.max_shared_memory
                        for one in candidates(shape, H200)
                        if limits is H200
                    )
    decode = choose_gemm(ExpertShape(128, 128, 768, 2048, 2, True), H200)
    prefill = choose_gemm(ExpertShape(131072, 128, 768, 2048, 2, True), H200)
    assert decode.block_n < prefill.block_n
    assert (block_rows(128, 128), block_rows(512, 128), block_rows(131072, 128)) == (16, 16, 128)
