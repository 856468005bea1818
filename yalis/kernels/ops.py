"""The operations of layers between collectives. Each op selects an implementation for its tensors.

- CPU in float32: native code (kernels/native.c), for products with few rows in bfloat16 too.
- GPU: Triton kernels. GEMMs with few rows are fused with their epilogue (kernels/skinny.py). GEMMs with many rows use
  cuBLAS, and kernels/fused.py has the operations around them. From FUSED_GATE_MIN_ROWS rows on, the gate and up GEMM is
  fused with the gate (kernels/gated_product.py). Experts have grouped products (kernels/experts.py).
- Everything else: plain torch, operation by operation. All implementations round where these operations round.

No op waits for the device, so CUDA graphs can capture them. They must run once before a capture, which compiles kernels
and allocates the counters of split-K GEMMs. All launches share these counters, so the steps of a device must run in one
stream. torch.compile does not trace into the ops (kernels/opaque.py).

Shapes: T tokens · H query heads · K key/value heads · D head_dim · N KV blocks · B block_size.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from yalis import env
from yalis.kernels import native, routed
from yalis.kernels.opaque import opaque
from yalis.kernels.pdl import pdl_enabled
from yalis.moe import MoESpec

# With more rows, MKL's blocked GEMM is faster than native.c, which streams the matrix past the rows.
NATIVE_MAX_ROWS = 48
# In bfloat16 from fewer rows on, where the CPU multiplies pairs of bfloat16.
NATIVE_MAX_BF16_ROWS = 8
# From here on a GPU is at its power limit, and a separate gate kernel costs more than cuBLAS gains over our GEMM.
FUSED_GATE_MIN_ROWS = 8192
_GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # torch's name of the approximation


@opaque(
    "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    lambda x, weight, *_: (x.shape[0], weight.shape[0]),
)
def linear(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None = None,  # [out]
) -> Tensor:
    """Return x @ weight.T + bias."""
    if _is_skinny(x, weight):
        from yalis.kernels import skinny

        return skinny.linear(x, weight, bias, pdl_enabled())
    return _dense_linear(x, weight, bias)


@opaque(
    "(Tensor x, Tensor weight, str activation, Tensor? bias=None) -> Tensor",
    lambda x, weight, *_: (x.shape[0], weight.shape[0] // 2),
)
def gated_linear(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [2 * width, in], rows of gate, then rows of up
    activation: str,
    bias: Tensor | None = None,  # [2 * width]
) -> Tensor:
    """Return activation(gate) * up, where gate and up are the products of x with their half of weight: [T, width]."""
    if _is_skinny(x, weight, gated=True):
        from yalis.kernels import skinny

        return skinny.gated_linear(x, weight, activation, bias, pdl_enabled())
    if x.shape[0] >= FUSED_GATE_MIN_ROWS and _triton(x):
        from yalis.kernels import gated_product

        if gated_product.supports(x, weight):
            return gated_product.gated_product(x, weight, activation, bias)
    return gated(linear(x, weight, bias), activation)


def route(
    logits: Tensor,  # [N, experts]
    moe: MoESpec,
    correction: Tensor | None = None,  # [experts] fp32
) -> tuple[Tensor, Tensor]:
    """Return the weights [N, top_k] in fp32 and the experts [N, top_k] of each row; see routed.route."""
    routing = (moe.top_k, moe.scoring, moe.renormalize, moe.groups, moe.top_groups, moe.scale)
    return _route(logits, correction, *routing)


@opaque(
    "(Tensor logits, Tensor? correction, int top_k, str scoring, bool renormalize, int groups, int top_groups, "
    "float scale) -> (Tensor, Tensor)",
    lambda logits, _, top_k, *__: (logits.shape[0], top_k),
    lambda logits, _, top_k, *__: (logits.shape[0], top_k),
    dtypes=(torch.float32, torch.int64),
)
def _route(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    routing = (top_k, scoring, renormalize, groups, top_groups, scale)
    if _triton_experts(logits) and groups == top_groups:
        from yalis.kernels import experts as kernels

        return kernels.route(logits, correction, top_k, scoring, renormalize, scale, pdl_enabled())
    lib = _native(logits)
    if lib is None or logits.stride(1) != 1:
        return routed.choose_experts(logits, correction, *routing)
    rows, count = logits.shape
    weights, experts = logits.new_empty((rows, top_k)), logits.new_empty((rows, top_k), dtype=torch.int64)
    lib.route(
        weights.data_ptr(), experts.data_ptr(), logits.data_ptr(), logits.stride(0),
        None if correction is None else correction.data_ptr(), rows, count, top_k,
        routed.SCORINGS.index(scoring), renormalize, groups, top_groups, scale,
    )  # fmt: skip
    return weights, experts


def group_experts(x: Tensor, experts: Tensor, count: int) -> Tensor | None:
    """Return a plan for expert_linear() of x [N, in] with these experts [P] of `count`, to be used by several calls.

    None where each call groups the pairs itself.
    """
    if torch.compiler.is_compiling() or not _triton_experts(x):
        return None
    from yalis.kernels import experts as kernels
    from yalis.kernels.experts_config import uses_gemv

    return None if uses_gemv(experts.shape[0], count) else kernels.group(experts, count, pdl_enabled())


@opaque(
    "(Tensor x, Tensor weight, Tensor experts, Tensor? bias=None, str activation='', Tensor? plan=None) -> Tensor",
    lambda x, weight, experts, bias=None, activation="", *_: (
        experts.shape[0], weight.shape[1] // (2 if activation else 1),
    ),
)  # fmt: skip
def expert_linear(
    x: Tensor,  # [N, in]
    weight: Tensor,  # [experts, out, in]
    experts: Tensor,  # [P] int64, P a multiple of N; -1: the pair is left out
    bias: Tensor | None = None,  # [experts, out]
    activation: str = "",
    plan: Tensor | None = None,  # of group_experts()
) -> Tensor:
    """Return [P, out]: pair p is row p // (P / N) of x times the matrix of expert experts[p]. Pairs left out are zeros.

    With an activation, out is rows of gate and then rows of up, and the result is activation(gate) * up [P, out / 2].
    On a CPU only the matrices of chosen experts are read. From NATIVE_MAX_ROWS rows for each expert on, the host groups
    the pairs, and MKL multiplies them.
    """
    if _triton_experts(x) and weight.dtype == x.dtype:
        from yalis.kernels import experts as kernels

        return kernels.expert_linear(x, weight, experts, plan, bias, activation, pdl_enabled())
    if activation:
        return gated(expert_linear(x, weight, experts, bias), activation)
    if not x.is_cpu:
        return routed.blocked_linear(x, weight, experts, bias)
    lib, pairs, (count, out, depth) = _native_products(x, weight), experts.shape[0], weight.shape
    if (
        lib is None or not 0 < pairs <= _native_max_rows(x) * count
        or x.stride(1) != 1 or not (weight.is_contiguous() and experts.is_contiguous())
    ):  # fmt: skip
        return routed.grouped_linear(x, weight, experts, _dense_linear, bias)
    y, gathered = x.new_empty((pairs, out)), x.new_empty((pairs, depth), dtype=torch.float32)
    groups = experts.new_empty(pairs + 2 * count + 1)
    lib.expert_linear(
        y.data_ptr(), gathered.data_ptr(), groups.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), experts.data_ptr(),
        pairs, pairs // x.shape[0], count, out, depth, x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return y


@opaque(
    "(Tensor y, Tensor weights, Tensor? shared=None, Tensor? gate=None) -> Tensor",
    lambda y, weights, *_: (weights.shape[0], y.shape[1]),
)
def combine_experts(
    y: Tensor,  # [N * top_k, C]
    weights: Tensor,  # [N, top_k] fp32
    shared: Tensor | None = None,  # [N, C], the output of the shared expert
    gate: Tensor | None = None,  # [N, 1]
) -> Tensor:
    """Return the weighted sum [N, C] of each row's experts, plus `shared` times the sigmoid of `gate`."""
    if _triton_experts(y):
        from yalis.kernels import experts as kernels

        return kernels.combine(y, weights, shared, gate, pdl_enabled())
    lib = _native(y)
    if lib is None or not y.is_contiguous() or (shared is not None and not shared.is_contiguous()):
        return routed.combine(y, weights, shared, gate)
    (rows, top_k), cols = weights.shape, y.shape[1]
    out = y.new_empty((rows, cols))
    lib.combine(
        out.data_ptr(), y.data_ptr(), weights.data_ptr(), None if shared is None else shared.data_ptr(),
        None if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
        rows, top_k, cols, torch.get_num_threads(),
    )  # fmt: skip
    return out


# As in rope_write, the op does not declare that it mutates `counts`, which nothing else in a step reads.
@opaque("(Tensor experts, Tensor? kv_slots, Tensor counts, int first, int held) -> Tensor", lambda x, *_: (x.numel(),))
def own_experts(
    experts: Tensor,  # [T, top_k] int64
    kv_slots: Tensor | None,  # [T] int64, negative for padding
    counts: Tensor,  # [experts + 1] int64
    first: int,
    held: int,
) -> Tensor:
    """Return experts - first, flattened, for the `held` experts from `first` on; -1 for others and for padding.

    Adds to `counts` how often each expert was chosen, with all choices of padding in the last element.
    """
    if experts.is_cuda and _has_triton():
        from yalis.kernels import expert_choices

        return expert_choices.own_experts(experts, kv_slots, counts, first, held)
    return routed.own_experts(experts, kv_slots, counts, first, held)


# The op does not declare that it mutates the caches: torch.compile would copy them, as keys and values share storage.
# Only attention reads them, and it depends on the queries that this op returns, so the order is kept.
@opaque(
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor k_cache, Tensor v_cache, Tensor kv_slots, "
    "Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, bool norm_last=False) -> Tensor",
    lambda qkv, cos, sin, k_cache, *_: (qkv.shape[0], qkv.shape[1] - 2 * k_cache.shape[2], qkv.shape[2]),
)
def rope_write(
    qkv: Tensor,  # [T, H + 2K, D]
    cos: Tensor,  # [T, 1, dim], the first dim elements of a head are rotated
    sin: Tensor,  # [T, 1, dim], negated in the first half
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    kv_slots: Tensor,  # [T], distinct
    q_norm: Tensor | None = None,  # [D], given together with k_norm
    k_norm: Tensor | None = None,  # [D]
    eps: float = 0.0,
    norm_last: bool = False,
) -> Tensor:
    """Apply the optional norm and RoPE to queries and keys, and write keys and values to the cache.

    The norm comes first, or with `norm_last` after RoPE. Returns the queries [T, H, D]. The native and Triton kernels
    skip tokens whose slot is negative. Plain torch does not support negative slots.
    """
    if _triton(qkv) and k_cache.stride(3) == v_cache.stride(3) == 1:
        from yalis.kernels import fused

        pdl = pdl_enabled()
        return fused.rope_write(qkv, cos, sin, k_cache, v_cache, kv_slots, q_norm, k_norm, eps, pdl, norm_last)
    kv_heads = k_cache.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    if q_norm is not None and k_norm is not None:
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if norm_last:
            q, k = rms_norm(rotate(q, cos, sin), q_norm, eps), rms_norm(rotate(k, cos, sin), k_norm, eps)
        else:
            q, k = rotate(rms_norm(q, q_norm, eps), cos, sin), rotate(rms_norm(k, k_norm, eps), cos, sin)
    else:
        q, k = rotate(qkv[:, : heads + kv_heads], cos, sin).split((heads, kv_heads), dim=1)
        v = qkv[:, heads + kv_heads :]
    write(k, v, k_cache, v_cache, kv_slots)
    return q


@opaque("(Tensor x, Tensor weight, float eps) -> Tensor", lambda x, *_: x.shape)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension of x [T, C] or [T, heads, C], computed in weight's dtype."""
    if x.dim() == 2 and _triton(x):
        from yalis.kernels import fused

        return fused.add_rms_norm(x, None, weight, eps, pdl_enabled())[0]
    lib = _native(x)
    if lib is None or weight.dtype != x.dtype or not _is_packed(x):
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    cols = weight.shape[0]
    inner = x.shape[1] if x.dim() == 3 else 1
    lib.rms_norm(
        y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), eps,
        x.shape[0], inner, cols, torch.get_num_threads(),
    )  # fmt: skip
    return y


@opaque("(Tensor qkv, Tensor weight, int kv_heads, float eps) -> Tensor", lambda qkv, *_: qkv.shape)
def joint_head_norm(
    qkv: Tensor,  # [T, H + 2K, D]
    weight: Tensor,  # [(H + K) * D]
    kv_heads: int,
    eps: float,
) -> Tensor:
    """Return qkv with RMSNorm over all query heads of a token together, and over all its key heads."""
    tokens, all_heads, dim = qkv.shape
    keys = kv_heads * dim
    queries, cols = weight.shape[0] - keys, all_heads * dim
    lib = _native(qkv)
    if lib is None or not _is_packed(qkv):
        flat, sizes = qkv.flatten(1), (queries, keys)
        q, k, v = flat.split((*sizes, keys), dim=1)
        normed = (part.float() * torch.rsqrt(part.float().pow(2).mean(-1, keepdim=True) + eps) for part in (q, k))
        scaled = (part.to(qkv.dtype) * w for part, w in zip(normed, weight.split(sizes), strict=True))
        return torch.cat((*scaled, v), dim=1).view(qkv.shape)
    y = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    lib.joint_norm(
        y.data_ptr(), qkv.data_ptr(), qkv.stride(0), weight.data_ptr(), eps,
        tokens, queries, keys, cols, torch.get_num_threads(),
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (the norm of x + residual, x + residual), [T, C] each; without a residual, (the norm of x, x)."""
    return (rms_norm(x, weight, eps), x) if residual is None else _add_rms_norm(x, residual, weight, eps)


@opaque(
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: x.shape,
    lambda x, *_: x.shape,
)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if _triton(x):
        from yalis.kernels import fused

        return fused.add_rms_norm(x, residual, weight, eps, pdl_enabled())
    x = add(x, residual)
    return rms_norm(x, weight, eps), x


# A GPU runs torch's kernel: ours norm by the root mean square.
@opaque("(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor", lambda x, *_: x.shape)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean(x)) / std(x) * weight + bias over the last dimension of x [T, C], computed in weight's dtype."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of table [N, C] with the indices `rows` [T] int64."""
    if torch.compiler.is_compiling():
        return table.index_select(0, rows)
    if _triton(table) and rows.is_contiguous():
        from yalis.kernels import fused

        return fused.gather_rows(table, rows, pdl_enabled())
    lib = _native(table)
    if lib is None or table.stride(1) != 1 or not rows.is_contiguous():
        return table.index_select(0, rows)
    count, width = rows.shape[0], table.shape[1]
    y = table.new_empty((count, width))
    lib.gather_rows(y.data_ptr(), table.data_ptr(), table.stride(0), rows.data_ptr(), count, width)
    return y


def use_last_tokens(token_ids: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
    """Return token_ids [T] with each negative id replaced by the token last sampled for its request slot.

    last_tokens [max_num_seqs + 1] holds one token for each request slot, request_slots [T] the slot of each id.
    """
    if token_ids.is_cuda and _has_triton():
        from yalis.kernels import token_feedback

        return token_feedback.use_last_tokens(token_ids, last_tokens, request_slots, pdl_enabled())
    return torch.where(token_ids < 0, last_tokens.index_select(0, request_slots), token_ids)


# An op of its own, so that torch.compile does not fuse it with what follows and skip the rounding of the sum.
@opaque("(Tensor x, Tensor y) -> Tensor", lambda x, *_: x.shape)
def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y. Both have the same shape."""
    lib = _native(x)
    if lib is None or x.shape[0] > NATIVE_MAX_ROWS or not (x.is_contiguous() and y.is_contiguous()):
        return x + y
    out = torch.empty_like(x)
    lib.add(out.data_ptr(), x.data_ptr(), y.data_ptr(), x.numel())
    return out


@opaque("(Tensor gate_up, str activation) -> Tensor", lambda gate_up, *_: (gate_up.shape[0], gate_up.shape[1] // 2))
def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up for gate_up [T, 2 * width], gate in the first half; silu, gelu or gelu_tanh."""
    if _triton(gate_up):
        from yalis.kernels import fused

        return fused.gated(gate_up, activation, pdl_enabled())
    lib = _native(gate_up)
    if lib is None or activation != "silu" or gate_up.stride(1) != 1:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate=_GELU[activation]).mul_(up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, width))
    lib.silu_gate(y.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), rows, width, torch.get_num_threads())
    return y


@opaque("(Tensor x, str activation) -> Tensor", lambda x, *_: x.shape)
def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of x, for an MLP without a gate; silu, gelu, gelu_tanh or relu2."""
    if activation == "relu2":
        return F.relu(x).square_()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate=_GELU[activation])


@opaque(
    "(Tensor gate_up, float alpha, float limit) -> Tensor",
    lambda gate_up, *_: (gate_up.shape[0], gate_up.shape[1] // 2),
)
def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1) for gate_up [T, 2 * width], gate in the first half (gpt-oss).

    gate is at most `limit`, up is from -limit to limit.
    """
    lib = _native(gate_up)
    if lib is not None and gate_up.stride(1) == 1:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y, threads = gate_up.new_empty((rows, width)), torch.get_num_threads()
        lib.clamped_gate(y.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), rows, width, alpha, limit, threads)
        return y
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first dim elements of each head of x [T, heads, D], pairing element i with i + dim/2.

    cos and sin are [T, 1, dim]; the sines of the first half are negated.
    """
    dim = cos.shape[-1]
    lib = _native(x)
    if lib is None or not _is_packed(x) or cos.dtype != x.dtype or cos.stride() != sin.stride() or cos.stride(2) != 1:
        rotated = x if dim == x.shape[-1] else x[..., :dim]
        half = torch.roll(rotated, dim // 2, -1)
        out = torch.addcmul(rotated * cos, half, sin)
        return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    lib.rotate(
        y.data_ptr(), x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        *x.shape, dim, torch.get_num_threads(),
    )  # fmt: skip
    return y


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots: Tensor) -> None:
    """Write keys and values, [T, K, D] each, to their KV slots [T]."""
    lib = _native(k)
    if lib is None or not (_is_packed(k) and _is_packed(v) and k_cache.is_contiguous() and v_cache.is_contiguous()):
        k_cache.flatten(0, 1).index_copy_(0, kv_slots, k)
        v_cache.flatten(0, 1).index_copy_(0, kv_slots, v)
        return
    lib.write_kv(
        k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        kv_slots.data_ptr(), k.shape[0], k.shape[1] * k.shape[2],
    )  # fmt: skip


def _dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    lib = _native_products(x, weight)
    if lib is None or not 0 < rows <= _native_max_rows(x) or x.stride(1) != 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    out, depth = weight.shape
    y = x.new_empty((rows, out))
    widened = x.new_empty((rows, depth), dtype=torch.float32) if x.dtype is torch.bfloat16 else None
    lib.linear(
        y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        rows, out, depth, torch.get_num_threads(), None if widened is None else widened.data_ptr(),
    )  # fmt: skip
    return y


def _is_skinny(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether kernels/skinny.py computes this GEMM."""
    if not _triton(x) or weight.dtype != x.dtype or weight.stride(1) != 1:
        return False
    from yalis.kernels import skinny

    return skinny.supports(x, weight, gated)


def _triton_experts(x: Tensor) -> bool:
    """Whether kernels/experts.py runs mixtures of experts; on other GPUs it is plain torch (kernels/routed.py)."""
    return _triton(x) and env.experimental()


def samples_with_triton(device: torch.device) -> bool:
    """Whether tokens are sampled by the Triton kernels of kernels/sampling.py on this device."""
    return device.type == "cuda" and _has_triton() and env.experimental()


def _triton(x: Tensor) -> bool:
    """Whether our Triton kernels support this tensor's device and dtype."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _native(x: Tensor) -> native.Library | None:
    """Return the native library if it supports this tensor's device and dtype."""
    return native.load() if x.is_cpu and x.dtype is torch.float32 else None


def _native_products(x: Tensor, weight: Tensor) -> native.Library | None:
    """Return the native library if it multiplies these dtypes."""
    supported = x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and weight.dtype is x.dtype
    return native.load() if supported else None


def _native_max_rows(x: Tensor) -> int:
    return NATIVE_MAX_ROWS if x.dtype is torch.float32 else NATIVE_MAX_BF16_ROWS


def _is_packed(x: Tensor) -> bool:
    """Whether [T, C] or [T, heads, C] is contiguous except for the stride of the first dimension."""
    strides = x.stride()
    return strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2])
