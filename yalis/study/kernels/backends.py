"""Implementations of the benchmarked operations: torch, native CPU kernels, Triton kernels and the reference."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from yalis.errors import YalisError
from yalis.kernels import native, ops, reference, routed
from yalis.moe import MoESpec
from yalis.sampling.sampled_tokens import NO_TOKEN

EPS = 1e-5
_ACTIVATION = "silu"
_ROUTING = ("softmax", True, 1, 1, 1.0)  # renormalized, without groups
_SCALE = 0.1  # of the attention scores


class Backend(Protocol):
    """The operations of a decode step. kernels/reference.py defines what they compute."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, ...]: ...

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor) -> Tensor: ...

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, kv_slots: Tensor) -> Tensor: ...

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor: ...

    def use_last_tokens(self, ids: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor: ...

    def argmax(self, logits: Tensor) -> Tensor: ...

    def pick_greedy(self, logits: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor: ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor: ...


class TorchBackend:
    """Unfused torch operations."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gated(self.linear(x, weight))

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
        return routed.choose_experts(logits, None, top_k, *_ROUTING)

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        def linear(rows: Tensor, matrices: Tensor) -> Tensor:
            if rows.is_cpu:
                return routed.grouped_linear(rows, matrices, chosen, F.linear)
            return routed.blocked_linear(rows, matrices, chosen)

        return routed.combine(linear(self.gated(linear(x, gate_up)), down), weights)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        return F.rms_norm(x, weight.shape, weight, EPS), x

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, kv_slots: Tensor) -> Tensor:
        kv_heads = k.shape[2]
        rotated = self.rotate(qkv[:, :-kv_heads], cos, sin)
        k.flatten(0, 1).index_copy_(0, kv_slots, rotated[:, -kv_heads:])
        v.flatten(0, 1).index_copy_(0, kv_slots, qkv[:, -kv_heads:])
        return rotated[:, :-kv_heads]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(x * cos, torch.roll(x, cos.shape[-1] // 2, -1), sin)

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def use_last_tokens(self, ids: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        return torch.where(ids < 0, last_tokens[request_slots], ids)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def pick_greedy(self, logits: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        best, indices = logits.max(1)
        tokens = indices.masked_fill(best.isnan(), NO_TOKEN)
        last_tokens[request_slots] = tokens.clamp(min=0)
        return tokens

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        q, k, v = (x.reshape(len(lengths), -1, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))
        causal = q.shape[2] > 1  # a whole prompt
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=_SCALE, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class NativeBackend(TorchBackend):
    """The operations that layers call, which on a CPU in float32 are native kernels."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(x, weight)

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
        return ops.route(logits, MoESpec(logits.shape[1], top_k, 1, (True,), renormalize=True))

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gated = ops.expert_linear(x, gate_up, chosen, None, _ACTIVATION)
        return ops.combine_experts(ops.expert_linear(gated, down, chosen), weights)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x, residual, weight, EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        return ops.gated(gate_up, _ACTIVATION)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rotate(x, cos, sin)

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        return ops.gather_rows(table, rows)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        library = native.load() if q.dtype is torch.float32 else None
        if library is None or len(q) > len(lengths):  # prefill runs in torch
            return super().attention(q, k, v, starts, lengths, tables, launch)
        (rows, heads, dim), out = q.shape, torch.empty_like(q)
        library.attend(
            out.data_ptr(), q.data_ptr(), q.stride(0), k.data_ptr(), v.data_ptr(),
            tables.data_ptr(), tables.stride(0), lengths.data_ptr(), rows, heads, k.shape[2], dim, k.shape[1],
            0, _SCALE, 0.0, torch.get_num_threads(), None,
        )  # fmt: skip
        return out


class TritonBackend:
    """Our Triton kernels, with `pdl` by programmatic dependent launch; `config` sets the launch of skinny GEMMs."""

    def __init__(self, pdl: bool = False, config: Any = None) -> None:
        from yalis.kernels import experts, fused, gated_product, paged_attention, skinny, token_feedback
        from yalis.kernels.experts_config import uses_gemv

        self._experts: Any = experts
        self._uses_gemv = uses_gemv
        self._token_feedback: Any = token_feedback
        self._fused: Any = fused
        self._skinny: Any = skinny
        self._gated_product: Any = gated_product.gated_product
        self._attention: Any = paged_attention.paged_attention
        self._pdl, self._config = pdl, config

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self._skinny.linear(x, weight, None, self._pdl, self._config)
        return y

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[0] > self._skinny.TMA_ROWS:
            y: Tensor = self._gated_product(x, weight, _ACTIVATION)
        else:
            y = self._skinny.gated_linear(x, weight, _ACTIVATION, None, self._pdl, self._config)
        return y

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
        pair: tuple[Tensor, ...] = self._experts.route(logits, None, top_k, "softmax", True, 1.0, self._pdl)
        return pair

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        count, plan = gate_up.shape[0], None
        if not self._uses_gemv(chosen.shape[0], count):
            plan = self._experts.group(chosen, count, self._pdl)
        gated = self._experts.expert_linear(x, gate_up, chosen, plan, None, _ACTIVATION, self._pdl)
        y = self._experts.expert_linear(gated, down, chosen, plan, None, "", self._pdl)
        out: Tensor = self._experts.combine(y, weights, pdl=self._pdl)
        return out

    def expert_linear(self, x: Tensor, weight: Tensor, chosen: Tensor, activation: str) -> Tensor:
        """Return one grouped product, for the launch search."""
        y: Tensor = self._experts.expert_linear(x, weight, chosen, None, None, activation, self._pdl, self._config)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._fused.add_rms_norm(x, residual, weight, EPS, self._pdl)
        return pair

    def gated(self, gate_up: Tensor) -> Tensor:
        y: Tensor = self._fused.gated(gate_up, _ACTIVATION, self._pdl)
        return y

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, kv_slots: Tensor) -> Tensor:
        q: Tensor = self._fused.rope_write(qkv, cos, sin, k, v, kv_slots, pdl=self._pdl)
        return q

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        y: Tensor = self._fused.gather_rows(table, rows, self._pdl)
        return y

    def use_last_tokens(self, ids: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        tokens: Tensor = self._token_feedback.use_last_tokens(ids, last_tokens, request_slots, self._pdl)
        return tokens

    def argmax(self, logits: Tensor) -> Tensor:
        indices: Tensor = self._fused.argmax(logits, self._pdl)
        return indices

    def pick_greedy(self, logits: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        tokens: Tensor = self._token_feedback.pick_greedy(logits, last_tokens, request_slots, NO_TOKEN, self._pdl)
        return tokens

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        out: Tensor = self._attention(q, k, v, starts, lengths, tables, launch, _SCALE, pdl=self._pdl)
        return out


class ReferenceBackend:
    """The reference that all backends are checked against."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.gated_linear(x, weight, _ACTIVATION)

    def route(self, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
        return routed.choose_experts(logits, None, top_k, *_ROUTING)

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = reference.expert_linear(self.gated(reference.expert_linear(x, gate_up, chosen)), down, chosen)
        return routed.combine(y, weights)

    def expert_linear(self, x: Tensor, weight: Tensor, chosen: Tensor, activation: str) -> Tensor:
        y = reference.expert_linear(x, weight, chosen)
        return self.gated(y) if activation else y

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        return reference.gated(gate_up, _ACTIVATION)

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, kv_slots: Tensor) -> Tensor:
        return reference.rope_write(qkv, cos, sin, k, v, kv_slots)

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        return table[rows]

    def use_last_tokens(self, ids: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        pairs = zip(ids.tolist(), last_tokens[request_slots].tolist(), strict=True)
        return torch.tensor([old if new < 0 else new for new, old in pairs], device=ids.device)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def pick_greedy(self, logits: Tensor, last_tokens: Tensor, request_slots: Tensor) -> Tensor:
        return logits.argmax(1)  # the inputs have no NaN

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        doubles = (q.double(), k.double(), v.double())  # the reference computes in the dtype of its inputs
        return reference.paged_attention(*doubles, starts, lengths, tables, _SCALE).to(q.dtype)


def yalis_backends(device: torch.device) -> list[tuple[str, Backend]]:
    """Return our backends for this device, each with the suffix that it adds to the names of operations."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise YalisError("triton is not installed, which the GPU kernels need; type: pip install triton")
        return [("", TritonBackend()), (", PDL", TritonBackend(pdl=True))]
    return [("", NativeBackend())]
