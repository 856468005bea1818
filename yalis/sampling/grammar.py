"""Compiles structured outputs to matchers, which return the tokens that may come next in an answer.

The library is llguidance. It refuses what it does not support instead of ignoring it, and has limits on the work of
compilation and of each mask.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.structured_outputs import GrammarError, GrammarQueueFull, StructuredOutputs

#: Compiled grammars kept, and the bytes of their texts: compiled, a text takes up to about 150 times its size.
MAX_CACHED = 256
MAX_CACHED_BYTES = 4 << 20
#: Limits of llguidance: a compilation takes at most about 3 s and 300 MB, the mask of a row at most about 20 ms, and
#: the states of a row at most about 40 MB. See LLParserLimits for what each of them counts.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
_TOO_COMPLEX = re.compile(r"too (big|large|many)|fuel|exceed|unable to determine if regex is empty", re.IGNORECASE)
_POSITION = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")
_ADVICE = re.compile(r"; either increase limits\.(\w+).*")  # of llguidance, to the program that uses it
# Compiling a million remainders takes 8 s.
_MAX_MULTIPLE = 100_000
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
# Seconds to wait for the compilations of other threads. One at a time bounds their memory.
_MAX_WAIT = 30.0
_JSON_OPTIONS = {
    # A space, or a line break with indentation: models that may write any whitespace sometimes write nothing else.
    "whitespace_pattern": r"[ ]|\n[ \t]{0,32}",
    # No \u: "n\u0061me" is the property "name", and llguidance would check it as a property of another name.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}

Bits = NDArray[np.int32]


class Matcher:
    """The state of one answer."""

    def __init__(self, matcher: Any, words: int) -> None:
        """`words`: of 32 tokens each, as many as hold the vocabulary of the tokenizer."""
        self._matcher, self._words = matcher, words
        self.num_tokens = 0  # consumed

    def copy(self) -> Matcher:
        copy = Matcher(self._matcher.deep_copy(), self._words)
        copy.num_tokens = self.num_tokens
        return copy

    def consume(self, tokens: list[int]) -> bool:
        """Advance by tokens of the answer. Returns False if they do not match, or if a limit is exceeded."""
        self.num_tokens += len(tokens)
        matched: bool = self._matcher.consume_tokens(tokens)
        return matched

    def next_tokens(self) -> Bits | None:
        """Return the tokens that may come next, 32 in a word, the lowest bit first; None if there are none.

        A complete answer may only be followed by EOS.
        """
        bits = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error() or not bits.any():
            return None
        return bits

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """The reason of a failure."""
        lines = str(self._matcher.get_error()).strip().splitlines()
        return lines[0].rstrip(".:") if lines else "no token can come next"


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, once each. Any thread may call it."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos: frozenset[int], model: str
    ) -> None:
        """`load_tokenizer` is called on first use. `vocab_size`: logits of the model. `model`: its name, for errors."""
        self._load_tokenizer, self._vocab_size, self._eos, self._model = load_tokenizer, vocab_size, eos, model
        self._lock = threading.Lock()  # of the cache; a cached grammar waits for no compilation
        self._compiling = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Matcher | GrammarError] = OrderedDict()
        self._cached_bytes = 0  # of their texts

    def start(self, wanted: StructuredOutputs, must_wait: bool = False) -> Matcher:
        """Return a matcher in its initial state; raises GrammarError for what cannot be honoured.

        It can take seconds, in which the GIL is released. If other threads compile for longer than _MAX_WAIT, raises
        GrammarQueueFull, unless the caller must wait: a step of the engine cannot be tried again.
        """
        key = wanted.kind, wanted.text
        found = self._find(key)
        if found is None:
            if not self._compiling.acquire(timeout=-1 if must_wait else _MAX_WAIT):
                raise GrammarQueueFull(f"other schemas were compiled for {_MAX_WAIT:g} s; try again")
            try:
                found = self._find(key)  # another thread may have compiled it meanwhile
                if found is None:
                    found = self._try_compile(wanted)
                    self._store(key, found)
            finally:
                self._compiling.release()
        if isinstance(found, GrammarError):
            raise found.copy()
        return found.copy()

    def _find(self, key: tuple[str, str]) -> Matcher | GrammarError | None:
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def _store(self, key: tuple[str, str], compiled: Matcher | GrammarError) -> None:
        with self._lock:
            self._compiled[key] = compiled
            self._cached_bytes += len(key[1])
            while len(self._compiled) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
                (_, text), _ = self._compiled.popitem(last=False)
                self._cached_bytes -= len(text)

    def _try_compile(self, wanted: StructuredOutputs) -> Matcher | GrammarError:
        tokenizer, library = self._tokenizer, _import_library()
        try:
            grammar = _write_grammar(wanted, self._token_ids)
            matcher = Matcher(
                library.LLMatcher(tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**_LIMITS)),
                len(self._eos_bits),
            )
            first = matcher.next_tokens()
            if first is None or not (first & ~self._eos_bits).any():
                reason = matcher.error if first is None else "NoExtension"
                if "NoExtension" in reason:
                    reason = "no text matches it"
                raise _explain(reason, wanted.kind)
        except GrammarError as error:
            return error
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        """llguidance's view of the tokenizer."""
        library, tokenizer = _import_library(), self._load_tokenizer()
        if tokenizer is None:
            raise GrammarError(f"needs a tokenizer and {self._model} has none; give the folder of one with tokenizer=")
        if not self._eos:
            raise GrammarError(
                f"needs an EOS token, which ends an answer, and {self._model} names none; give the "
                "folder of a tokenizer that does with tokenizer="
            )
        backend = getattr(tokenizer.hf, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError(
                f"needs a fast tokenizer and that of {self._model} is a slow one; give the folder "
                "of one with tokenizer.json with tokenizer="
            )
        described, self._token_ids = _describe(backend.to_str())
        size = max(self._vocab_size, tokenizer.vocab_size)
        self._eos_bits = np.zeros(-(-size // 32), np.int32)
        set_bits(self._eos_bits, self._eos)
        return library.LLTokenizer(json.dumps(described), n_vocab=size, eos_token=sorted(self._eos))


def _describe(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a tokenizer.json for llguidance, and the added tokens by content.

    An added token such as <tool_call> marks structure, also where it is not special. As special tokens they are no text
    to llguidance: strings of an answer do not contain them. They are renamed, because llguidance tokenizes texts that a
    grammar prescribes, and those must not contain them either.
    """
    described = json.loads(text)
    described["truncation"] = described["padding"] = described["post_processor"] = None
    token_ids, renamed = {}, {}
    for added in described["added_tokens"]:
        content, token = str(added["content"]), int(added["id"])
        token_ids[content] = token
        renamed[content] = f"\ufdd0{token}\ufdd0"  # a noncharacter, which no text has
        added.update(special=True, content=renamed[content])
    model = described["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): token for piece, token in vocab.items()}
    elif isinstance(vocab, list):  # of a unigram model
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    return described, token_ids


def set_bits(bits: Bits, tokens: Iterable[int]) -> None:
    for token in tokens:
        bits.view(np.uint8)[token // 8] |= 1 << token % 8


def unless_required(allowed: Bits, banned: tuple[int, ...]) -> tuple[int, ...]:
    """Return the banned tokens; none if no other token is allowed, such as EOS after a complete answer."""
    of_banned = np.zeros_like(allowed)
    set_bits(of_banned, banned)
    return banned if (allowed & ~of_banned).any() else ()


def installed_version() -> str | None:
    """Return the version of llguidance without importing it; None if it is not installed."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return None


def _import_library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError("needs llguidance, which is not installed; type `pip install 'yalis[structured]'`") from None
    return llguidance


def _write_grammar(wanted: StructuredOutputs, token_ids: dict[str, int]) -> str:
    """Return the grammar in llguidance's form. `token_ids`: of the tokenizer's added tokens, by content."""
    matchers = _import_library().LLMatcher
    text = wanted.text
    if wanted.kind == "json_object":
        text = '{"type": "object"}'
    if wanted.kind in ("json", "json_object"):
        return str(matchers.grammar_from_json_schema(json.dumps(_add_options(text))))
    if wanted.kind == "regex":
        return str(matchers.grammar_from_regex(text))
    if wanted.kind == "choice":
        return str(matchers.grammar_from_lark("start: " + " | ".join(map(_quote, wanted.choice))))
    if wanted.kind == "tags":
        return str(matchers.grammar_from_lark(_write_tags(wanted, token_ids)))
    if "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # its parser raises bare exceptions
            raise GrammarError(f"cannot be used: {_shorten(str(error))}", "grammar") from None
    return str(matchers.grammar_from_lark(text))


def _write_tags(wanted: StructuredOutputs, token_ids: dict[str, int]) -> str:
    """Return a Lark grammar of the tags. Parts that are added tokens of the tokenizer are written as such."""
    rules = ["tag: " + " | ".join(f"tag{i}" for i in range(len(wanted.tags)))]
    for i, tag in enumerate(wanted.tags):
        begin, end = (_split_added(text, token_ids) for text in (tag.begin, tag.end))
        rules.append(f"tag{i}: {begin} json{i} {end}")
        rules.append(f"json{i}: %json {json.dumps(_add_options(str(tag.schema)))}")
    separator = _split_added(wanted.separator, token_ids)
    start = "start: tag" if wanted.single_tag else f"start: tag ({separator} tag)*"
    return "\n".join([start, *rules])


def _split_added(text: str, token_ids: dict[str, int]) -> str:
    """Return the terminals of a text: added tokens by id, the longest first, and strings between them."""
    parts, position, plain = [], 0, 0
    while position < len(text):
        found = max((token for token in token_ids if token and text.startswith(token, position)), key=len, default="")
        if found:
            parts += [_quote(text[plain:position]), f"<[{token_ids[found]}]>"]
            plain = position + len(found)
        position += len(found) or 1
    return " ".join(part for part in (*parts, _quote(text[plain:])) if part != '""')


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _add_options(text: str) -> dict[str, Any]:
    """Return the schema as a dict, with our options for llguidance instead of its own."""
    schema = json.loads(text)
    _check_schema(schema)
    return {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "x-guidance": _JSON_OPTIONS}


def _check_schema(schema: Any) -> None:
    """Raise GrammarError for what llguidance would compile for very long, or wrongly."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += (*value, *value.values())
            _check_multiple(value.get("multipleOf"))
        elif isinstance(value, str) and _CONTROL.search(value):  # could only be written as \\u, see _JSON_OPTIONS
            raise GrammarError(f"cannot honour the control character in {value!r}; remove it")


def _check_multiple(multiple: Any) -> None:
    """The automaton of multipleOf has a state for each remainder."""
    if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
        digits = f"{multiple:.12f}".replace(".", "").rstrip("0") if isinstance(multiple, float) else multiple
        if int(digits or 0) > _MAX_MULTIPLE:
            raise GrammarError(
                f"cannot honour multipleOf {multiple}; give one of at most {_MAX_MULTIPLE}, or remove it"
            )


def _explain(reason: str, kind: str) -> GrammarError:
    """Return the error for a message of llguidance about a field of StructuredOutputs."""
    if kind == "tags":  # the position is in a grammar that the user has not written
        reason = _POSITION.sub("", reason)
    if _TOO_COMPLEX.search(reason):
        reason = _ADVICE.sub(lambda found: f" ({found[1]} is {_LIMITS.get(found[1])})", reason)
        problem = f"exceeds a limit of the compilation ({_shorten(reason)}); make it simpler"
        return GrammarError(problem, kind, "grammar_too_complex")
    return GrammarError(f"cannot be used: {_shorten(reason)}", kind)


def _shorten(reason: str) -> str:
    line = reason.strip().splitlines()[0] if reason.strip() else "it is not valid"
    return line if len(line) <= 200 else f"{line[:197]}..."
