"""Floors: roofline lower bounds of the time of a step, from the bytes it must read and the FLOPs it must do.

A matrix of p parameters costs 2p FLOPs per token. Bytes are those read, each once per step. Of a mixture of experts, a
token multiplies its top_k experts, and a step reads as many as uniform routing reaches on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from yalis.perfmodel.experts import distinct_experts
from yalis.spec import ModelSpec

_Count = TypeVar("_Count", int, float)


@dataclass(frozen=True)
class ModelDims:
    """The dimensions that determine the cost of a model, or of one rank's slice of it (parallel/dims.py).

    Every layer is attention and an MLP, or in `expert_layers` of them a mixture of experts.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool  # lm_head is the embedding table
    weight_bytes: float = 2.0  # bytes per weight as stored
    kv_bytes: float = 2.0  # bytes per element of the KV cache
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norms: int = 2  # norms of a layer over the hidden size
    norm_bias: bool = False
    gated: bool = True  # a dense MLP has a gate
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; empty: full attention in every layer
    expert_layers: int = 0
    experts: int = 0  # of which this rank has a part
    top_k: float = 0  # of those, how many serve a token; a mean if other ranks have the other experts
    routed_experts: int = 0  # that a token chooses from; more than `experts` if other ranks have some
    expert_width: int = 0
    shared_width: int = 0  # of the expert that serves every token
    shared_gate: bool = True  # the shared expert has a gate, which is a row of the router
    router_biases: int = 0  # vectors of one number for each expert: the router's bias, the correction of its scores
    expert_bias: bool = False
    attention_sinks: bool = False
    #: columns of a tensor-parallel grid: the matrices of a layer have hidden / columns of the hidden size
    columns: int = 1
    embedding: bool = True  # false on pipeline stages after the first
    head: bool = True  # final norm and lm_head; false on pipeline stages before the last

    @classmethod
    def of(cls, spec: ModelSpec, weight_bytes: float, kv_bytes: float) -> ModelDims:
        moe = spec.moe
        return cls(
            hidden=spec.hidden_size,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            vocab=spec.vocab_size,
            tied=spec.tie_embeddings,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            mlp_bias=spec.mlp_bias,
            qk_norm=spec.qk_norm,
            joint_qk_norm=spec.joint_qk_norm,
            norms=spec.block_norms.count,
            norm_bias=spec.norm_bias,
            gated=spec.dense_matrices == 3,
            windows=spec.windows,
            expert_layers=0 if moe is None else sum(moe.layers),
            experts=0 if moe is None else moe.num_experts,
            top_k=0 if moe is None else moe.top_k,
            routed_experts=0 if moe is None else moe.num_experts,
            expert_width=0 if moe is None else moe.width,
            shared_width=0 if moe is None else moe.shared_width,
            shared_gate=moe is None or moe.shared_gate,
            router_biases=0 if moe is None else moe.router_bias + moe.correction_bias,
            expert_bias=moe is not None and moe.expert_bias,
            attention_sinks=spec.attention_sinks,
        )

    @property
    def hidden_shard(self) -> int:
        """Hidden size of the matrices and norms of a layer."""
        return self.hidden // self.columns

    @property
    def matrix_params(self) -> int:
        """Parameters of the matrices in all layers, without lm_head."""
        return self.params_with(self.experts)

    @property
    def active_params(self) -> float:
        """Parameters of those matrices that one token multiplies."""
        return self.params_with(self.top_k)

    @property
    def router_rows(self) -> int:
        return self.routed_experts + (self.shared_width > 0 and self.shared_gate)

    def read_params(self, tokens: int) -> float:
        """Return the parameters of those matrices that a step of `tokens` tokens reads, with the biases of experts, if
        all experts are equally likely. Routing that prefers some experts reads fewer."""
        if not self.experts:
            return self.matrix_params
        read = distinct_experts(self.experts, self.top_k, tokens)
        return self.params_with(read) + self._expert_biases(read)

    def params_with(self, experts: _Count) -> _Count:
        """Return the parameters of the matrices of all layers, with this many experts in each that has experts."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        dense = (
            self.layers * (2 * q + 2 * kv) + (self.layers - self.expert_layers) * (2 + self.gated) * self.intermediate
        )
        sparse = 3 * (experts * self.expert_width + self.shared_width) + self.router_rows
        return self.hidden_shard * (dense + self.expert_layers * sparse)

    def _expert_biases(self, experts: _Count) -> _Count:
        """Return the parameters of the biases of this many experts in each layer that has experts."""
        return self.expert_layers * experts * (2 * self.expert_width + self.hidden_shard) * self.expert_bias

    @property
    def small_params(self) -> int:
        """Parameters of norms, sinks and biases, without those of experts."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        norm = self.hidden_shard * (1 + self.norm_bias)
        layer = self.norms * norm
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += (self.heads + self.kv_heads) * self.head_dim if self.joint_qk_norm else 0
        layer += qkv if self.qkv_bias else 0
        layer += self.hidden_shard if self.out_bias else 0
        layer += (1 + self.gated) * self.intermediate + self.hidden_shard if self.mlp_bias else 0
        layer += self.heads if self.attention_sinks else 0
        routers = self.expert_layers * self.routed_experts * self.router_biases
        return self.layers * layer + routers + norm * self.head

    @property
    def table_params(self) -> int:
        """Parameters of one vocabulary matrix: the embedding table, or lm_head."""
        return self.vocab * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters of lm_head; 0 on a pipeline stage without it."""
        return self.table_params * self.head

    @property
    def params(self) -> int:
        tables = 1 if self.tied and self.embedding and self.head else self.embedding + self.head
        biases = self._expert_biases(self.experts)
        return self.matrix_params + biases + self.small_params + self.table_params * tables

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.layers


@dataclass(frozen=True)
class Work:
    """The bytes a step must read and the FLOPs it must do."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


def decode_work(dims: ModelDims, contexts: Sequence[float]) -> Work:
    """Return the work of decoding one token per sequence. Context lengths may be fractional, as means over steps."""
    batch = len(contexts)
    attended = sum(min(n, window or n) for n in contexts for window in dims.layer_windows())
    return Work(
        weight_bytes=_weight_bytes(dims, batch),
        kv_bytes=attended * dims.kv_bytes_per_token / dims.layers,
        flops=2 * (dims.active_params + dims.head_params) * batch + 4 * dims.heads * dims.head_dim * attended,
    )


def prefill_work(dims: ModelDims, lengths: Sequence[int], sampled_rows: int | None = None) -> Work:
    """Return the work of prefilling prompts of these lengths, with lm_head for the sampled rows: by default one each.

    Every layer counts for every token, as in published floors. An engine that skips unneeded tokens in the last layer
    gets closer to this floor."""
    rows = len(lengths) if sampled_rows is None else sampled_rows
    pairs = sum(_causal_pairs(n, window) for n in lengths for window in dims.layer_windows())
    matrices = dims.active_params * sum(lengths) + dims.head_params * rows
    return Work(
        weight_bytes=_weight_bytes(dims, sum(lengths)),
        kv_bytes=0,  # keys and values of the same step need not be read from memory
        flops=2 * matrices + 4 * dims.heads * dims.head_dim * pairs,
    )


def floor_s(bytes_read: float, flops: float, bandwidth: float, flop_rate: float) -> float:
    """Return the longer of reading at `bandwidth` bytes/s and computing at `flop_rate` FLOP/s, in seconds."""
    return max(bytes_read / bandwidth, flops / flop_rate)


def _weight_bytes(dims: ModelDims, tokens: int) -> float:
    """Return the bytes of all weights, plus the looked-up rows of the embedding table unless lm_head is the same."""
    looked_up = tokens * dims.hidden if dims.embedding and not (dims.tied and dims.head) else 0
    return (dims.read_params(tokens) + dims.small_params + dims.head_params + looked_up) * dims.weight_bytes


def _causal_pairs(length: int, window: int | None) -> int:
    """Return the (query, key) pairs of a causal layer. A window includes the query itself."""
    width = min(window or length, length)
    return width * (width + 1) // 2 + (length - width) * width
