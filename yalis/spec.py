"""The architecture of a model, read from its config.json: every family as settings of one decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError
from yalis.families import Family, find_family
from yalis.moe import MoESpec


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. layers/rotary.py computes the frequencies, in the precision of transformers."""

    theta: float
    dim: int  # rotated dimensions of a head
    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    scale: float = 1.0  # multiplies cosine and sine
    factor: float = 1.0
    original_max: int = 0  # context length the frequencies were trained for
    low: float = 0.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, up to original_max tokens
    long_factor: tuple[float, ...] = ()  # longrope, for longer sequences

    @property
    def switch_at(self) -> int | None:
        """The length above which a sequence uses a second set of frequencies; None if there is only one set."""
        return self.original_max if self.kind == "longrope" else None


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
    qk_norm: bool = False  # RMSNorm over each query and key head
    joint_qk_norm: bool = False  # RMSNorm over all query heads together, and over all key heads (OLMoE)
    norm_offset: float = 0.0  # RMSNorm multiplies by offset + weight (Gemma: 1)
    sandwich_norms: bool = False  # RMSNorm on the output of attention and MLP as well (Gemma 2)
    embed_scale: float | None = None  # multiplies the token embeddings; rounded to the compute dtype, as in Gemma 2
    residual_multiplier: float = 1.0  # multiplies the output of attention and MLP before the residual is added
    attention_softcap: float | None = None
    attention_sinks: bool = False  # a learned logit per query head, in the softmax of each query but without a value
    logit_softcap: float | None = None
    logits_scaling: float = 1.0  # divides the logits
    fused_projections: bool = False  # the checkpoint has qkv_proj and gate_up_proj

    def mlp_of(self, layer: int) -> str:
        """Return the class that computes the MLP of a layer, a key of layers.mlp.MLPS."""
        return "gated" if self.moe is not None and not self.moe.layers[layer] else self.mlp

    def mlp_widths(self, split_experts: bool = True) -> tuple[int, ...]:
        """Return the width of every kind of MLP that is split: dense, of an expert, of the shared expert."""
        if self.moe is None:
            return (self.intermediate_size,)
        dense = () if all(self.moe.layers) else (self.intermediate_size,)
        experts = (self.moe.width,) if split_experts else ()
        shared = (self.moe.shared_width,) if self.moe.shared_width else ()
        return (*dense, *experts, *shared)


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


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
    attention_bias = config.flag("attention_bias")
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
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_check_rope(_rope(family, config, head_dim, max_position), label),
        windows=_windows(family, config, num_layers),
        attention_scale=head_dim**-0.5,
        activation=_activation(family, config),
        tie_embeddings=config.flag("tie_word_embeddings"),
        dtype=_dtype(config.config),
        qkv_bias=attention_bias or family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        sandwich_norms=family.sandwich_norms,
        fused_projections=family.fused_projections,
    )
    return replace(spec, **family.spec_fields(config))


def _activation(family: Family, config: ConfigReader) -> str:
    given = config.config
    name = given.get("hidden_activation") or family.activation or given.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise YalisError(f"{config.label} has activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(family: Family, config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where a layer has full attention."""
    if family.sliding_layers is None or config.config.get("sliding_window") is None:
        return (None,) * num_layers
    slides = family.sliding_layers(config, num_layers)
    return tuple(config.integer("sliding_window") if slide else None for slide in slides)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "bfloat16"


def _rope(family: Family, reader: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """Read transformers 5's rope_parameters, or rope_theta with rope_scaling of earlier versions."""
    config, label = reader.config, reader.label
    rope: dict[str, Any] = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    }
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope.update(scaling or family.rope_defaults)
    theta = float(rope.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = family.rope_aliases.get(kind, kind)
    dim = _rotated_dimensions(family, kind, head_dim, float(rope.get("partial_rotary_factor") or 1.0), label)
    original = int(
        config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_position
    )
    stretch = float(rope.get("factor") or max_position / original)
    try:
        if kind == "default":
            return RopeSpec(theta, dim)
        if kind == "linear":
            return RopeSpec(theta, dim, kind, factor=float(rope["factor"]))
        if kind == "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return RopeSpec(theta, dim, kind, 1.0, float(rope["factor"]), original, low, high)
        if kind == "yarn":
            low, high = float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32)
            scale, truncate = _yarn_scale(rope, stretch), bool(rope.get("truncate", True))
            return RopeSpec(theta, dim, kind, scale, stretch, original, low, high, truncate)
        if kind == "longrope":
            scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
            scale = float(rope.get("attention_factor") or scale)
            short, long = tuple(map(float, rope["short_factor"])), tuple(map(float, rope["long_factor"]))
            if len(short) != dim // 2 or len(long) != dim // 2:
                raise YalisError(
                    f"{label} has {len(short)} short and {len(long)} long RoPE factors; {dim // 2} of each are needed"
                )
            return RopeSpec(theta, dim, kind, scale, stretch, original, short_factor=short, long_factor=long)
    except KeyError as missing:
        raise YalisError(f"{label} has {kind} RoPE scaling but lacks its {missing} entry") from None
    raise YalisError(
        f"{label} has RoPE scaling {kind!r}, which is not supported; supported: default, linear, llama3, yarn, longrope"
    )


def _check_rope(rope: RopeSpec, label: str) -> RopeSpec:
    """Return the settings; raises if no frequencies can be computed from them."""
    factors = (rope.factor, rope.scale, *rope.short_factor, *rope.long_factor)
    valid = 1 < rope.theta < math.inf and all(0 < factor < math.inf for factor in factors)
    if rope.kind in ("llama3", "yarn"):
        valid = valid and 1e-6 < rope.low < rope.high < 1e6 and rope.original_max > 0
    if not valid:
        raise YalisError(
            f"the {rope.kind} RoPE settings of {label} are out of range: rope_theta must be above 1, every factor "
            "positive, and low_freq_factor or beta_slow below high_freq_factor or beta_fast; compare config.json with "
            "the original"
        )
    return rope


def _rotated_dimensions(family: Family, kind: str, head_dim: int, partial_rotary_factor: float, label: str) -> int:
    """Return how many dimensions of a head RoPE rotates, as transformers' model of this family does."""
    if not 0 < partial_rotary_factor <= 1:
        raise YalisError(
            f"partial_rotary_factor in {label} is {partial_rotary_factor:g}; it must be above 0 and at most 1"
        )
    dim = int(head_dim * partial_rotary_factor)
    if dim != head_dim and not family.partial_rotary:
        if kind != "default":  # transformers scales fewer frequencies here than its model rotates, and fails
            raise YalisError(
                f"{label} has partial_rotary_factor {partial_rotary_factor:g} with {kind} RoPE scaling, which "
                f"{family.architecture} does not support; remove partial_rotary_factor from config.json"
            )
        dim = head_dim
    if dim % 2 or dim < 2:
        raise YalisError(f"{label} applies RoPE to {dim} dimensions of a head; head_dim must be even")
    return dim


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
