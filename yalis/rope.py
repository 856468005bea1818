"""Rotary position embedding as settings, read from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError
from yalis.family import Family


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. layers/rotary.py computes the frequencies, in the precision of transformers."""

    theta: float
    dim: int  # rotated dimensions of a head
    kind: str = "default"  # default | linear | llama3 | yarn | longrope | none
    scale: float = 1.0  # multiplies cosine and sine
    factor: float = 1.0
    original_max: int = 0  # context length the frequencies were trained for
    low: float = 0.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, up to original_max tokens
    long_factor: tuple[float, ...] = ()  # longrope, for longer sequences
    query_beta: float = 0.0  # queries are multiplied by 1 + query_beta * ln(1 + position // original_max)

    @property
    def switch_at(self) -> int | None:
        """The length above which a sequence uses a second set of frequencies; None if there is only one set."""
        return self.original_max if self.kind == "longrope" else None


#: A layer without RoPE rotates two dimensions by an angle of 0, which leaves every bit as it is: it needs no kernel.
NO_ROPE = RopeSpec(0.0, 2, "none")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(family: Family, reader: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """Return the RoPE of layers with full attention: that of all layers in most families.

    It is read from transformers 5's rope_parameters, or from rope_theta with rope_scaling of earlier versions.
    """
    config = reader.config
    rope: dict[str, Any] = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    }
    scaling, given = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    by_type = _by_layer_type(family, reader)
    rope.update(scaling)
    rope.update(by_type.get("full_attention") or {} if by_type else given)
    if not scaling and not given:
        rope.update(family.default_rope)
    return _read(family, reader, head_dim, max_position, rope)


def read_layer_ropes(
    family: Family, reader: ConfigReader, head_dim: int, max_position: int, rope: RopeSpec
) -> tuple[RopeSpec, ...]:
    """Return the RoPE of each layer. `rope`: that of layers with full attention."""
    num_layers = reader.integer("num_hidden_layers")
    ropes = [rope] * num_layers
    if family.sliding_rope is not None and family.sliding_layers is not None:
        own = {**family.sliding_rope(reader), **(_by_layer_type(family, reader).get("sliding_attention") or {})}
        sliding = _read(family, reader, head_dim, max_position, own)
        if rope.switch_at != sliding.switch_at:
            raise YalisError(
                f"rope_parameters in {reader.label} has longrope scaling for some layers only, which is not supported; "
                "give the same original_max_position_embeddings for all"
            )
        slides = family.sliding_layers(reader, num_layers)
        ropes = [sliding if slide else rope for slide in slides]
    if family.rope_layers is not None:
        rotated = family.rope_layers(reader, num_layers)
        if rope.switch_at is not None and not all(rotated):
            raise YalisError(
                f"{reader.label} has longrope scaling and layers without RoPE, which is not supported together; use a "
                "model with another RoPE scaling"
            )
        ropes = [own if has_rope else NO_ROPE for own, has_rope in zip(ropes, rotated, strict=True)]
    return tuple(ropes)


def _by_layer_type(family: Family, reader: ConfigReader) -> dict[str, Any]:
    """Return rope_parameters if it has an entry for each layer type, else an empty dict."""
    given = reader.config.get("rope_parameters") or {}
    nested = any(name in given for name in _LAYER_TYPES)
    if nested and family.sliding_rope is None:
        raise YalisError(
            f"rope_parameters in {reader.label} differs by layer type, which {family.architecture} does not support; "
            "give the same for all layers"
        )
    if given and not nested and family.sliding_rope is not None:  # transformers ignores it
        raise YalisError(
            f"rope_parameters in {reader.label} is the same for all layers; {family.architecture} needs an entry for "
            f"{' and '.join(_LAYER_TYPES)}"
        )
    return given if nested else {}


def _read(family: Family, reader: ConfigReader, head_dim: int, max_position: int, rope: dict[str, Any]) -> RopeSpec:
    label = reader.label
    spec = _check_rope(_read_kind(family, reader, head_dim, max_position, rope), label)
    beta = float(rope.get("llama_4_scaling_beta") or 0.0)
    if beta and not family.query_scaling:
        raise YalisError(
            f"{label} has llama_4_scaling_beta {beta:g} (queries scaled by position), which {family.architecture} does "
            "not support"
        )
    original = int(rope.get("original_max_position_embeddings") or max_position)
    return _check_rope(replace(spec, query_beta=beta, original_max=original), label) if beta else spec


def _read_kind(
    family: Family, reader: ConfigReader, head_dim: int, max_position: int, rope: dict[str, Any]
) -> RopeSpec:
    config, label = reader.config, reader.label
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
        if kind == "ntk_alpha" and kind in family.rope_aliases.values():
            return RopeSpec(theta * float(rope["alpha"]) ** (dim / (dim - 2)), dim)
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
    valid = valid and rope.original_max <= 2**32
    if rope.kind in ("llama3", "yarn"):
        valid = valid and 1e-6 < rope.low < rope.high < 1e6 and rope.original_max > 0
    if not valid:
        raise YalisError(
            f"the {rope.kind} RoPE settings of {label} are out of range: rope_theta must be above 1, every factor "
            "positive, original_max_position_embeddings at most 2^32, and low_freq_factor or beta_slow below "
            "high_freq_factor or beta_fast; compare config.json with the original"
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
