"""What the kernel benchmark measures: operations at the sizes of a model, and what each reads.

An operation has several copies of what it reads, so that a matrix comes from memory, as in a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from yalis.study.kernels.backends import Kit

if TYPE_CHECKING:
    from yalis.kernels.skinny import Problem

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SPREAD_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of all copies together: far more than the caches hold
_MOST_COPIES = 64
_PROMPT_LEN = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True)
class KernelsPlan:
    dims: ModelDims | None = None  # by default, of a model that suits the device
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    layers: int = 8  # of the chain of a whole step's products
    context: int = 1024  # tokens a sequence has in the cache
    prompts: int = 4  # of the attention of prompts
    prompt_len: int | None = None  # by default, as suits the device
    device: str = "auto"
    dtype: str = "auto"
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "context", "prompts", "prompt_len", "repeats"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise YalisError(f"{name} is {given}; give a whole number of at least 1")
        if not self.rows or not all(1 <= rows <= 64 or rows == 128 for rows in self.rows):
            raise YalisError("rows needs numbers from 1 to 64, or 128; give for example --rows 1,16,64")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise YalisError(f"unknown dtype {self.dtype!r}; accepted: auto, {', '.join(DTYPES)}")


@dataclass(frozen=True)
class Trial:
    """One operation at one size."""

    kernel: str
    shape: str
    rows: int
    bytes: float  # that it must move, each once
    flops: float
    operation: Callable[..., Tensor | tuple[Tensor, ...]]  # of a kit, and of what it reads
    copies: list[tuple[Any, ...]]  # of what it reads
    looseness: float = 1.0  # how much further from the reference than one operation it may be

    def run(self, kit: Kit, copy: int = 0) -> tuple[Tensor, ...]:
        found = self.operation(kit, *self.copies[copy])
        return found if isinstance(found, tuple) else (found,)

    def streams(self, device: torch.device) -> bool:
        """Whether all that it reads comes from memory."""
        return self.bytes * len(self.copies) >= _SPREAD_BYTES[device.type] / 2


def list_trials(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """What to measure. Each makes its tensors when its turn comes, and they go with it."""
    for part in (_products, _many, _small, _tokens, _attention, _prompts, _steps):
        yield from part(plan, dims, device, dtype)


def _products(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """Every matrix, and gate and up with the gate behind."""
    for name, (outputs, inputs) in matrices(dims).items():
        count = _copies(outputs * inputs * dtype.itemsize, device)
        weights = [_matrix(outputs, inputs, dtype, device) for _ in range(count)]
        for rows in plan.rows:
            x = _numbers(rows, inputs, dtype=dtype, device=device)
            shape = f"{name} {outputs}x{inputs}"
            out = rows * outputs * dtype.itemsize
            moved = float(weights[0].nbytes + x.nbytes + out)
            flops = 2.0 * rows * outputs * inputs
            copies: list[tuple[Any, ...]] = [(x, w) for w in weights]
            yield Trial("linear", shape, rows, moved, flops, _call("linear"), copies)
            if name == "gate_up":
                yield Trial("linear, gate", shape, rows, moved - out / 2, flops, _call("gated_linear"), copies)


def _many(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """Gate and up of as many rows as a long prefill has, where that is a kernel of ours."""
    if not gpu_limits(device).has_tma or find_spec("triton") is None:
        return
    from yalis.kernels.gated_product import suits

    outputs, inputs = matrices(dims)["gate_up"]
    x, weight = (
        _numbers(FUSED_GATE_MIN_ROWS, inputs, dtype=dtype, device=device),
        _matrix(outputs, inputs, dtype, device),
    )
    if not suits(x, weight):
        return
    moved = float(weight.nbytes + x.nbytes + FUSED_GATE_MIN_ROWS * outputs // 2 * dtype.itemsize)
    flops = 2.0 * FUSED_GATE_MIN_ROWS * outputs * inputs
    shape = f"gate_up {outputs}x{inputs}"
    yield Trial("linear, gate", shape, FUSED_GATE_MIN_ROWS, moved, flops, _call("gated_linear"), [(x, weight)])


def _small(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """What stands between the matrices."""
    heads, kv_heads, dim = dims.heads, dims.kv_heads, dims.head_dim
    weight = _numbers(dims.hidden, dtype=dtype, device=device)
    for rows in plan.rows:
        hidden = _inputs(rows, dims.hidden, dtype=dtype, device=device)
        copies: list[tuple[Any, ...]] = [(x, None, weight) for x in hidden]
        yield Trial("norm", f"{dims.hidden}", rows, 2.0 * hidden[0].nbytes, 0.0, _call("add_rms_norm"), copies)
        copies = [(x, x.flip(0), weight) for x in hidden]
        yield Trial("add, norm", f"{dims.hidden}", rows, 4.0 * hidden[0].nbytes, 0.0, _call("add_rms_norm"), copies)
        wide = _inputs(rows, 2 * dims.intermediate, dtype=dtype, device=device)
        moved = 1.5 * wide[0].nbytes
        yield Trial("gate", f"{dims.intermediate}", rows, moved, 0.0, _call("gated"), [(x,) for x in wide])
        qkv = _inputs(rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        cos, sin = _numbers(2, rows, 1, dim, dtype=dtype, device=device)
        size = resolve_block_size(None, device)
        k, v = _numbers(2, rows, size, kv_heads, dim, dtype=dtype, device=device)
        copies = [(x, cos, sin, k, v, torch.randperm(rows * size, device=device)[:rows]) for x in qkv]
        shape = f"{heads}+2x{kv_heads} heads of {dim}"
        yield Trial("rope, write", shape, rows, 2.0 * qkv[0].nbytes, 0.0, _call("rope_write"), copies)


def _tokens(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """From the last step's tokens to their rows of the table, and from logits to tokens."""
    table = _numbers(dims.vocab, dims.hidden, dtype=dtype, device=device)
    for rows in plan.rows:
        owners = torch.randperm(2 * rows, device=device)[:rows]
        ids = [torch.randint(-dims.vocab, dims.vocab, (rows,), device=device) for _ in range(_MOST_COPIES)]
        last = torch.randint(dims.vocab, (2 * rows,), device=device)
        copies: list[tuple[Any, ...]] = [(x, last, owners) for x in ids]
        yield Trial("feed", f"{2 * rows} slots", rows, 4.0 * ids[0].nbytes, 0.0, _call("feed"), copies)
        copies = [(table, x.remainder(dims.vocab)) for x in ids]
        moved = 2.0 * rows * dims.hidden * dtype.itemsize
        yield Trial("take", f"{dims.vocab}x{dims.hidden}", rows, moved, 0.0, _call("take"), copies)
        logits = _inputs(rows, dims.vocab, dtype=dtype, device=device)
        moved = float(logits[0].nbytes)
        yield Trial("argmax", f"{dims.vocab}", rows, moved, 0.0, _call("argmax"), [(x,) for x in logits])
        copies = [(x, last, owners) for x in logits]
        yield Trial("argmax, settle", f"{dims.vocab}", rows, moved, 0.0, _call("settle"), copies)


def _attention(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """One token of each sequence over its cache; torch's reads a cache that is not paged."""
    for rows in plan.rows:
        yield _attend(rows, plan.context, False, dims, device, dtype)


def _prompts(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """Whole prompts, each token over those before it."""
    length = plan.prompt_len or _PROMPT_LEN[device.type]
    yield _attend(plan.prompts, length, True, dims, device, dtype)


def _attend(
    sequences: int, context: int, prompts: bool, dims: ModelDims, device: torch.device, dtype: torch.dtype
) -> Trial:
    """Sequences with so many tokens in the cache, of which all are new or the last one is."""
    size = resolve_block_size(None, device)
    blocks = -(-context // size)
    context = blocks * size
    new = context if prompts else 1
    rows = sequences * new
    starts = torch.arange(0, rows + 1, new, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    tables = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
    launch = _launch(starts, (new,) * sequences, dims, dtype)
    pairs = sequences * new * (2 * context - new + 1) / 2  # of a query and a key that it sees
    moved = 2 * (sequences * context * dims.kv_heads + rows * dims.heads) * dims.head_dim * dtype.itemsize
    copies: list[tuple[Any, ...]] = []
    for _ in range(_copies(moved, device)):
        q = _numbers(rows, dims.heads, dims.head_dim, dtype=dtype, device=device)
        k, v = _numbers(2, sequences * blocks, size, dims.kv_heads, dims.head_dim, dtype=dtype, device=device)
        copies.append((q, k, v, starts, lengths, tables, launch))
    flops = 4.0 * dims.heads * dims.head_dim * pairs
    kernel, shape = "attention", f"{context} tokens"
    if prompts:
        kernel, shape = "prompt attention", f"{sequences} x {shape}"
    return Trial(kernel, shape, rows, float(moved), flops, _call("attention"), copies)


def _launch(starts: Tensor, lens: tuple[int, ...], dims: ModelDims, dtype: torch.dtype) -> Any:
    """As our kernels need it; none where they do not run."""
    if not (starts.is_cuda or env.triton_interpreted()) or find_spec("triton") is None:
        return None
    from yalis.kernels.paged_attention import PROGRAMS_PER_SM, plan_launch

    programs = PROGRAMS_PER_SM * gpu_limits(starts.device).num_sms
    return plan_launch(starts, lens, dims.heads, dims.kv_heads, dims.head_dim, dtype, programs)


def _steps(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """A decode step without its attention: what the operations cost one after the other."""
    width = dims.heads * dims.head_dim
    shapes = matrices(dims)
    head = _matrix(*shapes.pop("head"), dtype, device)
    layers = [[_matrix(*shape, dtype, device) for shape in shapes.values()] for _ in range(plan.layers)]
    norm = _numbers(dims.hidden, dtype=dtype, device=device)

    def step(kit: Kit, x: Tensor) -> Tensor:
        branch = None
        for qkv, out, gate_up, down in layers:
            normed, x = kit.add_rms_norm(x, branch, norm)
            branch = kit.linear(kit.linear(normed, qkv)[:, :width], out)
            normed, x = kit.add_rms_norm(x, branch, norm)
            branch = kit.linear(kit.gated_linear(normed, gate_up), down)
        return kit.linear(kit.add_rms_norm(x, branch, norm)[0], head)

    numbers = head.numel() + sum(matrix.numel() for layer in layers for matrix in layer)
    for rows in plan.rows:
        x = _numbers(rows, dims.hidden, dtype=dtype, device=device)
        shape, moved = f"{plan.layers} layers, no attention", float(dtype.itemsize * numbers)
        yield Trial("step", shape, rows, moved, 2.0 * rows * numbers, step, [(x,)], math.sqrt(4 * plan.layers))


def _call(name: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The operation of that name, of the kit it is given."""
    return lambda kit, *args: getattr(kit, name)(*args)


def matrices(dims: ModelDims) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's matrices."""
    width = dims.heads * dims.head_dim
    return {
        "qkv": (width + 2 * dims.kv_heads * dims.head_dim, dims.hidden),
        "out": (dims.hidden, width),
        "gate_up": (2 * dims.intermediate, dims.hidden),
        "down": (dims.hidden, dims.intermediate),
        "head": (dims.vocab, dims.hidden),
    }


def _copies(nbytes: int, device: torch.device) -> int:
    return max(2, min(_MOST_COPIES, _SPREAD_BYTES[device.type] // nbytes))


def _inputs(*size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    count = _copies(math.prod(size) * dtype.itemsize, device)
    return [_numbers(*size, dtype=dtype, device=device) for _ in range(count)]


def _numbers(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*size, dtype=dtype, device=device)


def _matrix(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """So that a product is about as large as what it is made of."""
    return _numbers(outputs, inputs, dtype=dtype, device=device).mul_(inputs**-0.5)


def make_product(problem: Problem, dtype: torch.dtype, device: torch.device, most: int = _MOST_COPIES) -> Trial:
    """A product alone, as the search for launches tries it."""
    outputs = problem.outputs * (2 if problem.gated else 1)
    rows = problem.rows
    x = _numbers(rows, problem.inputs, dtype=dtype, device=device)
    count = min(most, _copies(outputs * problem.inputs * dtype.itemsize, device))
    weights = [_matrix(outputs, problem.inputs, dtype, device) for _ in range(count)]
    flops = 2.0 * rows * weights[0].numel()

    def operation(kit: Kit, weight: Tensor) -> Tensor:
        return kit.gated_linear(x, weight) if problem.gated else kit.linear(x, weight)

    return Trial("", "", rows, float(weights[0].nbytes), flops, operation, [(w,) for w in weights])
