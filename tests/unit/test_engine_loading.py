"""Peak memory of loading a model: its parameters plus less than one tensor."""

from __future__ import annotations

import torch
import transformers

from tests.peak_memory import peak_extra_bytes
from yalis.checkpoint.resolve import open_checkpoint
from yalis.models.decoder import Decoder
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.spec import read_spec


def test_loading_needs_less_than_one_tensor_of_extra_memory(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=65_536,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="100MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(str(tmp_path))
    spec = read_spec(checkpoint.config)
    model = Decoder(spec, Grid(), Stage(), 128, torch.float32, torch.device("cpu"))  # allocated, but not resident yet
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    largest = 65_536 * 512 * 4
    assert size > 1.5 * largest
    extra = peak_extra_bytes(lambda: model.load(checkpoint)) - size
    assert extra < largest / 2, f"{extra / 2**20:.0f} MiB in addition to the parameters"
