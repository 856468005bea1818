"""The kernel benchmark: each operation of a decode step, ours beside torch's, and beside the device's floor.

An operation is checked against its plain reference first, on outputs filled with NaN. It is then timed over several
copies of what it reads, so that a matrix comes from memory, as in a decode step. On a GPU the calls are one captured
graph, so the host's part does not count; on a CPU ours are the native kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from yalis import results
from yalis.engine.device import resolve_device
from yalis.errors import YalisError
from yalis.kernels import ops, reference
from yalis.perfmodel.floors import ModelDims, decode_floor_s
from yalis.study import bandwidth

if TYPE_CHECKING:
    from yalis.kernels.skinny import Problem, Shape

LLAMA_8B = ModelDims(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False
)
SMOLLM2_135M = ModelDims(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True
)
DIMS = {"cuda": LLAMA_8B, "cpu": SMOLLM2_135M}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Relative to the reference's norm, for a single operation.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_SPREAD_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of all copies together: far more than the caches hold
_MOST_COPIES = 64
_ENOUGH_S = 0.01  # of calls, for one reading of the clock
_BLOCK = 16  # tokens
_EPS = 1e-5
_ACTIVATION = "silu"
_SCALE = 0.1  # of attention scores


@dataclass(frozen=True)
class KernelsPlan:
    dims: ModelDims | None = None  # by default, of a model that suits the device
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    layers: int = 8  # of the chain of a whole step's products
    context: int = 1024  # tokens a sequence has in the cache
    device: str = "auto"
    dtype: str = "auto"
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("layers", 1), ("context", 1), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if not self.rows or not all(1 <= rows <= 64 for rows in self.rows):
            raise YalisError("rows needs numbers from 1 to 64; give for example --rows 1,16,64")
        if self.dtype != "auto" and self.dtype not in _DTYPES:
            raise YalisError(f"unknown dtype {self.dtype!r}; accepted: auto, {', '.join(_DTYPES)}")


class Kit(Protocol):
    """The operations of a decode step, as one implementation has them. kernels/reference.py says what they compute."""

    def linear(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor: ...

    def gated(self, gate_up: Tensor) -> Tensor: ...

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor: ...

    def argmax(self, logits: Tensor) -> Tensor: ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor: ...


class Torch:
    """Plain torch, operation by operation."""

    def linear(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> Tensor:
        if norm is not None:
            x = F.rms_norm(x, norm[0].shape, *norm)
        y = F.linear(x, weight)
        return y if residual is None else y + residual

    def gated_linear(self, x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
        return self.gated(self.linear(x, weight, norm=norm))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x + residual, weight.shape, weight, _EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        kv_heads = k.shape[2]
        turned = self.rotate(qkv[:, :-kv_heads], cos, sin)
        k.flatten(0, 1).index_copy_(0, slots, turned[:, -kv_heads:])
        v.flatten(0, 1).index_copy_(0, slots, qkv[:, -kv_heads:])
        return turned[:, :-kv_heads]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(x * cos, torch.roll(x, cos.shape[-1] // 2, -1), sin)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        dense = (len(q), -1, *k.shape[2:])
        k, v = k.view(dense).transpose(1, 2), v.view(dense).transpose(1, 2)
        return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=_SCALE, enable_gqa=True)[:, :, 0]


class Native(Torch):
    """What layers call: on a CPU in float32 the native kernels."""

    def linear(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> Tensor:
        if norm is not None:
            x = ops.rms_norm(x, *norm)
        y = ops.linear(x, weight)
        return y if residual is None else ops.add(y, residual)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(ops.add(x, residual), weight, _EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        return ops.gated(gate_up, _ACTIVATION)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rotate(x, cos, sin)


class Kernels:
    """Our Triton kernels, one launch each; `pdl`: each starts while the one before it ends; `shape`: of products."""

    def __init__(self, pdl: bool = False, shape: Any = None) -> None:
        from yalis.kernels import fused, paged_attention, skinny

        self._fused: Any = fused
        self._skinny: Any = skinny
        self._attention: Any = paged_attention.paged_attention
        self._pdl, self._shape = pdl, shape

    def linear(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> Tensor:
        y: Tensor = self._skinny.linear(self._normed(x, norm), weight, None, residual, self._pdl, self._shape)
        return y

    def gated_linear(self, x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
        y: Tensor = self._skinny.gated_linear(self._normed(x, norm), weight, _ACTIVATION, None, self._pdl, self._shape)
        return y

    def _normed(self, x: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
        return x if norm is None else self._fused.add_rms_norm(x, None, *norm, self._pdl)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self._fused.add_rms_norm(x, residual, weight, _EPS, self._pdl)[0]
        return y

    def gated(self, gate_up: Tensor) -> Tensor:
        y: Tensor = self._fused.gated(gate_up, _ACTIVATION, self._pdl)
        return y

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        q: Tensor = self._fused.rope_write(qkv, cos, sin, k, v, slots, pdl=self._pdl)
        return q

    def argmax(self, logits: Tensor) -> Tensor:
        places: Tensor = self._fused.argmax(logits, self._pdl)
        return places

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        out: Tensor = self._attention(q, k, v, starts, lengths, tables, launch, _SCALE)
        return out


class Reference:
    """What all of them should give."""

    def linear(
        self, x: Tensor, weight: Tensor, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
    ) -> Tensor:
        return reference.linear(x, weight, None, residual, norm)

    def gated_linear(self, x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
        return reference.gated_linear(x, weight, _ACTIVATION, None, norm)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return reference.add_rms_norm(x, residual, weight, _EPS)[0]

    def gated(self, gate_up: Tensor) -> Tensor:
        return reference.gated(gate_up, _ACTIVATION)

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        return reference.rope_write(qkv, cos, sin, k, v, slots)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        wide = (q.double(), k.double(), v.double())  # the reference computes in the dtype it is given
        return reference.paged_attention(*wide, starts, lengths, tables, _SCALE).to(q.dtype)


@dataclass(frozen=True)
class Trial:
    """One operation at one size."""

    kernel: str
    shape: str
    rows: int
    bytes: float  # that it must move, each once
    flops: float
    operation: Callable[..., Tensor]  # of a kit, and of what it reads
    copies: list[tuple[Any, ...]]  # of what it reads
    looseness: float = 1.0  # how much further from the reference than one operation it may be

    def run(self, kit: Kit, copy: int = 0) -> Tensor:
        return self.operation(kit, *self.copies[copy])

    def streams(self, device: torch.device) -> bool:
        """Whether all that it reads comes from memory."""
        return self.bytes * len(self.copies) >= _SPREAD_BYTES[device.type] / 2


def measure(plan: KernelsPlan, command: str, report: Callable[[str], None] = lambda text: None) -> results.Result:
    """Run the whole benchmark; `report` hears what it is doing."""
    device = resolve_device(plan.device)
    dtype = _DTYPES[plan.dtype] if plan.dtype != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32
    dims = plan.dims or DIMS[device.type]
    torch.manual_seed(plan.seed)
    report("measuring the device")
    rates = bandwidth.measure(device, dtype)
    rows, work = [], []
    with torch.inference_mode():
        for trial in _trials(plan, dims, device, dtype):
            for suffix, kit in our_kits(device):
                if suffix and trial.kernel != "step":
                    continue  # a launch that depends on the one before shows in a chain
                report(f"{trial.kernel}{suffix} {trial.shape}, {trial.rows} rows")
                timed = time_both(trial, kit, device, dtype, plan.repeats)
                if trial.streams(device) and not isinstance(timed, str):  # no kernel reads faster than the device can
                    read = trial.bytes / min(timed.ours, timed.theirs)
                    rates = rates.best(bandwidth.DeviceRates(read, 0.0))
                rows.append(_row(trial, suffix, timed))
                work.append((trial.bytes, trial.flops))
    for row, (moved, flops) in zip(rows, work, strict=True):
        row["floor_us"] = 1e6 * decode_floor_s(moved, flops, rates.read_bytes_per_s, rates.matmul_flops_per_s)
        if row["us"] is not None:
            row["share_of_floor"] = row["floor_us"] / row["us"]
    given = {"dims": asdict(dims), "dtype": str(dtype).removeprefix("torch."), **asdict(rates)}
    return results.new("kernels", {**asdict(plan), **given}, rows, command, [bandwidth.describe(device)])


def our_kits(device: torch.device) -> list[tuple[str, Kit]]:
    """Ours on this device, each with what its name adds to an operation's."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise YalisError("triton is not installed, and our kernels for a GPU need it; type: pip install triton")
        return [("", Kernels()), (", dependent launches", Kernels(pdl=True))]
    return [("", Native())]


@dataclass(frozen=True)
class Timed:
    """Seconds of an operation, by ours and by torch's, and how far ours was from the reference."""

    ours: float
    theirs: float
    error: float


def time_both(trial: Trial, kit: Kit, device: torch.device, dtype: torch.dtype, repeats: int) -> Timed | str:
    """What a row tells; or what was wrong."""
    error = find_error(trial, kit)
    if not error <= _TOLERANCE[dtype] * trial.looseness:
        return f"wrong: off by {error:.1e}"
    ours, theirs = (seconds(partial(trial.run, one), len(trial.copies), device, repeats) for one in (kit, Torch()))
    return Timed(ours, theirs, error)


def _row(trial: Trial, suffix: str, timed: Timed | str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(results.columns("kernels"))
    row.update(kernel=trial.kernel + suffix, shape=trial.shape, rows=trial.rows, status="ok")
    if isinstance(timed, str):
        row["status"] = timed
        return row
    row.update(
        error=timed.error,
        us=1e6 * timed.ours,
        torch_us=1e6 * timed.theirs,
        ratio=timed.theirs / timed.ours,
        gb_per_s=trial.bytes / timed.ours / 1e9,
        gflop_per_s=trial.flops / timed.ours / 1e9,
    )
    return row


def find_error(trial: Trial, kit: Kit, expected: Tensor | None = None) -> float:
    """|found - expected| / |expected|, on a new output filled with NaN; of places, the share that differs."""
    if expected is None:
        expected = trial.run(Reference())
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills what it allocates
    try:
        found = trial.run(kit)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def seconds(run: Callable[[int], object], copies: int, device: torch.device, repeats: int) -> float:
    """Of one call, over calls that take turns with the copies."""

    def turns(calls: int) -> None:
        for i in range(calls):
            run(i % copies)

    turns(copies)  # kernels are compiled
    one_turn = _clock(partial(turns, copies), device)
    calls = copies * max(1, math.ceil(_ENOUGH_S / one_turn))
    work: Callable[[], None] = partial(turns, calls)
    if device.type == "cuda":
        work = _captured(work)
    return median(_clock(work, device) for _ in range(repeats)) / calls


def _clock(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """The launches of `work` as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _trials(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """What to measure. Each makes its tensors when its turn comes, and they go with it."""
    for part in (_products, _small, _attention, _steps):
        yield from part(plan, dims, device, dtype)


def _products(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """Every matrix, in a product alone and with what stands around it in the model."""
    for name, (outputs, inputs) in matrices(dims).items():
        count = _copies(outputs * inputs * dtype.itemsize, device)
        weights = [_matrix(outputs, inputs, dtype, device) for _ in range(count)]
        norm = (_numbers(inputs, dtype=dtype, device=device), _EPS)
        for rows in plan.rows:
            x = _numbers(rows, inputs, dtype=dtype, device=device)
            residual = _numbers(rows, outputs, dtype=dtype, device=device)
            shape = f"{name} {outputs}x{inputs}"
            moved = float(weights[0].nbytes + x.nbytes + residual.nbytes)
            flops = 2.0 * rows * outputs * inputs
            yield Trial("linear", shape, rows, moved, flops, _call("linear"), [(x, w) for w in weights])
            if name == "gate_up":
                moved -= residual.nbytes / 2
                around, operation = "norm, linear, gate", _call("gated_linear")
                copies: list[tuple[Any, ...]] = [(x, w, norm) for w in weights]
            elif name in ("qkv", "head"):
                around, operation = "norm, linear", _call("linear")
                copies = [(x, w, None, norm) for w in weights]
            else:
                moved += residual.nbytes
                around, operation = "linear, add", _call("linear")
                copies = [(x, w, residual) for w in weights]
            yield Trial(around, shape, rows, moved, flops, operation, copies)


def _small(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """What stands between the matrices."""
    heads, kv_heads, dim = dims.heads, dims.kv_heads, dims.head_dim
    weight = _numbers(dims.hidden, dtype=dtype, device=device)
    for rows in plan.rows:
        hidden = _inputs(rows, dims.hidden, dtype=dtype, device=device)
        copies: list[tuple[Any, ...]] = [(x, x.flip(0), weight) for x in hidden]
        moved = 4.0 * hidden[0].nbytes
        yield Trial("add, norm", f"{dims.hidden}", rows, moved, 0.0, _call("add_rms_norm"), copies)
        wide = _inputs(rows, 2 * dims.intermediate, dtype=dtype, device=device)
        moved = 1.5 * wide[0].nbytes
        yield Trial("gate", f"{dims.intermediate}", rows, moved, 0.0, _call("gated"), [(x,) for x in wide])
        logits = _inputs(rows, dims.vocab, dtype=dtype, device=device)
        moved = float(logits[0].nbytes)
        yield Trial("argmax", f"{dims.vocab}", rows, moved, 0.0, _call("argmax"), [(x,) for x in logits])
        qkv = _inputs(rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        cos, sin = _numbers(2, rows, 1, dim, dtype=dtype, device=device)
        k, v = _numbers(2, rows, _BLOCK, kv_heads, dim, dtype=dtype, device=device)
        copies = [(x, cos, sin, k, v, torch.randperm(rows * _BLOCK, device=device)[:rows]) for x in qkv]
        shape = f"{heads}+2x{kv_heads} heads of {dim}"
        yield Trial("rope, write", shape, rows, 2.0 * qkv[0].nbytes, 0.0, _call("rope_write"), copies)


def _attention(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """One token of each sequence over its cache; torch's reads a cache that is not paged."""
    if device.type != "cuda":
        return
    from yalis.kernels.paged_attention import plan_launch

    blocks = -(-plan.context // _BLOCK)
    context = blocks * _BLOCK
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for rows in plan.rows:
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        tables = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        launch = plan_launch(starts, (1,) * rows, dims.heads, dims.kv_heads, dims.head_dim, dtype, 3 * processors)
        moved = 2 * rows * context * dims.kv_heads * dims.head_dim * dtype.itemsize
        copies: list[tuple[Any, ...]] = []
        for _ in range(_copies(moved, device)):
            q = _numbers(rows, dims.heads, dims.head_dim, dtype=dtype, device=device)
            k, v = _numbers(2, rows * blocks, _BLOCK, dims.kv_heads, dims.head_dim, dtype=dtype, device=device)
            copies.append((q, k, v, starts, lengths, tables, launch))
        flops = 4.0 * rows * dims.heads * dims.head_dim * context
        yield Trial("attention", f"{context} tokens", rows, float(moved), flops, _call("attention"), copies)


def _steps(plan: KernelsPlan, dims: ModelDims, device: torch.device, dtype: torch.dtype) -> Iterator[Trial]:
    """A decode step without its attention: what the operations cost one after the other."""
    width = dims.heads * dims.head_dim
    shapes = matrices(dims)
    head = _matrix(*shapes.pop("head"), dtype, device)
    layers = [[_matrix(*shape, dtype, device) for shape in shapes.values()] for _ in range(plan.layers)]
    norm = (_numbers(dims.hidden, dtype=dtype, device=device), _EPS)

    def step(kit: Kit, x: Tensor) -> Tensor:
        for qkv, out, gate_up, down in layers:
            x = kit.linear(kit.linear(x, qkv, None, norm)[:, :width], out, x)
            x = kit.linear(kit.gated_linear(x, gate_up, norm), down, x)
        return kit.linear(x, head, None, norm)

    numbers = head.numel() + sum(matrix.numel() for layer in layers for matrix in layer)
    for rows in plan.rows:
        x = _numbers(rows, dims.hidden, dtype=dtype, device=device)
        shape, moved = f"{plan.layers} layers, no attention", float(dtype.itemsize * numbers)
        yield Trial("step", shape, rows, moved, 2.0 * rows * numbers, step, [(x,)], math.sqrt(4 * plan.layers))


def _call(name: str) -> Callable[..., Tensor]:
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


def tune(
    problems: Iterable[Problem], dtype: torch.dtype, report: Callable[[str], None] = lambda text: None
) -> dict[Problem, Shape]:
    """The fastest launch of each product on this GPU, of those whose result is right: what skinny.TUNED holds."""
    from yalis.kernels.skinny import candidates

    found: dict[Problem, Shape] = {}
    device = torch.device("cuda")
    with torch.inference_mode():
        for problem in problems:
            trial = _product(problem, dtype, device)
            expected = trial.run(Reference())
            times: list[tuple[float, Shape]] = []
            for shape in candidates(problem):
                kit = Kernels(pdl=True, shape=shape)  # as a decode step launches them
                if fits(trial, kit) and find_error(trial, kit, expected) <= _TOLERANCE[dtype]:
                    times.append((seconds(partial(trial.run, kit), len(trial.copies), device, 5), shape))
            if times:
                best, found[problem] = min(times)
                report(f"{problem}: {found[problem]}, {1e6 * best:.2f} us, {trial.bytes / best / 1e12:.2f} TB/s")
    return found


def fits(trial: Trial, kit: Kit) -> bool:
    """Run it once: whether the device has the registers and the shared memory that it asks for."""
    from triton.runtime.errors import OutOfResources

    try:
        trial.run(kit)
    except OutOfResources:
        return False
    return True


def build(problem: Problem, shape: Shape, dtype: torch.dtype) -> None:
    """Leave a launch's compiled kernel in Triton's cache: for many processes, before a search."""
    small = problem._replace(outputs=min(problem.outputs, 1024))
    with torch.inference_mode():
        fits(_product(small, dtype, torch.device("cuda"), most=1), Kernels(pdl=True, shape=shape))


def _product(problem: Problem, dtype: torch.dtype, device: torch.device, most: int = _MOST_COPIES) -> Trial:
    outputs = problem.outputs * (2 if problem.gated else 1)
    rows = problem.rows
    x = _numbers(rows, problem.inputs, dtype=dtype, device=device)
    count = min(most, _copies(outputs * problem.inputs * dtype.itemsize, device))
    weights = [_matrix(outputs, problem.inputs, dtype, device) for _ in range(count)]
    flops = 2.0 * rows * weights[0].numel()

    def operation(kit: Kit, weight: Tensor) -> Tensor:
        return kit.gated_linear(x, weight) if problem.gated else kit.linear(x, weight)

    return Trial("", "", rows, float(weights[0].nbytes), flops, operation, [(w,) for w in weights])
