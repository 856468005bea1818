"""The cases of the kernel benchmark: operations at the sizes of a model, with their inputs.

Each case has several copies of its inputs, so that matrices come from memory as in a decode step, not from the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yalis import env
from yalis.engine.device import resolve_block_size
from yalis.errors import YalisError
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.ops import FUSED_GATE_MIN_ROWS
from yalis.perfmodel.floors import ModelDims
from yalis.study.kernels.backends import Backend

if TYPE_CHECKING:
    from yalis.kernels.experts_config import ExpertShape
    from yalis.kernels.skinny_config import GemmShape

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_COPIES_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of all copies together: far more than the caches hold
_MAX_COPIES = 64
_PROMPT_LEN = {"cpu": 512, "cuda": 2048}
_QWEN3_30B_A3B = ModelDims(
    hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocab=151936, tied=False,
    expert_layers=48, experts=128, top_k=8, expert_width=768,
)  # fmt: skip
# Experts that are measured beside the dense model of DIMS; on a CPU fewer and narrower ones.
EXPERT_DIMS = {
    "cuda": _QWEN3_30B_A3B,
    "cpu": replace(_QWEN3_30B_A3B, hidden=1024, experts=16, top_k=4, expert_width=512),
}


@dataclass(frozen=True)
class KernelsPlan:
    """What `yalis bench kernels` runs. The fields are written to the result as its parameters."""

    dims: ModelDims | None = None  # by default those of a model that suits the device
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    layers: int = 8  # in the decode step without attention
    context: int = 1024  # tokens of a sequence in the KV cache
    prompts: int = 4  # in prefill attention
    prompt_len: int | None = None  # by default 2048 on a GPU, 512 on a CPU
    device: str = "auto"
    dtype: str = "auto"
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "context", "prompts", "prompt_len", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise YalisError(f"{name} is {value}; give a whole number of at least 1")
        if not self.rows or not all(1 <= rows <= 64 or rows == 128 for rows in self.rows):
            raise YalisError("--rows takes numbers from 1 to 64, and 128; give for example --rows 1,16,64")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise YalisError(f"unknown dtype {self.dtype!r}; accepted: auto, {', '.join(DTYPES)}")


@dataclass(frozen=True)
class KernelCase:
    """One operation at one size."""

    kernel: str
    shape: str
    rows: int
    bytes: float  # that it must read and write at least
    flops: float
    operation: Callable[..., Tensor | tuple[Tensor, ...]]  # called with a backend and one copy of the inputs
    copies: list[tuple[Any, ...]]  # of the inputs
    tolerance_scale: float = 1.0  # factor on the tolerance of a single operation

    def run(self, backend: Backend, copy: int = 0) -> tuple[Tensor, ...]:
        output = self.operation(backend, *self.copies[copy])
        return output if isinstance(output, tuple) else (output,)

    def streams(self, device: torch.device) -> bool:
        """Return whether the copies together exceed the caches, so that all inputs come from memory."""
        return self.bytes * len(self.copies) >= _COPIES_BYTES[device.type] / 2


def list_cases(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield all cases. The tensors of a case are allocated when it is reached."""
    for group in (
        _decode_linears,
        _prefill_linears,
        _experts,
        _elementwise,
        _token_ops,
        _decode_attention,
        _prefill_attention,
        _decode_steps,
    ):
        yield from group(plan, dims, device, dtype)


def _decode_linears(
    plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """Every linear layer, and gate_up also with the gated activation fused."""
    for name, (outputs, inputs) in matrices(dims).items():
        count = _num_copies(outputs * inputs * dtype.itemsize, device)
        weights = [_matrix(outputs, inputs, dtype, device) for _ in range(count)]
        for rows in plan.rows:
            x = _random(rows, inputs, dtype=dtype, device=device)
            shape = f"{name} {outputs}x{inputs}"
            out = rows * outputs * dtype.itemsize
            moved = float(weights[0].nbytes + x.nbytes + out)
            flops = 2.0 * rows * outputs * inputs
            copies: list[tuple[Any, ...]] = [(x, w) for w in weights]
            yield KernelCase("linear", shape, rows, moved, flops, _call("linear"), copies)
            if name == "gate_up":
                yield KernelCase("linear, gate", shape, rows, moved - out / 2, flops, _call("gated_linear"), copies)


def _prefill_linears(
    plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """The fused gate_up at the row count of a long prefill, if our kernel for it runs here."""
    if not gpu_limits(device).has_tma or find_spec("triton") is None:
        return
    from yalis.kernels.gated_product import supports

    outputs, inputs = matrices(dims)["gate_up"]
    x, weight = (
        _random(FUSED_GATE_MIN_ROWS, inputs, dtype=dtype, device=device),
        _matrix(outputs, inputs, dtype, device),
    )
    if not supports(x, weight):
        return
    moved = float(weight.nbytes + x.nbytes + FUSED_GATE_MIN_ROWS * outputs // 2 * dtype.itemsize)
    flops = 2.0 * FUSED_GATE_MIN_ROWS * outputs * inputs
    shape = f"gate_up {outputs}x{inputs}"
    yield KernelCase("linear, gate", shape, FUSED_GATE_MIN_ROWS, moved, flops, _call("gated_linear"), [(x, weight)])


def _experts(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Routing and the experts of a layer, routed uniformly, at decode sizes and at that of a prefill."""
    if plan.dims is None:
        dims = EXPERT_DIMS[device.type]
    if not dims.experts:
        return
    count, top_k, width, hidden = dims.experts, int(dims.top_k), dims.expert_width, dims.hidden
    matrix = 3 * width * hidden * dtype.itemsize  # bytes of one expert
    layers = [
        (_stack(count, 2 * width, hidden, dtype, device), _stack(count, hidden, width, dtype, device))
        for _ in range(_num_copies(count * matrix, device))
    ]
    prefill = plan.prompts * (plan.prompt_len or _PROMPT_LEN[device.type])
    for rows in (*plan.rows, prefill):
        logits = _inputs(rows, count, dtype=dtype, device=device)
        shape = f"{top_k} of {count}"
        moved = logits[0].nbytes + 12.0 * rows * top_k
        yield KernelCase("route", shape, rows, moved, 0.0, _call("route"), [(each, top_k) for each in logits])
        x, scores = _random(rows, hidden, dtype=dtype, device=device), torch.rand(rows, count, device=device)
        weights, chosen = scores.topk(top_k, dim=1)
        touched = int(chosen.unique().numel())
        moved = float(touched * matrix + 2 * x.nbytes)
        copies: list[tuple[Any, ...]] = [(x, *layer, weights, chosen.flatten()) for layer in layers]
        flops = 6.0 * rows * top_k * width * hidden
        # Two products and a sum: their errors add up.
        yield KernelCase("experts", f"{shape} x {width}", rows, moved, flops, _call("experts"), copies, 3.0)


def _stack(count: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one random matrix for each expert."""
    return torch.randn(count, outputs, inputs, dtype=dtype, device=device).mul_(inputs**-0.5)


def make_experts(shape: ExpertShape, dtype: torch.dtype, device: torch.device, top_k: int) -> KernelCase:
    """Return one grouped product as a case, for the launch search, routed uniformly."""
    rows = shape.pairs // top_k
    outputs, activation = shape.outputs * (2 if shape.gated else 1), "silu" if shape.gated else ""
    x = _random(rows if shape.gated else shape.pairs, shape.inputs, dtype=dtype, device=device)
    chosen = torch.rand(rows, shape.experts, device=device).topk(top_k, dim=1).indices.flatten()
    matrix = outputs * shape.inputs * dtype.itemsize
    copies: list[tuple[Any, ...]] = [
        (x, _stack(shape.experts, outputs, shape.inputs, dtype, device), chosen, activation)
        for _ in range(_num_copies(shape.experts * matrix, device))
    ]
    moved, flops = float(chosen.unique().numel() * matrix), 2.0 * shape.pairs * outputs * shape.inputs
    return KernelCase("", "", rows, moved, flops, _call("expert_linear"), copies)


def _elementwise(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    """The operations between the linear layers."""
    heads, kv_heads, dim = dims.heads, dims.kv_heads, dims.head_dim
    weight = _random(dims.hidden, dtype=dtype, device=device)
    for rows in plan.rows:
        hidden = _inputs(rows, dims.hidden, dtype=dtype, device=device)
        copies: list[tuple[Any, ...]] = [(x, None, weight) for x in hidden]
        yield KernelCase("norm", f"{dims.hidden}", rows, 2.0 * hidden[0].nbytes, 0.0, _call("add_rms_norm"), copies)
        copies = [(x, x.flip(0), weight) for x in hidden]
        yield KernelCase(
            "add, norm", f"{dims.hidden}", rows, 4.0 * hidden[0].nbytes, 0.0, _call("add_rms_norm"), copies
        )
        wide = _inputs(rows, 2 * dims.intermediate, dtype=dtype, device=device)
        moved = 1.5 * wide[0].nbytes
        yield KernelCase("gate", f"{dims.intermediate}", rows, moved, 0.0, _call("gated"), [(x,) for x in wide])
        qkv = _inputs(rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        cos, sin = _random(2, rows, 1, dim, dtype=dtype, device=device)
        size = resolve_block_size(None, device)
        k, v = _random(2, rows, size, kv_heads, dim, dtype=dtype, device=device)
        copies = [(x, cos, sin, k, v, torch.randperm(rows * size, device=device)[:rows]) for x in qkv]
        shape = f"{heads}+2x{kv_heads} heads of {dim}"
        yield KernelCase("rope, write", shape, rows, 2.0 * qkv[0].nbytes, 0.0, _call("rope_write"), copies)


def _token_ops(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Embedding of the tokens sampled by the previous step, and greedy sampling."""
    table = _random(dims.vocab, dims.hidden, dtype=dtype, device=device)
    for rows in plan.rows:
        request_slots = torch.randperm(2 * rows, device=device)[:rows]
        ids = [torch.randint(-dims.vocab, dims.vocab, (rows,), device=device) for _ in range(_MAX_COPIES)]
        last = torch.randint(dims.vocab, (2 * rows,), device=device)
        copies: list[tuple[Any, ...]] = [(x, last, request_slots) for x in ids]
        yield KernelCase(
            "use last tokens", f"{2 * rows} slots", rows, 4.0 * ids[0].nbytes, 0.0, _call("use_last_tokens"), copies
        )
        copies = [(table, x.remainder(dims.vocab)) for x in ids]
        moved = 2.0 * rows * dims.hidden * dtype.itemsize
        yield KernelCase("gather rows", f"{dims.vocab}x{dims.hidden}", rows, moved, 0.0, _call("gather_rows"), copies)
        logits = _inputs(rows, dims.vocab, dtype=dtype, device=device)
        moved = float(logits[0].nbytes)
        yield KernelCase("argmax", f"{dims.vocab}", rows, moved, 0.0, _call("argmax"), [(x,) for x in logits])
        copies = [(x, last, request_slots) for x in logits]
        yield KernelCase("pick greedy", f"{dims.vocab}", rows, moved, 0.0, _call("pick_greedy"), copies)


def _decode_attention(
    plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """One query token per sequence over its KV cache. The cache of torch is not paged."""
    for rows in plan.rows:
        yield _attention_case(rows, plan.context, False, dims, device, dtype)


def _prefill_attention(
    plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """Causal attention of whole prompts."""
    length = plan.prompt_len or _PROMPT_LEN[device.type]
    yield _attention_case(plan.prompts, length, True, dims, device, dtype)


def _attention_case(
    sequences: int, context: int, prefill: bool, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> KernelCase:
    """`sequences` of `context` tokens in the KV cache; queries are all of them in prefill, otherwise the last one."""
    size = resolve_block_size(None, device)
    blocks = -(-context // size)
    context = blocks * size
    new = context if prefill else 1
    rows = sequences * new
    starts = torch.arange(0, rows + 1, new, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    tables = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
    launch = _plan_launch(starts, (new,) * sequences, dims, dtype)
    pairs = sequences * new * (2 * context - new + 1) / 2  # (query, key) pairs that the causal mask keeps
    moved = 2 * (sequences * context * dims.kv_heads + rows * dims.heads) * dims.head_dim * dtype.itemsize
    copies: list[tuple[Any, ...]] = []
    for _ in range(_num_copies(moved, device)):
        q = _random(rows, dims.heads, dims.head_dim, dtype=dtype, device=device)
        k, v = _random(2, sequences * blocks, size, dims.kv_heads, dims.head_dim, dtype=dtype, device=device)
        copies.append((q, k, v, starts, lengths, tables, launch))
    flops = 4.0 * dims.heads * dims.head_dim * pairs
    kernel, shape = "attention", f"{context} tokens"
    if prefill:
        kernel, shape = "prefill attention", f"{sequences} x {shape}"
    return KernelCase(kernel, shape, rows, float(moved), flops, _call("attention"), copies)


def _plan_launch(starts: Tensor, lens: tuple[int, ...], dims: ModelDims, dtype: torch.dtype) -> Any:
    """Return the launch plan of our attention kernel, or None where Triton kernels do not run."""
    if not (starts.is_cuda or env.triton_interpreted()) or find_spec("triton") is None:
        return None
    from yalis.kernels.paged_attention import PROGRAMS_PER_SM, plan_launch

    programs = PROGRAMS_PER_SM * gpu_limits(starts.device).num_sms
    return plan_launch(starts, lens, dims.heads, dims.kv_heads, dims.head_dim, dtype, programs)


def _decode_steps(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    """A decode step without attention: all linear layers and norms in sequence."""
    width = dims.heads * dims.head_dim
    shapes = matrices(dims)
    head = _matrix(*shapes.pop("head"), dtype, device)
    layers = [[_matrix(*shape, dtype, device) for shape in shapes.values()] for _ in range(plan.layers)]
    norm = _random(dims.hidden, dtype=dtype, device=device)

    def step(backend: Backend, x: Tensor) -> Tensor:
        residual = None
        for qkv, out, gate_up, down in layers:
            normed, x = backend.add_rms_norm(x, residual, norm)
            residual = backend.linear(backend.linear(normed, qkv)[:, :width], out)
            normed, x = backend.add_rms_norm(x, residual, norm)
            residual = backend.linear(backend.gated_linear(normed, gate_up), down)
        return backend.linear(backend.add_rms_norm(x, residual, norm)[0], head)

    num_weights = head.numel() + sum(matrix.numel() for layer in layers for matrix in layer)
    for rows in plan.rows:
        x = _random(rows, dims.hidden, dtype=dtype, device=device)
        shape, moved = f"{plan.layers} layers, no attention", float(dtype.itemsize * num_weights)
        yield KernelCase("step", shape, rows, moved, 2.0 * rows * num_weights, step, [(x,)], math.sqrt(4 * plan.layers))


def _call(name: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return an operation that calls the method `name` of a backend."""
    return lambda backend, *args: getattr(backend, name)(*args)


def matrices(dims: ModelDims) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer of a model."""
    width = dims.heads * dims.head_dim
    return {
        "qkv": (width + 2 * dims.kv_heads * dims.head_dim, dims.hidden),
        "out": (dims.hidden, width),
        "gate_up": (2 * dims.intermediate, dims.hidden),
        "down": (dims.hidden, dims.intermediate),
        "head": (dims.vocab, dims.hidden),
    }


def _num_copies(nbytes: int, device: torch.device) -> int:
    return max(2, min(_MAX_COPIES, _COPIES_BYTES[device.type] // nbytes))


def _inputs(*size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    count = _num_copies(math.prod(size) * dtype.itemsize, device)
    return [_random(*size, dtype=dtype, device=device) for _ in range(count)]


def _random(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*size, dtype=dtype, device=device)


def _matrix(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random weights, scaled so that outputs have about the magnitude of inputs."""
    return _random(outputs, inputs, dtype=dtype, device=device).mul_(inputs**-0.5)


def make_linear(
    shape: GemmShape, dtype: torch.dtype, device: torch.device, max_copies: int = _MAX_COPIES
) -> KernelCase:
    """Return one linear layer as a case, for the launch search."""
    outputs = shape.n * (2 if shape.gated else 1)
    rows = shape.m
    x = _random(rows, shape.k, dtype=dtype, device=device)
    count = min(max_copies, _num_copies(outputs * shape.k * dtype.itemsize, device))
    weights = [_matrix(outputs, shape.k, dtype, device) for _ in range(count)]
    flops = 2.0 * rows * weights[0].numel()

    def operation(backend: Backend, weight: Tensor) -> Tensor:
        return backend.gated_linear(x, weight) if shape.gated else backend.linear(x, weight)

    return KernelCase("", "", rows, float(weights[0].nbytes), flops, operation, [(w,) for w in weights])
