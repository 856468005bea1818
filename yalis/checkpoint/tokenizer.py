"""Encodes and decodes text with the tokenizer and chat template of a model."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from yalis.cache_folders import cache_folder
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.deadline import call_with_deadline
from yalis.checkpoint.generation_config import read_generation_config
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.resolve import locate
from yalis.checkpoint.unsupported import refuse_lfs_pointer
from yalis.errors import YalisError, first_line
from yalis.types import Message

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_ROLES = ("user", "assistant", "system", "developer", "tool")
_CACHE_FORMAT = 1  # increment when a tokenizer built from GGUF metadata changes
_TEMPLATE_SECONDS = 3.0  # thousands of times what a template needs; nested loops could run forever
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A transformers tokenizer, and the EOS token ids of its model."""

    def __init__(self, hf: Any, eos_ids: tuple[int, ...], label: str) -> None:
        self.hf = hf
        self.label = label
        eos = hf.eos_token_id
        self._max_tokens = 0
        self._max_chars: int | None = None  # longer texts are refused: tokenizing takes seconds and gigabytes
        self.eos_ids = eos_ids if eos is None or eos in eos_ids else (*eos_ids, int(eos))

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    def limit_text(self, max_tokens: int) -> None:
        """Refuse texts that certainly have more tokens than this, before they are tokenized."""
        self._max_chars = None if (longest := _longest_token(self.hf)) is None else max_tokens * longest
        self._max_tokens = max_tokens

    def encode(self, text: str) -> list[int]:
        """Encode with the special tokens that transformers adds by default, such as Llama's BOS token."""
        return self._ids(text)

    def encode_chat(self, messages: Sequence[Message], template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Encode the messages with the chat template, including the generation prompt.

        `template_kwargs`: variables of the template, such as {"enable_thinking": False} or {"tools": [...]}.
        """
        if not getattr(self.hf, "chat_template", None):
            raise YalisError(f"{self.label} has no chat template; give a plain prompt, or use a model made for chat")
        self._check_operators()
        self._check_roles(messages)
        variables = self._check_variables(template_kwargs)
        render = partial(
            self.hf.apply_chat_template, list(messages), tokenize=False, add_generation_prompt=True, **variables
        )
        try:
            text = call_with_deadline(render, _TEMPLATE_SECONDS)
        except Exception as error:  # a template is a program and may raise any type
            reason = first_line(error)
            raise YalisError(f"the chat template of {self.label} does not accept these messages ({reason})") from error
        return self._ids(text, add_special_tokens=False)

    def _check_operators(self) -> None:
        """Raise YalisError for a template with a power: a huge one computes for hours, and no exception ends it."""
        templates = self.hf.chat_template
        for template in templates.values() if isinstance(templates, dict) else (templates,):
            if _has_power(str(template)):
                raise YalisError(
                    f"the chat template of {self.label} uses the operator **, which is not accepted; "
                    "give a plain prompt"
                )

    def _check_variables(self, variables: Any) -> dict[str, Any]:
        """Raise YalisError for arguments of apply_chat_template(), which would change more than the template does."""
        if variables is not None and not (
            isinstance(variables, dict) and all(isinstance(key, str) for key in variables)
        ):
            raise YalisError(
                f'chat_template_kwargs is {variables!r}; give a dict, such as {{"enable_thinking": False}}'
            )
        tools = (variables or {}).get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise YalisError("tools is not a list of JSON schemas; give [{'type': 'function', 'function': {...}}]")
        for name in set(variables or ()) - {"tools"}:
            if name in inspect.signature(self.hf.apply_chat_template).parameters or name == "messages":
                raise YalisError(
                    f"chat_template_kwargs has {name!r}, which is not a variable of the chat template; give generate() "
                    "the text of llm.tokenizer.hf.apply_chat_template(...)"
                )
        return variables or {}

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Raise YalisError for a misspelled role. Templates may have roles of their own, such as ipython."""
        for index, message in enumerate(messages, 1):
            role, template = message["role"], str(self.hf.chat_template)
            if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
                raise YalisError(
                    f"message {index} has the role {role!r}, which the chat template of {self.label} does not have; "
                    f"accepted: {', '.join(_ROLES)}"
                )

    def _ids(self, text: str, **options: bool) -> list[int]:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise YalisError(
                f"the prompt has {len(text)} characters, but the context holds {self._max_tokens} tokens, which are at "
                f"most {self._max_chars} characters; shorten it"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            odd = text[error.start].encode("unicode_escape").decode()
            raise YalisError(
                f"the text contains {odd}, half a character or a byte that is not UTF-8; give UTF-8 text"
            ) from None
        return list(self.hf.encode(text, **options))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode without clean-up: spaces before punctuation stay."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.hf.decode(list(ids), **options))

    def keeping(self, special_tokens: Collection[str]) -> Tokenizer | KeepingDecoder:
        """Return a decoder that keeps these special tokens in the text and skips the others."""
        return KeepingDecoder(self, special_tokens) if special_tokens else self

    def token_text(self, token: int) -> str:
        """Return the text of a single token with its leading space; bytes that are not a character become U+FFFD."""
        piece = self.hf.convert_ids_to_tokens(token) or ""
        if "\u2581" in piece:  # SentencePiece's mark for a space, which decode() drops at the start of a text
            return str(piece).replace("\u2581", " ")
        return self.decode([token], skip_special_tokens=False)

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single raw byte, whose text depends on the bytes that follow."""
        text = self.hf.convert_ids_to_tokens(token)
        return text is not None and _BYTE.fullmatch(text) is not None


class KeepingDecoder:
    """Decodes as its tokenizer does, but does not skip some of the special tokens."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: Collection[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.hf.added_tokens_decoder
        special = {*tokenizer.hf.all_special_ids, *(token for token, text in added.items() if text.special)}
        self._skipped = {token for token in special if tokenizer.hf.convert_ids_to_tokens(token) not in special_tokens}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._skipped]
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def is_byte(self, token: int) -> bool:
        return self._tokenizer.is_byte(token)


def _longest_token(hf: Any) -> int | None:
    """Return the most characters that a token can stand for; None if that is not known, as with unknown words."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return None
    model = backend.model
    is_bytes = "ByteLevel" in str(getattr(backend, "pre_tokenizer", "")) and not getattr(model, "unk_token", None)
    if not is_bytes and not getattr(model, "byte_fallback", False):
        return None
    shortened = 1 if backend.normalizer is None else 4  # normal forms of Unicode join characters
    return shortened * max(map(len, hf.get_vocab()))


def load_tokenizer(model: Checkpoint | str, override: str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint or of what `model` accepts; None if it has none.

    `override` (tokenizer=) names a folder, repo id or .gguf file to use instead.
    """
    if override is not None:
        try:
            path, label = locate(override, weights=False), override
        except YalisError as error:
            raise type(error)(f"tokenizer: {error}") from error
    elif isinstance(model, str):
        path, label = locate(model, weights=False), model
    else:
        path, label = model.source, model.label
    hf = _from_gguf(path) if path.is_file() and path.suffix != ".json" else _from_folder(path)
    if hf is None:
        if override is not None:
            raise YalisError(f"{override} has no tokenizer; give tokenizer= a folder with tokenizer.json")
        return None
    return Tokenizer(hf, eos_token_ids(model) if isinstance(model, Checkpoint) else (), label)


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the EOS token ids of generation_config.json, or else of config.json."""
    value = read_generation_config(checkpoint.source).get("eos_token_id")
    value = checkpoint.config.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _from_folder(folder: Path) -> Any:
    folder = folder if folder.is_dir() else folder.parent
    if not any((folder / name).is_file() for name in _FILES):
        return None
    for name in _FILES:
        refuse_lfs_pointer(folder / name)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises many types here
        if "trust_remote_code" in str(error):
            raise YalisError(
                f"the tokenizer in {folder} needs the Python code of its folder, which is never executed; name another "
                "with tokenizer="
            ) from error
        reason = first_line(error)
        raise YalisError(f"cannot read the tokenizer in {folder} ({reason}); name another with tokenizer=") from error


def _from_gguf(path: Path) -> Any:
    """Return a tokenizer built by transformers from the file's metadata, and cached because that takes seconds."""
    checkpoint = GgufCheckpoint(path)
    if not checkpoint.metadata.get("tokenizer.ggml.tokens"):
        return None
    import transformers

    key = f"{_CACHE_FORMAT}:{transformers.__version__}:{checkpoint.header_digest}"
    folder = cache_folder("tokenizers") / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.is_dir():
        with suppress(Exception):  # a damaged cache entry is rebuilt
            return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False)
        shutil.rmtree(folder, ignore_errors=True)
    try:  # AutoTokenizer returns the same class, after reading the vocabulary three more times
        hf = transformers.PreTrainedTokenizerFast.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:
        raise YalisError(
            f"cannot build a tokenizer from {path} ({first_line(error)}); name a tokenizer's folder with tokenizer="
        ) from error
    _apply_metadata(hf, checkpoint.metadata)
    with suppress(OSError):  # without a writable cache it is built every time
        _cache(hf, folder)
    return hf


def _apply_metadata(hf: Any, metadata: dict[str, Any]) -> None:
    """Apply settings of the GGUF metadata that some versions of transformers ignore."""
    from tokenizers import decoders
    from tokenizers.processors import TemplateProcessing

    tokens = metadata["tokenizer.ggml.tokens"]
    for name in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and token < len(tokens):
            setattr(hf, f"{name}_token", tokens[token])
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        hf.backend_tokenizer.decoder = decoders.ByteLevel()  # instead of one that drops a leading space
    bos = hf.bos_token_id
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None and hf.encode("a")[:1] != [bos]:
        special = [(hf.bos_token, bos)]
        hf.backend_tokenizer.post_processor = TemplateProcessing(single=f"{hf.bos_token} $A", special_tokens=special)


def _cache(hf: Any, folder: Path) -> None:
    temporary = tempfile.mkdtemp(dir=folder.parent)
    try:
        hf.save_pretrained(temporary)
        os.replace(temporary, folder)  # atomic; fails if another process was first
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)


@lru_cache(maxsize=8)
def _has_power(template: str) -> bool:
    """Return whether a Jinja template uses ** as an operator; f(**values) unpacks a dict."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tokens = [value for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:
        return False  # rendering reports it
    return any(token == "**" and before not in ("(", ",") for before, token in pairwise(tokens))
