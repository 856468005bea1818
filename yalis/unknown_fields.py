"""Keys of config.json that no model family here honours: a config that sets one is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.errors import YalisError

#: Key -> (the values, besides null, that leave the mathematics as it is; what other values ask for).
_UNKNOWN_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "alibi": ((False,), "attention biases by distance instead of RoPE"),
    "attention_chunk_size": ((), "attention in chunks"),
    "attn_temperature_tuning": ((False,), "queries scaled by position"),
    "clip_qkv": ((), "clamped queries, keys and values"),
    "lm_head_bias": ((False,), "a bias of lm_head"),
    "qk_layernorm": ((False,), "a layer norm for each query and key head"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
    "use_cla": ((False,), "keys and values shared by layers"),
}


def list_unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json that ask for mathematics that is not covered, with their values and meanings."""
    return [
        f"{key} {config[key]!r} ({meaning})"
        for key, (neutral, meaning) in _UNKNOWN_FIELDS.items()
        if config.get(key) is not None and config[key] not in neutral
    ]


def refuse_unknown_fields(config: ConfigReader) -> None:
    """Raise an error that names the keys of the config whose mathematics is not covered, if it has any."""
    if unknown := list_unknown_fields(config.config):
        raise YalisError(f"{config.label} has {'; '.join(unknown)}, which is not supported; use a model without it")
