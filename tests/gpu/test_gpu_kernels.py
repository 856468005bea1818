"""The kernels of a step on a GPU against their plain references: every dtype, with and without PDL, in CUDA graphs."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: run tests/gpu in its own process", allow_module_level=True)

import triton

from yalis.kernels import fused, gated_product, ops, reference, routed, skinny, skinny_config
from yalis.kernels.gpu_limits import GpuLimits, gpu_limits
from yalis.kernels.integer_math import next_power_of_2
from yalis.kernels.pdl import enable_pdl, pdl_enabled
from yalis.kernels.skinny_config import GemmConfig, GemmShape, choose_config, shared_bytes
from yalis.moe import MoESpec

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# (N, K) of Llama-3.1-8B and SmolLM2, and odd sizes.
SIZES = ((6144, 4096), (4096, 14336), (960, 576), (576, 1536), (1000, 333), (17, 4096), (49152, 576))


@pytest.fixture(autouse=True)
def _fill_with_nan() -> Iterator[None]:
    """Make torch fill new tensors with NaN, so that an element a kernel does not write is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_skinny_gemm(dtype: torch.dtype, size: tuple[int, int]) -> None:
    rng = random.Random(str(size))
    outputs, inputs = size
    weight = draw(outputs, inputs, dtype=dtype) / inputs**0.5
    tma = [skinny.TMA_ROWS] if dtype.itemsize == 2 and inputs % 8 == 0 else []
    for rows in (1, 2, 7, 8, 9, 16, 31, 64, *tma):
        x = draw(rows, inputs, dtype=dtype)
        bias = draw(outputs, dtype=dtype) if rng.random() < 0.5 else None
        pdl = rng.random() < 0.5  # one of the two, to halve the time of compilation
        found = skinny.linear(x, weight, bias, pdl)
        assert error(found, reference.linear(x, weight, bias)) < TOLERANCE[dtype], (rows, pdl)
        if outputs % 2 == 0:
            activation = rng.choice(fused.ACTIVATIONS)
            found = skinny.gated_linear(x, weight, activation, bias, pdl)
            expected = reference.gated_linear(x, weight, activation, bias)
            # The activation cancels digits of gates near zero, so the relative error is larger than that of the GEMM.
            assert error(found, expected) < 2 * TOLERANCE[dtype], (rows, activation)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_configurations_of_the_search(rows: int, gated: bool) -> None:
    shape = GemmShape(rows, 6144, 4096, 2, gated)
    weight = draw(2 * 6144 if gated else 6144, 4096, dtype=torch.bfloat16) / 64
    x = draw(rows, 4096, dtype=torch.bfloat16)
    expected = reference.gated_linear(x, weight, "silu") if gated else reference.linear(x, weight)
    for config in random.Random(rows).sample(list(skinny_config.candidates(shape, gpu_limits(x.device))), 8):
        if gated:
            found = skinny.gated_linear(x, weight, "silu", config=config)
        else:
            found = skinny.linear(x, weight, config=config)
        assert error(found, expected) < 2 * TOLERANCE[torch.bfloat16], config


@pytest.mark.parametrize(
    "shape",
    [GemmShape(16, 6144, 4096, 2), GemmShape(16, 14336, 4096, 2, True), GemmShape(32, 14336, 4096, 2, True),
     GemmShape(16, 5120, 27648, 2), GemmShape(64, 9728, 2560, 2, True), GemmShape(16, 3584, 18944, 2)],
    ids=str,
)  # fmt: skip
def test_partly_owned_tiles_give_the_same_bits_as_full_tiles(shape: GemmShape) -> None:
    """Matrices of real models, with the configuration of a large GPU; M is full, or one row short."""
    config = choose_config(shape, GpuLimits(132, 227 << 10, True))
    full_tiles = config._replace(n_per_program=next_power_of_2(config.n_per_program))
    assert config != full_tiles
    if shared_bytes(shape, full_tiles) > gpu_limits(torch.device("cuda")).max_shared_memory:
        pytest.skip("needs more shared memory than this GPU has")
    weight = draw(shape.n * (2 if shape.gated else 1), shape.k, dtype=torch.bfloat16)
    weight /= shape.k**0.5
    for rows in (shape.m, shape.m - 1):
        x = draw(rows, shape.k, dtype=torch.bfloat16)
        if shape.gated:
            found, expected = (
                skinny.gated_linear(x, weight, "silu", pdl=True, config=one) for one in (config, full_tiles)
            )
            plain = reference.gated_linear(x, weight, "silu")
        else:
            found, expected = (skinny.linear(x, weight, pdl=True, config=one) for one in (config, full_tiles))
            plain = reference.linear(x, weight)
        assert torch.equal(found, expected)
        assert error(found, plain) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("pdl", [False, True])
def test_split_k_is_deterministic(pdl: bool) -> None:
    """Back-to-back launches, eager and replayed from a CUDA graph, give the same bits in any order of programs."""
    x, weight = draw(16, 4096, dtype=torch.bfloat16), draw(1024, 4096, dtype=torch.bfloat16) / 64
    config = GemmConfig(32, 64, 4, 3, 8)

    def run() -> list[torch.Tensor]:
        return [skinny.linear(x, weight, pdl=pdl, config=config) for _ in range(50)]

    first = skinny.linear(x, weight, config=config)
    assert error(first, reference.linear(x, weight)) < TOLERANCE[torch.bfloat16]
    for found in run():
        assert torch.equal(found, first)
    assert skinny._counters(x.device).count_nonzero() == 0
    torch.use_deterministic_algorithms(False)  # the graph must not contain the NaN fills of deterministic mode
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for _ in range(20):
        for output in outputs:
            output.fill_(math.nan)
        graph.replay()
        for output in outputs:
            assert torch.equal(output, first)


def test_a_chain_of_pdl_launches_gives_the_same_bits_as_without_pdl() -> None:
    """Norms, GEMMs and gates, each reading what the previous one wrote, in memory that is reused."""
    dtype, hidden, width = torch.bfloat16, 1024, 3072
    norm = (draw(hidden, dtype=dtype), 1e-5)
    layers = [
        (draw(hidden, hidden, dtype=dtype) / 32, draw(2 * width, hidden, dtype=dtype) / 32,
         draw(hidden, width, dtype=dtype) / 55)
        for _ in range(6)
    ]  # fmt: skip

    def run(x: torch.Tensor, pdl: bool) -> torch.Tensor:
        residual = None
        for square, up, down in layers:
            y, x = fused.add_rms_norm(x, residual, *norm, pdl)
            residual = skinny.linear(skinny.linear(y, square, None, pdl), square, None, pdl)
            y, x = fused.add_rms_norm(x, residual, *norm, pdl)
            residual = skinny.linear(skinny.gated_linear(y, up, "silu", None, pdl), down, None, pdl)
            residual = fused.gated(torch.cat((residual, x), 1), "silu", pdl)
        return fused.add_rms_norm(x, residual, *norm, pdl)[1]

    for rows in (1, 5, 16, 64):
        x = draw(rows, hidden, dtype=dtype)
        expected = run(x, False)
        torch.use_deterministic_algorithms(False)
        run(x, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(x, True)
        for _ in range(30):
            graph.replay()
            assert torch.equal(found, expected), rows


@DTYPES
@pytest.mark.parametrize("cols", [64, 576, 4096, 5120, 8192])
def test_add_rms_norm(dtype: torch.dtype, cols: int) -> None:
    for rows in (1, 33, 300):
        x, residual = draw(rows, cols, dtype=dtype), draw(rows, cols, dtype=dtype)
        for weight in (draw(cols, dtype=dtype), draw(cols, dtype=torch.float32)):
            for addend in (None, residual):
                normed, summed = fused.add_rms_norm(x, addend, weight, 1e-5, pdl=True)
                expected, expected_sum = reference.add_rms_norm(x, addend, weight, 1e-5)
                assert error(normed, expected) < TOLERANCE[dtype]
                assert torch.equal(summed, expected_sum)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "norm"),
    [(32, 8, 128, 128, False), (32, 8, 128, 128, True), (9, 3, 64, 64, False), (32, 32, 96, 96, False),
     (8, 4, 256, 256, True), (32, 32, 80, 32, False)],
)  # fmt: skip
def test_rope_write(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary_dim: int, norm: bool) -> None:
    for tokens in (1, 64, 700):
        qkv = draw(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        cos, sin = draw(tokens, 1, 2 * rotary_dim, dtype=dtype).chunk(2, dim=-1)
        pool = draw(2, 100, 16, kv_heads, dim, dtype=dtype)
        slots = torch.randperm(1600, device="cuda")[:tokens]
        slots[tokens // 2] = -1
        norms: tuple[Any, Any] = (draw(dim, dtype=dtype), draw(dim, dtype=dtype)) if norm else (None, None)
        found, expected = pool.clone(), pool.clone()
        q = fused.rope_write(qkv, cos, sin, *found, slots, *norms, 1e-6, pdl=True)
        assert error(q, reference.rope_write(qkv, cos, sin, *expected, slots, *norms, 1e-6)) < TOLERANCE[dtype]
        assert error(found, expected) < TOLERANCE[dtype]


@DTYPES
def test_gated(dtype: torch.dtype) -> None:
    for rows, width in ((1, 14336), (7, 1000), (300, 96)):
        for activation in fused.ACTIVATIONS:
            x = 4 * draw(rows, 2 * width, dtype=dtype)
            assert error(fused.gated(x, activation, pdl=True), reference.gated(x, activation)) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [(28672, 4096), (1040, 520)], ids=str)
def test_fused_gate_and_up_gemm(size: tuple[int, int]) -> None:
    """Rounds like the separate operations, also in partial tiles."""
    outputs, inputs = size
    for dtype, activation in ((torch.bfloat16, "silu"), (torch.float16, "gelu_tanh")):
        x = draw(ops.FUSED_GATE_MIN_ROWS + 77, inputs, dtype=dtype)
        weight = draw(outputs, inputs, dtype=dtype) / inputs**0.5
        assert gated_product.supports(x, weight)
        for bias in (None, draw(outputs, dtype=dtype)):
            found = ops.gated_linear(x, weight, activation, bias)
            assert error(found, reference.gated_linear(x, weight, activation, bias)) < 2e-3


@DTYPES
def test_argmax(dtype: torch.dtype) -> None:
    for rows, vocab in ((1, 128256), (64, 49152), (5, 7)):
        logits = draw(rows, vocab, dtype=dtype).round()  # many ties
        logits[0, vocab // 2 :: 2] = math.nan
        logits[-1] = -math.inf if rows > 1 else logits[-1]
        assert fused.argmax(logits, pdl=True).tolist() == [first_argmax(row) for row in logits.float().cpu()]


def first_argmax(row: torch.Tensor) -> int:
    nan = row.isnan().nonzero()
    if len(nan):
        return int(nan[0])
    return int((row == row.max()).nonzero()[0])


# The operations that layers call: kernels/ops.py.

ROWS = (1, 2, 7, 16, 33, 64, 65, 128, 300)
# Kernels and references sum in different orders, so results differ by rounding.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-3}


class Layer:
    """A small decoder layer without attention, computed with kernels/ops.py."""

    hidden, width, heads, kv_heads, dim = 1024, 2816, 8, 2, 128

    def __init__(self, dtype: torch.dtype) -> None:
        hidden, width, qkv = self.hidden, self.width, (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv, self.out, self.up, self.down = (
            draw(outputs, inputs, dtype=dtype) / inputs**0.5
            for outputs, inputs in ((qkv, hidden), (hidden, hidden), (2 * width, hidden), (hidden, width))
        )
        self.norm = draw(hidden, dtype=dtype)
        self.pool = torch.zeros(2, 40, 16, self.kv_heads, self.dim, dtype=dtype, device="cuda")

    def run(self, x: torch.Tensor, angles: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Run the layer. In place of attention, the keys just written are read back from the cache."""
        qkv = ops.linear(ops.rms_norm(x, self.norm, 1e-5), self.qkv).view(x.shape[0], -1, self.dim)
        q = ops.rope_write(qkv, *angles.chunk(2, dim=-1), *self.pool, slots)
        q = q + self.pool[0].flatten(0, 1).index_select(0, slots).repeat(1, self.heads // self.kv_heads, 1)
        y, x = ops.add_rms_norm(x, ops.linear(q.flatten(1), self.out), self.norm, 1e-5)
        return ops.add_rms_norm(x, ops.linear(ops.gated_linear(y, self.up, "silu"), self.down), self.norm, 1e-5)[1]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_ops_round_as_their_references(dtype: torch.dtype, rows: int) -> None:
    layer, eps = Layer(dtype), 1e-5
    hidden, width = layer.hidden, layer.width
    for activation, bias in (("silu", None), ("gelu", draw(hidden, dtype=dtype)), ("gelu_tanh", None)):
        x = draw(rows, width, dtype=dtype)
        assert error(ops.linear(x, layer.down, bias), reference.linear(x, layer.down, bias)) < ROUNDING[dtype]
        x = draw(rows, hidden, dtype=dtype)
        found = ops.gated_linear(x, layer.up, activation)
        assert error(found, reference.gated_linear(x, layer.up, activation)) < 2 * ROUNDING[dtype]
    wide = draw(hidden, dtype=torch.float32)
    for residual, weight in ((None, layer.norm), (x.flip(1), layer.norm), (x.flip(1), wide)):
        pairs = zip(
            ops.add_rms_norm(x, residual, weight, eps), reference.add_rms_norm(x, residual, weight, eps), strict=True
        )
        assert all(error(*pair) < ROUNDING[dtype] for pair in pairs)
    qkv = draw(rows, layer.heads + 2 * layer.kv_heads, layer.dim, dtype=dtype)
    cos, sin = draw(rows, 1, 2 * layer.dim, dtype=dtype).chunk(2, dim=-1)
    slots = torch.randperm(640, device="cuda")[:rows]
    for norms in ((), (draw(layer.dim, dtype=dtype), draw(layer.dim, dtype=dtype), eps)):
        found, expected = layer.pool.clone(), layer.pool.clone()
        q = ops.rope_write(qkv, cos, sin, *found, slots, *norms)
        assert error(q, reference.rope_write(qkv, cos, sin, *expected, slots, *norms)) < ROUNDING[dtype]
        assert error(found, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_two_hundred_replays_with_pdl(dtype: torch.dtype, rows: int) -> None:
    """Back-to-back layers and replays with new inputs each time give the same bits as launches without PDL."""
    torch.use_deterministic_algorithms(False)  # the graph must not contain the NaN fills of deterministic mode
    layers, times = [Layer(dtype) for _ in range(3)], 200
    inputs = draw(times, rows, Layer.hidden, dtype=dtype)
    all_angles = draw(times, rows, 1, 2 * Layer.dim, dtype=dtype) / 2
    all_slots = torch.stack([torch.randperm(640, device="cuda")[:rows] for _ in range(times)])
    x, angles, slots = inputs[0].clone(), all_angles[0].clone(), all_slots[0].clone()

    def run() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer.run(y, angles, slots)
        return y

    def run_all(step: Callable[[], torch.Tensor]) -> torch.Tensor:
        results = torch.full_like(inputs, math.nan)
        for i in range(times):
            x.copy_(inputs[i])
            angles.copy_(all_angles[i])
            slots.copy_(all_slots[i])
            results[i].copy_(step())
        return results

    expected = run_all(run)
    with enable_pdl(x.device):
        assert pdl_enabled()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    assert torch.equal(run_all(replay), expected)
    with enable_pdl(x.device):
        assert torch.equal(run_all(run), expected)
    assert skinny._counters(x.device).count_nonzero() == 0


def test_nothing_is_compiled_after_a_warm_up() -> None:
    """After a few sizes have run, no other size and no alignment of the slots compiles another kernel."""
    compiled: list[str] = []
    layer, table = Layer(torch.bfloat16), draw(9000, 1, 2 * Layer.dim, dtype=torch.bfloat16)
    packed = torch.zeros(18000, dtype=torch.int64, device="cuda")

    def run(rows: int, first: int) -> None:
        """Run a layer with slots that are a slice of a longer tensor, at any multiple of 8 bytes."""
        packed[first : first + rows] = torch.arange(rows, device="cuda") % 640
        layer.run(draw(rows, layer.hidden, dtype=torch.bfloat16), table[:rows], packed[first : first + rows])

    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **info: compiled.append(str(info.get("repr")))
    try:
        for rows in (1, 8, 16, 32, 64, 65, 128, 600, ops.FUSED_GATE_MIN_ROWS):
            run(rows, 0)
        compiled.clear()
        for rows in (*range(1, 70), 127, 128, 129, 511, 512, 513, 640, 8191, 8300):
            run(rows, rows)
        assert compiled == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


# rows, experts, experts of a row, inputs, width: one row, all decode sizes, a prefill, and odd sizes
EXPERTS = (
    (1, 128, 8, 2048, 768),
    (16, 128, 8, 2048, 768),
    (64, 128, 8, 2048, 768),
    (1000, 128, 8, 2048, 768),
    (7, 8, 2, 4096, 14336),
    (300, 11, 3, 333, 21),
)


@DTYPES
@pytest.mark.parametrize("size", EXPERTS, ids=str)
def test_experts(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Both products, with a plan as in a step, biases and pairs that are left out."""
    rows, count, top_k, inputs, width = size
    x = draw(rows, inputs, dtype=dtype)
    gate_up, down = draw(count, 2 * width, inputs, dtype=dtype), draw(count, inputs, width, dtype=dtype)
    gate_up, down = gate_up / inputs**0.5, down / width**0.5
    bias = draw(count, 2 * width, dtype=dtype)
    logits = draw(rows, count, dtype=torch.float32)
    spec = MoESpec(count, top_k, width, (True,), renormalize=True)
    weights, experts = ops.route(logits, spec)
    expected = routed.route(logits, spec)
    assert torch.equal(experts, expected[1])
    assert error(weights, expected[0]) < 1e-5
    for left_out in (False, True):
        chosen = experts.flatten()
        if left_out:
            chosen = torch.where(chosen % 3 == 0, -1, chosen)
        plan = ops.group_experts(x, chosen, count)
        hidden = ops.expert_linear(x, gate_up, chosen, bias, "silu", plan)
        wanted = reference.gated(reference.expert_linear(x, gate_up, chosen, bias), "silu")
        assert error(hidden, wanted) < 2 * TOLERANCE[dtype]
        y = ops.expert_linear(wanted, down, chosen, plan=plan)
        products = reference.expert_linear(wanted, down, chosen)
        assert error(y, products) < TOLERANCE[dtype]
        shared, gate = draw(rows, inputs, dtype=dtype), draw(rows, 1, dtype=dtype)
        found = ops.combine_experts(products, weights, shared, gate)
        assert error(found, routed.combine(products, weights, shared, gate)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_graph_serves_any_routing(rows: int) -> None:
    """One captured layer, replayed with other logits: the launches do not depend on the routing."""
    count, hidden, width, dtype = 128, 256, 96, torch.bfloat16
    spec = MoESpec(count, 8, width, (True,), renormalize=True)
    x, logits = draw(rows, hidden, dtype=dtype), draw(rows, count, dtype=dtype)
    gate_up, down = draw(count, 2 * width, hidden, dtype=dtype) / 16, draw(count, hidden, width, dtype=dtype) / 16

    def layer() -> torch.Tensor:
        weights, experts = ops.route(logits, spec)
        chosen = experts.flatten()
        plan = ops.group_experts(x, chosen, count)
        hidden_rows = ops.expert_linear(x, gate_up, chosen, None, "silu", plan)
        return ops.combine_experts(ops.expert_linear(hidden_rows, down, chosen, plan=plan), weights)

    with enable_pdl(x.device):
        layer()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer()
    for fill in ("random", "one expert", "random"):
        logits.normal_()
        if fill == "one expert":
            logits.copy_(torch.arange(count, device="cuda", dtype=dtype).expand(rows, count))
        graph.replay()
        assert torch.equal(found, layer()), fill


def test_own_experts_in_a_graph() -> None:
    """The choices of other routing and padding are counted by the same graph, while another stream reads the counts."""
    experts = torch.stack([torch.randperm(60, device="cuda")[:4] for _ in range(131)])
    slots = torch.arange(131, device="cuda") % 3 - 1
    counts = torch.zeros(61, dtype=torch.int64, device="cuda")
    ops.own_experts(experts, slots, counts, 15, 15)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = ops.own_experts(experts, slots, counts, 15, 15)
    counts.zero_()
    experts.copy_(experts.flip(0))
    slots.copy_(slots.roll(1))
    expected_counts = counts.clone()
    graph.replay()
    assert torch.equal(own, routed.own_experts(experts, slots, expected_counts, 15, 15))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(counts.cpu(), expected_counts.cpu())
