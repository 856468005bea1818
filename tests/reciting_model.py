"""A tiny Llama that recites given texts: what a test of a client needs to get a certain answer from a real server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: The last character of the last message selects the text.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ messages[-1].content[-1] }}"


def save_reciting_model(folder: Path, texts: Mapping[str, str], endless: Mapping[str, str]) -> Path:
    """Save a model that answers a message ending in a key with that text, or repeats that text without an end.

    The hidden state is the last token as a one-hot vector, attention and MLP add nothing, and the LM head maps each
    token to the one that follows it. So every piece of the texts is a token of its own.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    end = vocab["<end>"] = len(vocab)
    follows: dict[int, int] = {}
    for key, text in [*texts.items(), *endless.items()]:
        ids = [vocab.setdefault(piece, len(vocab)) for piece in _pieces(encode.pre_tokenize_str(text)[0][0], vocab)]
        follows.update(zip([vocab[key], *ids], [*ids, ids[0] if key in endless else end], strict=True))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = encode, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=-(-len(vocab) // 64) * 64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, max_position_embeddings=65536, eos_token_id=end,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        model.lm_head.weight.zero_()
        for token in vocab.values():
            model.lm_head.weight[follows.get(token, end), token] = 8.0  # certain also at temperature 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


def _pieces(text: str, used: Mapping[str, int]) -> list[str]:
    """Cut a text into pieces of at least three characters that are all different, and not in `used`."""
    pieces: list[str] = []
    start = 0
    for stop in range(1, len(text) + 1):
        piece = text[start:stop]
        if len(piece) >= 3 and piece not in used and piece not in pieces:
            pieces.append(piece)
            start = stop
    last = pieces.pop() + text[start:]
    return [*pieces, last]
