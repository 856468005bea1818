"""The operations of a decode step, and of prompts, as torch, our kernels and the plain reference have them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from yalis.errors import YalisError
from yalis.kernels import native, ops, reference
from yalis.sampling.sampled import NO_TOKEN

EPS = 1e-5
_ACTIVATION = "silu"
_SCALE = 0.1  # of attention scores


class Kit(Protocol):
    """The operations of a decode step, as one implementation has them. kernels/reference.py says what they compute."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor) -> Tensor: ...

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor: ...

    def take(self, table: Tensor, rows: Tensor) -> Tensor: ...

    def feed(self, ids: Tensor, last: Tensor, owners: Tensor) -> Tensor: ...

    def argmax(self, logits: Tensor) -> Tensor: ...

    def settle(self, logits: Tensor, last: Tensor, owners: Tensor) -> Tensor: ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor: ...


class Torch:
    """Plain torch, operation by operation."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gated(self.linear(x, weight))

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if branch is not None:
            x = x + branch
        return F.rms_norm(x, weight.shape, weight, EPS), x

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

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def feed(self, ids: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        return torch.where(ids < 0, last[owners], ids)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def settle(self, logits: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        best, places = logits.max(1)
        tokens = places.masked_fill(best.isnan(), NO_TOKEN)
        last[owners] = tokens.clamp(min=0)
        return tokens

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        q, k, v = (x.reshape(len(lengths), -1, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))
        causal = q.shape[2] > 1  # a prompt, all of it
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=_SCALE, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class Native(Torch):
    """What layers call: on a CPU in float32 the native kernels."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(x, weight)

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x, branch, weight, EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        return ops.gated(gate_up, _ACTIVATION)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rotate(x, cos, sin)

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        return ops.gather_rows(table, rows)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        library = native.load() if q.dtype is torch.float32 else None
        if library is None or len(q) > len(lengths):  # prompts are torch's
            return super().attention(q, k, v, starts, lengths, tables, launch)
        (rows, heads, dim), out = q.shape, torch.empty_like(q)
        library.attend(
            out.data_ptr(), q.data_ptr(), q.stride(0), k.data_ptr(), v.data_ptr(),
            tables.data_ptr(), tables.stride(0), lengths.data_ptr(), rows, heads, k.shape[2], dim, k.shape[1],
            0, _SCALE, 0.0, torch.get_num_threads(),
        )  # fmt: skip
        return out


class Kernels:
    """Our Triton kernels, one launch each; `pdl`: each starts while the one before it ends; `shape`: of products."""

    def __init__(self, pdl: bool = False, shape: Any = None) -> None:
        from yalis.kernels import fused, gated_product, paged_attention, skinny, token_feedback

        self._token_feedback: Any = token_feedback
        self._fused: Any = fused
        self._skinny: Any = skinny
        self._gated_product: Any = gated_product.gated_product
        self._attention: Any = paged_attention.paged_attention
        self._pdl, self._shape = pdl, shape

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self._skinny.linear(x, weight, None, self._pdl, self._shape)
        return y

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[0] > self._skinny.TILED_ROWS:
            y: Tensor = self._gated_product(x, weight, _ACTIVATION)
        else:
            y = self._skinny.gated_linear(x, weight, _ACTIVATION, None, self._pdl, self._shape)
        return y

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._fused.add_rms_norm(x, branch, weight, EPS, self._pdl)
        return pair

    def gated(self, gate_up: Tensor) -> Tensor:
        y: Tensor = self._fused.gated(gate_up, _ACTIVATION, self._pdl)
        return y

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        q: Tensor = self._fused.rope_write(qkv, cos, sin, k, v, slots, pdl=self._pdl)
        return q

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        y: Tensor = self._fused.take(table, rows, self._pdl)
        return y

    def feed(self, ids: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        fed: Tensor = self._token_feedback.use_last_tokens(ids, last, owners, self._pdl)
        return fed

    def argmax(self, logits: Tensor) -> Tensor:
        places: Tensor = self._fused.argmax(logits, self._pdl)
        return places

    def settle(self, logits: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        tokens: Tensor = self._token_feedback.pick_greedy(logits, last, owners, NO_TOKEN, self._pdl)
        return tokens

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        out: Tensor = self._attention(q, k, v, starts, lengths, tables, launch, _SCALE, pdl=self._pdl)
        return out


class Reference:
    """What all of them should give."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.linear(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.gated_linear(x, weight, _ACTIVATION)

    def add_rms_norm(self, x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, branch, weight, EPS)

    def gated(self, gate_up: Tensor) -> Tensor:
        return reference.gated(gate_up, _ACTIVATION)

    def rope_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        return reference.rope_write(qkv, cos, sin, k, v, slots)

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        return table[rows]

    def feed(self, ids: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        pairs = zip(ids.tolist(), last[owners].tolist(), strict=True)
        return torch.tensor([old if new < 0 else new for new, old in pairs], device=ids.device)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def settle(self, logits: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        return logits.argmax(1)  # no benchmark has NaN

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, tables: Tensor, launch: Any
    ) -> Tensor:
        wide = (q.double(), k.double(), v.double())  # the reference computes in the dtype it is given
        return reference.paged_attention(*wide, starts, lengths, tables, _SCALE).to(q.dtype)


def our_kits(device: torch.device) -> list[tuple[str, Kit]]:
    """Ours on this device, each with what its name adds to an operation's."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise YalisError("triton is not installed, and our kernels for a GPU need it; type: pip install triton")
        return [("", Kernels()), (", dependent launches", Kernels(pdl=True))]
    return [("", Native())]
