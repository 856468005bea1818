"""Small tokenizers of the two usual types: byte-level BPE, and SentencePiece-like with byte fallback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "the end of the world is here"] * 4
VARIED = [
    "Hello  world",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "def f(x):\n    return {'a': [1, 22, 333]}  # code\n",
    "Grüße, naïve café — “quotes”…",
    "日本語のテキスト と 한국어",
    "emoji 🎉👩‍👩‍👧‍👦 and \u0301 combining",
    "numbers 12345 3.14e-10 0x1F",
    "<|im_start|>user\nspecial<|im_end|>",
    "\u00a0\u2003odd spaces\u200b\ufeff",
    "a",
    " ",
]


def byte_level() -> Any:
    """Like GPT-2: every byte is a token, so any text can be encoded; <|start|> is prepended by default."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")


def byte_fallback() -> Any:
    """Like Llama 2: words with a mark for the preceding space, and raw bytes for everything else."""
    import tokenizers
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilortw", "▁h", "lo"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "h"), ("l", "o")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def characters() -> Any:
    """A token for each printable ASCII character and the line break, for models with a small vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "".join(map(chr, range(32, 127))) + "\n"
    names = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(letters)[0][0]
    tokenizer = tokenizers.Tokenizer(models.BPE({name: token for token, name in enumerate([*names, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save(hf: Any, folder: Path, template: str | None = TEMPLATE) -> Path:
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder
