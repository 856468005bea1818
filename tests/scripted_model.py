"""A model that generates given texts: each token is followed by one certain token, whatever came before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def save_scripted(
    folder: Path, scripts: Mapping[str, Sequence[str]], template: str, special: Sequence[str] = ()
) -> Path:
    """Save a model that answers a prompt which ends with the character `key` with the pieces of `scripts[key]`.

    Each piece is a token, and no two pieces of all scripts may be equal; they have at least two bytes. Those in
    `special` are special tokens. After other characters the answer is empty.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def as_token(text: str) -> str:
        return byte_level.pre_tokenize_str(text)[0][0]

    vocab = {letter: token for token, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pieces = [piece for script in scripts.values() for piece in script]
    for piece in (*(as_token(piece) for piece in pieces if piece not in special), *special, "<end>"):
        assert piece not in vocab, f"{piece!r} is used twice"
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_level, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", extra_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)

    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=len(vocab) + -len(vocab) % 64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
        eos_token_id=vocab["<end>"], bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()  # the residual stream stays the embedding of the last token
        model.model.embed_tokens.weight.copy_(torch.eye(len(vocab), config.hidden_size))
        followers = dict.fromkeys(range(len(vocab)), vocab["<end>"])
        for key, script in scripts.items():
            tokens = [vocab[key], *(vocab[piece if piece in special else as_token(piece)] for piece in script)]
            followers |= dict(zip(tokens, [*tokens[1:], vocab["<end>"]], strict=True))
        model.lm_head.weight.zero_()
        for token, follower in followers.items():
            model.lm_head.weight[follower, token] = 10.0
    model.save_pretrained(folder)
    return folder
