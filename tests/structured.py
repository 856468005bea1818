"""A tiny random model whose tokenizer has special tokens, for tests of structured outputs."""

from __future__ import annotations

from pathlib import Path

from tests.tokenizer_files import byte_level


def save_model(folder: Path, max_position: int = 512) -> Path:
    """Save a Llama with a byte-level tokenizer; <|end|> is its EOS token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max_position, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
