"""The architecture of a model, read from its config.json: every family as settings of one decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError
from yalis.families import find_family
from yalis.family import PRE_NORMS, BlockNorms, Family
from yalis.moe import MoESpec
from yalis.rope import RopeSpec, read_layer_ropes, read_rope
from yalis.unknown_fields import refuse_unknown_fields


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and options of a model, independent of how it is stored or split over ranks."""

    family: str  # Family.name
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    layer_ropes: tuple[RopeSpec, ...]  # of each layer; `rope` is that of layers with full attention
    windows: tuple[int | None, ...]  # the sliding window of each layer, None where it has full attention
    attention_scale: float
    activation: str  # silu | gelu_tanh | gelu
    tie_embeddings: bool
    dtype: str  # the checkpoint's: float32 | bfloat16 | float16
    mlp: str = "gated"  # the class that computes the MLP, a key of layers.mlp.MLPS
    moe: MoESpec | None = None  # given if `mlp` is "moe"; it lists the layers, and the others have a dense MLP
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"  # the class of norms over the hidden size, a key of parallel.norm.NORMS
    norm_bias: bool = False
    block_norms: BlockNorms = PRE_NORMS
    parallel_block: bool = False  # attention and MLP have the same input, and both are added to it (Cohere 2)
    qk_norm: bool = False  # RMSNorm over each query and key head
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_after_rope: bool = False  # (HunYuan)
    joint_qk_norm: bool = False  # RMSNorm over all query heads together, and over all key heads (OLMoE)
    norm_offset: float = 0.0  # norms multiply by offset + weight (Gemma: 1)
    embed_scale: float | None = None  # multiplies the token embeddings; rounded to the compute dtype, as in Gemma 2
    residual_multiplier: float = 1.0  # multiplies the output of attention and MLP before the residual is added
    attention_softcap: float | None = None
    attention_sinks: bool = False  # a learned logit per query head, in the softmax of each query but without a value
    logit_softcap: float | None = None
    logits_scaling: float = 1.0  # divides the logits
    interleaved_rope: bool = False  # RoPE rotates pairs (2i, 2i + 1) of the checkpoint's rows, not (i, i + dim / 2)
    fused_qkv: bool = False  # the checkpoint has qkv_proj
    fused_gate_up: bool = False  # the checkpoint has gate_up_proj
    plain_mlp: tuple[str, str] = ("up_proj", "down_proj")  # the matrices of an MLP without a gate

    def mlp_of(self, layer: int) -> str:
        """Return the class that computes the MLP of a layer, a key of layers.mlp.MLPS."""
        return "gated" if self.moe is not None and not self.moe.layers[layer] else self.mlp

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different RoPE settings of the layers, in the order of their first use."""
        return tuple(dict.fromkeys(self.layer_ropes))

    @property
    def dense_matrices(self) -> int:
        """The number of matrices of intermediate_size rows or columns in a dense MLP."""
        return 2 if self.mlp == "plain" else 3

    def mlp_widths(self, split_experts: bool = True) -> tuple[int, ...]:
        """Return the width of every kind of MLP that is split: dense, of an expert, of the shared expert."""
        if self.moe is None:
            return (self.intermediate_size,)
        dense = () if all(self.moe.layers) else (self.intermediate_size,)
        experts = (self.moe.width,) if split_experts else ()
        shared = (self.moe.shared_width,) if self.moe.shared_width else ()
        return (*dense, *experts, *shared)


#: Names in config.json. The kernels of gated MLPs have no squared ReLU.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
_PLAIN_ACTIVATIONS = {**_ACTIVATIONS, "relu2": "relu2"}


#: Far above what any model has. Each layer and head costs memory and time before the first weight is read.
MAX_LAYERS = 10_000
MAX_HEADS = 2**16


def read_spec(config: dict[str, Any], label: str = "config.json") -> ModelSpec:
    """Return the ModelSpec of a config.json; raises one sentence for an unsupported family or an invalid value."""
    try:
        family = find_family(config, label)
        return _read(family, ConfigReader({**family.defaults, **config}, label))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise YalisError(
            f"a value in the config of {label} makes no sense ({error}); compare it with the original"
        ) from error


def _read(family: Family, config: ConfigReader) -> ModelSpec:
    label = config.label
    hidden, num_layers = config.integer("hidden_size"), config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    heads = config.integer("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, maximum=MAX_HEADS)
    head_dim = config.integer("head_dim", hidden // heads)
    max_position = config.integer("max_position_embeddings")
    if heads % kv_heads:
        raise YalisError(
            f"{label} has {heads} attention heads over {kv_heads} key/value heads; the first must be a multiple"
        )
    eos = config.config.get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise YalisError(f"eos_token_id in {label} is {eos!r}; it must be a token id or a list of them")
    refuse_unknown_fields(config)
    fields = family.spec_fields(config)
    attention_bias = config.flag("attention_bias")
    rope = read_rope(family, config, head_dim, max_position)
    spec = ModelSpec(
        family=family.name,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        norm_eps=config.number(family.norm_eps, 1e-6),
        rope=rope,
        layer_ropes=read_layer_ropes(family, config, head_dim, max_position, rope),
        windows=_windows(family, config, num_layers),
        attention_scale=head_dim**-0.5,
        activation=_activation(family, config, _PLAIN_ACTIVATIONS if fields.get("mlp") == "plain" else _ACTIVATIONS),
        tie_embeddings=config.flag("tie_word_embeddings"),
        dtype=_dtype(config.config),
        qkv_bias=attention_bias or family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        block_norms=family.block_norms,
    )
    return replace(spec, **fields)


def _activation(family: Family, config: ConfigReader, known: Mapping[str, str]) -> str:
    given = config.config
    name = given.get("hidden_activation") or family.activation or given.get("hidden_act", "silu")
    if name not in known:
        raise YalisError(f"{config.label} has activation {name!r}; known: {', '.join(known)}")
    return known[name]


def _windows(family: Family, config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where a layer has full attention."""
    if family.sliding_layers is None or config.config.get("sliding_window") is None:
        return (None,) * num_layers
    slides = family.sliding_layers(config, num_layers)
    return tuple(config.integer("sliding_window") if slide else None for slide in slides)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "bfloat16"
