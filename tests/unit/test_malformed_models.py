"""Model files that `make fuzz` found to end with another exception than YalisError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import CASES
from tests.gguf_files import write_gguf
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.gguf_config import GgufMetadata
from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.safetensors import INDEX
from yalis.errors import YalisError
from yalis.spec import read_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


@pytest.mark.parametrize("names", [5, [[]], [{}], {"a": 1}, [None]])
def test_architectures_of_other_types(tmp_path: Path, names: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": names}))
    with pytest.raises(YalisError, match="architecture"):
        read_spec(open_checkpoint(str(tmp_path), "random").config)


@pytest.mark.parametrize(
    "rope",
    [
        {**YARN, "rope_theta": -1},
        {**YARN, "rope_theta": 1},
        {**YARN, "beta_fast": 1e308},
        {**YARN, "factor": float("nan")},
        {**LLAMA3, "low_freq_factor": 0.0},
        {**LLAMA3, "high_freq_factor": 1.0},
        {**LONGROPE, "short_factor": [1.0, 1.0, 1.0, 0.0]},
        {"rope_type": "linear", "factor": -2.0},
    ],
)
def test_rope_settings_without_frequencies(rope: dict[str, Any]) -> None:
    with pytest.raises(YalisError, match=r"RoPE settings of config\.json are out of range"):
        read_spec({**CONFIG, "rope_parameters": rope})


def test_rope_factors_that_are_no_numbers() -> None:
    with pytest.raises(YalisError, match="makes no sense"):
        read_spec({**CONFIG, "rope_parameters": {**LONGROPE, "long_factor": [1.0, 1.0, 1.0, "x"]}})


@pytest.mark.parametrize("value", [[[1], [1]], [], [[]], ["x"], "4", True, float("nan"), {}])
def test_gguf_metadata_of_other_types(value: Any) -> None:
    metadata = GgufMetadata({"general.architecture": "llama", "llama.block_count": value}, {}, "a.gguf")
    with pytest.raises(YalisError, match=r"llama\.block_count in a\.gguf is"):
        metadata.integer("block_count")


@pytest.mark.parametrize(
    ("factors", "message"), [([0.0] * 8, "factors that are not positive"), ([[1.0, 2.0]] * 2, "is not a vector")]
)
def test_gguf_rope_factors(tmp_path: Path, factors: Any, message: str) -> None:
    write_gguf(tmp_path / "a.gguf", CASES[0].build(seed=3), factors={"rope_freqs": np.array(factors)})
    with pytest.raises(YalisError, match=message):
        GgufCheckpoint(tmp_path / "a.gguf")


def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "x" * 300}}))
    with pytest.raises(YalisError, match="lacks the shard"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Phi3ForCausalLM", "partial_rotary_factor", 3.0),  # wrote beyond the head in native code
        ("Phi3ForCausalLM", "partial_rotary_factor", -0.5),
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", -9),  # its root was a complex number
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", 0),
    ],
)
def test_factors_out_of_range(tmp_path: Path, architecture: str, key: str, value: float) -> None:
    config = {**CONFIG, "architectures": [architecture], "head_dim": 8, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(YalisError, match=key):
        read_spec(open_checkpoint(str(tmp_path), "random").config)
