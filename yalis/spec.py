"""What a config.json means: every supported family as flags over one decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. layers/rotary.py turns this into frequencies, in the precision of the reference."""

    theta: float
    dim: int  # how many of a head's dimensions are rotated
    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    scale: float = 1.0  # cosine and sine are multiplied by it
    factor: float = 1.0
    original_max: int = 0  # context the frequencies were trained for
    low: float = 0.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, up to original_max tokens
    long_factor: tuple[float, ...] = ()  # longrope, for sequences beyond it

    @property
    def switch_at(self) -> int | None:
        """Sequences longer than this use a second set of frequencies."""
        return self.original_max if self.kind == "longrope" else None


@dataclass(frozen=True)
class ModelSpec:
    family: str
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
    windows: tuple[int | None, ...]  # a sliding window per layer, None where a layer sees everything
    attention_scale: float
    activation: str  # silu | gelu_tanh | gelu
    tie_embeddings: bool
    dtype: str  # what the checkpoint prefers: float32 | bfloat16 | float16
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head
    norm_offset: float = 0.0  # Gemma's norms multiply by 1 + weight
    sandwich_norms: bool = False  # Gemma 2 also norms each block's output
    embed_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    fused_projections: bool = False  # checkpoint holds qkv_proj and gate_up_proj


#: config.json's "architectures" entry -> (family, who uses it)
FAMILIES = {
    "LlamaForCausalLM": ("llama", "Llama 2, 3, 3.1, 3.2; SmolLM2"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2, Qwen2.5"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma 2"),
    "Phi3ForCausalLM": ("phi3", "Phi-3"),
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


#: What transformers assumes where a config.json is silent, as far as the families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
    "qwen3": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
}


def read_spec(config: dict[str, Any], label: str = "config.json") -> ModelSpec:
    """Turn the keys of a config.json into a ModelSpec; raises one sentence for what it cannot mean."""
    try:
        family = _family(config, label)
        return _read(family, {**_DEFAULTS[family], **config}, label)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise YalisError(
            f"a value in the config of {label} makes no sense ({error}); compare it with the original"
        ) from error


def _read(family: str, config: dict[str, Any], label: str) -> ModelSpec:
    get = _Reader(config, label)
    hidden, heads, layers = get.whole("hidden_size"), get.whole("num_attention_heads"), get.whole("num_hidden_layers")
    kv_heads = get.whole("num_key_value_heads", heads)
    head_dim = get.whole("head_dim", hidden // heads)
    max_position = get.whole("max_position_embeddings")
    if heads % kv_heads:
        raise YalisError(
            f"{label} has {heads} attention heads over {kv_heads} key/value heads; the first must be a multiple"
        )
    eos = config.get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise YalisError(f"eos_token_id in {label} is {eos!r}; it must be a token id or a list of them")
    gemma = family == "gemma2"
    attention_bias = get.flag("attention_bias")
    return ModelSpec(
        family=family,
        hidden_size=hidden,
        intermediate_size=get.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=get.whole("vocab_size"),
        max_position=max_position,
        norm_eps=get.number("rms_norm_eps", 1e-6),
        rope=_rope(config, label, head_dim, max_position, family),
        windows=_windows(get, family, layers),
        attention_scale=(get.number("query_pre_attn_scalar", 256.0) if gemma else head_dim) ** -0.5,
        activation=_activation(config, label, gemma),
        tie_embeddings=get.flag("tie_word_embeddings"),
        dtype=_dtype(config),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=get.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        norm_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        embed_scale=hidden**0.5 if gemma else None,
        attention_softcap=get.cap("attn_logit_softcapping") if gemma else None,
        logit_softcap=get.cap("final_logit_softcapping") if gemma else None,
        fused_projections=family == "phi3",
    )


class _Reader:
    def __init__(self, config: dict[str, Any], label: str) -> None:
        self.config, self.label = config, label

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be true or false")
        return bool(value)

    def cap(self, key: str) -> float | None:
        return None if self.config.get(key) is None else self.number(key, 0.0)


def _family(config: dict[str, Any], label: str) -> str:
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name][0]
    if not names and any(config.get("model_type") == family for family, _ in FAMILIES.values()):
        return str(config["model_type"])
    known = ", ".join(f"{name} ({models})" for name, (_, models) in FAMILIES.items())
    what = names[0] if names else config.get("model_type")
    if what is None:
        raise YalisError(f"{label} names no architecture; take a model whose config.json does; known: {known}")
    raise YalisError(f"{label} asks for architecture {what!r}, which is not supported; known: {known}")


def _activation(config: dict[str, Any], label: str, gemma: bool) -> str:
    name = config.get("hidden_activation") or ("gelu_pytorch_tanh" if gemma else config.get("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise YalisError(f"{label} asks for activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(get: _Reader, family: str, layers: int) -> tuple[int | None, ...]:
    """Llama has none, Mistral and Phi-3 the same in every layer, Qwen in its later layers, Gemma in every other one."""
    silent = get.config.get("sliding_window") is None
    if silent or family == "llama" or (family.startswith("qwen") and not get.flag("use_sliding_window")):
        return (None,) * layers
    window = get.whole("sliding_window")
    if family in ("mistral", "phi3"):
        return (window,) * layers
    types = get.config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise YalisError(
                f"{get.label} gives {len(types)} layer_types for {layers} layers; it must give one for each"
            )
        slides = [kind == "sliding_attention" for kind in types]
    elif family == "gemma2":
        slides = [index % 2 == 0 for index in range(layers)]
    else:
        first = get.config.get("max_window_layers", 28)
        slides = [index >= first for index in range(layers)]
    return tuple(window if slide else None for slide in slides)


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "bfloat16"


def _rope(config: dict[str, Any], label: str, head_dim: int, max_position: int, family: str) -> RopeSpec:
    """Both spellings are read: transformers 5's rope_parameters, and rope_theta with rope_scaling before it."""
    rope: dict[str, Any] = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    }
    rope.update(config.get("rope_scaling") or {})
    rope.update(config.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or 10000.0)
    dim = int(head_dim * float(rope.get("partial_rotary_factor") or 1.0))
    if dim % 2 or dim < 2:
        raise YalisError(f"{label} rotates {dim} dimensions of a head, and they go in pairs; head_dim must be even")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
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
            short, long = tuple(rope["short_factor"]), tuple(rope["long_factor"])
            if len(short) != dim // 2 or len(long) != dim // 2:
                raise YalisError(
                    f"{label} gives {len(short)} short and {len(long)} long rope factors; {dim // 2} of each are needed"
                )
            return RopeSpec(theta, dim, kind, scale, stretch, original, short_factor=short, long_factor=long)
    except KeyError as missing:
        raise YalisError(f"{label} asks for {kind} rope scaling but lacks its {missing} entry") from None
    raise YalisError(f"{label} asks for rope scaling {kind!r}; known: default, linear, llama3, yarn, longrope")


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
