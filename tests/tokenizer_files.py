"""Small tokenizers of the two kinds there are: byte-level, and sentencepiece-like with bytes to fall back on."""

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
    """As GPT-2's: every byte is a piece, so any text can be spelled; <|start|> comes first by default."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(TEXT, trainer)
    made.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|start|>", eos_token="<|end|>")


def byte_fallback() -> Any:
    """As Llama 2's: words with a mark for the space before them, and raw bytes for what is not among the words."""
    import tokenizers
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilortw", "▁h", "lo"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("l", "o")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save(hf: Any, folder: Path, template: str | None = TEMPLATE) -> Path:
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder
