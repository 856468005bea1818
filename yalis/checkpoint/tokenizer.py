"""Text to token ids and back, with the tokenizer and the chat template that came with a model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from yalis import env
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.resolve import locate
from yalis.errors import YalisError, first_line
from yalis.types import Message

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_CACHE_FORMAT = 1  # raised when a tokenizer built here would come out different
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A transformers tokenizer, and the ids that end a text."""

    def __init__(self, hf: Any, ends: tuple[int, ...], label: str) -> None:
        self.hf = hf
        self.label = label
        own = hf.eos_token_id
        self.eos_ids = ends if own is None or own in ends else (*ends, int(own))

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    def encode(self, text: str) -> list[int]:
        """With the special tokens that transformers adds by default, such as Llama's first token."""
        return self._ids(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The messages in the model's own format, up to where its answer begins."""
        if not getattr(self.hf, "chat_template", None):
            raise YalisError(f"{self.label} has no chat template; give a plain prompt, or take a model made for chat")
        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's makers and raises what it likes
            reason = first_line(error)
            raise YalisError(f"the chat template of {self.label} does not accept these messages ({reason})") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            odd = text[error.start].encode("unicode_escape").decode()
            raise YalisError(
                f"the text holds {odd}, which is half a character or a byte that is not UTF-8; give UTF-8 text"
            ) from None
        return list(self.hf.encode(text, **options))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Exactly what the tokens spell: spaces before punctuation stay."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.hf.decode(list(ids), **options))

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single raw byte, whose text depends on the bytes after it."""
        piece = self.hf.convert_ids_to_tokens(token)
        return piece is not None and _BYTE.fullmatch(piece) is not None


def load_tokenizer(model: Checkpoint | str, override: str | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint (or of what a user would name one by); None where it has none.

    `override` names another folder, repo id or .gguf file to take it from.
    """
    if override is not None:
        try:
            place, label = locate(override, weights=False), override
        except YalisError as error:
            raise type(error)(f"--tokenizer: {error}") from error
    elif isinstance(model, str):
        place, label = locate(model, weights=False), model
    else:
        place, label = model.source, model.label
    hf = _from_gguf(place) if place.is_file() and place.suffix != ".json" else _from_folder(place)
    if hf is None:
        if override is not None:
            raise YalisError(f"{override} holds no tokenizer; give --tokenizer a folder with tokenizer.json")
        return None
    return Tokenizer(hf, eos_token_ids(model) if isinstance(model, Checkpoint) else (), label)


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json says so, else config.json."""
    value = checkpoint.config.get("eos_token_id")
    with suppress(OSError, ValueError, AttributeError):
        content = json.loads((checkpoint.source / "generation_config.json").read_text(encoding="utf-8"))
        value = value if content.get("eos_token_id") is None else content["eos_token_id"]
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _from_folder(folder: Path) -> Any:
    folder = folder if folder.is_dir() else folder.parent
    if not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # transformers raises many kinds here
        reason = first_line(error)
        raise YalisError(f"cannot read the tokenizer in {folder} ({reason}); name another with --tokenizer") from error


def _from_gguf(path: Path) -> Any:
    """Built from the file's metadata by transformers, which takes seconds; so the result is kept in the cache."""
    checkpoint = GgufCheckpoint(path)
    if not checkpoint.metadata.get("tokenizer.ggml.tokens"):
        return None
    import transformers

    made = f"{_CACHE_FORMAT}:{transformers.__version__}:{checkpoint.header_digest}"
    folder = env.cache_dir() / "tokenizers" / hashlib.sha256(made.encode()).hexdigest()[:32]
    if folder.is_dir():
        with suppress(Exception):  # a damaged entry is built again
            return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        shutil.rmtree(folder, ignore_errors=True)
    try:  # the class AutoTokenizer comes to as well, after walking the vocabulary three times more
        hf = transformers.PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        raise YalisError(
            f"cannot build a tokenizer from {path} ({first_line(error)}); name a tokenizer's folder with --tokenizer"
        ) from error
    _mend(hf, checkpoint.metadata)
    with suppress(OSError):  # without a cache it is built every time
        _keep(hf, folder)
    return hf


def _mend(hf: Any, metadata: dict[str, Any]) -> None:
    """What some versions of transformers leave out of the file's wishes."""
    from tokenizers import decoders
    from tokenizers.processors import TemplateProcessing

    tokens = metadata["tokenizer.ggml.tokens"]
    for name in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and token < len(tokens):
            setattr(hf, f"{name}_token", tokens[token])
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        hf.backend_tokenizer.decoder = decoders.ByteLevel()  # not one that drops a space in front
    first = hf.bos_token_id
    if metadata.get("tokenizer.ggml.add_bos_token") and first is not None and hf.encode("a")[:1] != [first]:
        special = [(hf.bos_token, first)]
        hf.backend_tokenizer.post_processor = TemplateProcessing(single=f"{hf.bos_token} $A", special_tokens=special)


def _keep(hf: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(dir=folder.parent)
    try:
        hf.save_pretrained(made)
        os.replace(made, folder)  # whole or not at all; a second builder finds it taken
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
