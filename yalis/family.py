"""The settings in which a model family may differ from the others, and helpers that several families use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError


class GgufReader(Protocol):
    """Typed access to the metadata of a GGUF file; keys omit the architecture prefix ("llama.")."""

    architecture: str  # general.architecture
    model_name: str  # general.name
    label: str

    def integer(self, key: str, default: int | None = None) -> int: ...

    def number(self, key: str, default: float | None = None) -> float: ...

    def flag(self, key: str, default: bool) -> bool: ...

    def has_tensor(self, name: str) -> bool: ...

    def layer_types(self, period: int) -> list[str]: ...


@dataclass(frozen=True)
class GgufFormat:
    """How llama.cpp's converter stores a family in a GGUF file."""

    architecture: str  # the file's general.architecture
    #: GGUF tensor name -> Hugging Face name within a layer, where it differs from gguf_config.LAYER_TENSORS.
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    interleaved_heads: bool = False  # rows of q_proj and k_proj are reordered for RoPE on pairs (2i, 2i + 1)
    rope_dim_is_head_dim: bool = False  # without attention.key_length, rope.dimension_count is the head size
    #: Returns further config.json entries; gets the metadata and the entries common to all families.
    extra_config: Callable[[GgufReader, Mapping[str, Any]], dict[str, Any]] = lambda metadata, config: {}
    #: Decides between families that share an architecture name; None: used when no other matches.
    matches: Callable[[GgufReader], bool] | None = None


@dataclass(frozen=True)
class BlockNorms:
    """The names of a layer's norms in the checkpoint. None: the layer has no norm there."""

    attention: str | None = "input_layernorm"  # of the input of attention
    attention_out: str | None = None  # of its output, before the residual is added
    mlp: str | None = "post_attention_layernorm"  # of the input of the MLP
    mlp_out: str | None = None

    @property
    def count(self) -> int:
        return sum(name is not None for name in (self.attention, self.attention_out, self.mlp, self.mlp_out))


PRE_NORMS = BlockNorms()
#: Norms around attention and MLP (Gemma).
SANDWICH_NORMS = BlockNorms(
    attention_out="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
)
#: One norm, of the input that attention and MLP share.
PARALLEL_NORM = BlockNorms(mlp=None)
#: Norms only after attention and MLP (OLMo 2).
POST_NORMS = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    name: str  # config.json's model_type
    architecture: str  # config.json's "architectures" entry
    models: str  # released models, for messages
    gguf: GgufFormat | None = None  # None: GGUF files of this family cannot be read
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' value of keys a config.json leaves out
    #: Returns, per layer, whether it uses the sliding window. None: the family ignores sliding_window.
    sliding_layers: Callable[[ConfigReader, int], Sequence[bool]] | None = None
    activation: str | None = None  # replaces hidden_act, which this family's config.json may hold but does not use
    qkv_bias: bool = False  # q, k and v always have biases; otherwise attention_bias decides
    qk_norm: bool = False
    norm_offset: float = 0.0
    norm_eps: str = "rms_norm_eps"  # config.json's key
    block_norms: BlockNorms = PRE_NORMS
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # other names for a RoPE scaling type
    partial_rotary: bool = False  # honours partial_rotary_factor, which transformers ignores in the other families
    query_scaling: bool = False  # honours llama_4_scaling_beta of the RoPE parameters
    default_rope: Mapping[str, Any] = field(default_factory=dict)  # RoPE parameters of a config.json without any
    #: Returns, per layer, whether it has RoPE. None: every layer has.
    rope_layers: Callable[[ConfigReader, int], Sequence[bool]] | None = None
    #: Returns the RoPE parameters of sliding layers, where rope_parameters does not give them by layer type. None: all
    #: layers have the same.
    sliding_rope: Callable[[ConfigReader], dict[str, Any]] | None = None
    mxfp4_experts: bool = False  # fused experts may be stored as MXFP4, which is dequantized on load
    #: Returns ModelSpec fields computed from config.json keys that only this family has.
    spec_fields: Callable[[ConfigReader], dict[str, Any]] = lambda config: {}

    @property
    def gguf_format(self) -> GgufFormat:
        """The GGUF format of a family that find_gguf_family() returns."""
        assert self.gguf is not None
        return self.gguf


def every_layer(config: ConfigReader, num_layers: int) -> list[bool]:
    return [True] * num_layers


def listed_layers(config: ConfigReader, num_layers: int) -> list[bool] | None:
    """Return which layers config.json's layer_types lists as sliding, or None if it has no such key."""
    types = config.config.get("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise YalisError(
            f"{config.label} gives {len(types)} layer_types for {num_layers} layers; it must give one for each"
        )
    if unknown := [name for name in types if name not in ("sliding_attention", "full_attention")]:
        raise YalisError(
            f"{config.label} has {unknown[0]!r} among its layer_types, which is not supported; supported: "
            "sliding_attention, full_attention"
        )
    return [layer_type == "sliding_attention" for layer_type in types]


def patterned_layers(config: ConfigReader, num_layers: int, period: int) -> list[bool]:
    """Return which layers slide: those that layer_types lists, or all but the last of each `period` layers. The config
    may give another period as sliding_window_pattern."""
    if (listed := listed_layers(config, num_layers)) is not None:
        return listed
    period = config.integer("sliding_window_pattern", period)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]
