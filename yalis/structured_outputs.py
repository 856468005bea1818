"""What an answer must look like: a JSON schema, a regular expression, one of several strings, or a grammar."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.keywords import VllmKeywords, check_init_keywords

_KEYWORDS = VllmKeywords(
    ignored={
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": (False,),
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
    },
    advice={"structural_tag": "give tags, a list of OutputTag(begin, schema, end)"},
)
#: Size of a schema, regular expression or grammar in bytes, all tags and choices of a request together.
MAX_BYTES = 1 << 20

_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


class GrammarError(YalisError):
    """What structured_outputs asks for cannot be honoured.

    The message is the name of a field, by default structured_outputs, and `problem`. `code` is a word for programs:
    "grammar_too_complex" if a limit of the compilation was exceeded.
    """

    def __init__(self, problem: str, kind: str = "", code: str = "invalid_value") -> None:
        """`kind`: the field of StructuredOutputs."""
        super().__init__(f"structured_outputs{kind and '.'}{kind} {problem}")
        self.problem, self.kind, self.code = problem, kind, code

    def copy(self) -> GrammarError:
        """Return the same error without a traceback."""
        return GrammarError(self.problem, self.kind, self.code)


class GrammarQueueFull(YalisFailure):
    """Other schemas were compiled for too long. The same request may succeed later."""


@dataclass(frozen=True)
class OutputTag:
    """A part of an answer: `begin`, JSON that is valid for `schema`, and `end`.

    `begin` and `end` may contain special tokens of the tokenizer. The schema is a dict, or its JSON text; it is stored
    as text.
    """

    begin: str
    schema: str | dict[str, Any]
    end: str = ""

    def __post_init__(self) -> None:
        _check_text("begin of a tag", self.begin)
        if not isinstance(self.end, str):
            raise YalisError(f"end of a tag is {self.end!r}; give a string")
        object.__setattr__(self, "schema", _as_schema("schema of a tag", self.schema))


@check_init_keywords("StructuredOutputs", _KEYWORDS)
@dataclass(frozen=True)
class StructuredOutputs:
    """What the text of an answer must be; give exactly one field, except for those of tags.

    json: JSON that is valid for this schema, a dict or its text; it is stored as text
    json_object: any JSON object
    regex: a text that the regular expression matches as a whole
    choice: one of these strings
    grammar: a text of this context-free grammar, in the Lark syntax of llguidance
    tags: one or more of these, each `begin`, JSON that is valid for its schema, and `end`
    separator: the text between two tags
    single_tag: exactly one tag
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    json_object: bool = False
    tags: tuple[OutputTag, ...] = ()
    separator: str = ""
    single_tag: bool = False

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema("json", self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        object.__setattr__(self, "choice", _as_items("choice", self.choice))
        for text in self.choice:
            _check_text("an item of choice", text)
        if not isinstance(self.json_object, bool) and self.json_object is not None:
            raise YalisError(f"json_object is {self.json_object!r}; give true or false")
        object.__setattr__(self, "json_object", bool(self.json_object))
        object.__setattr__(self, "tags", tuple(map(_as_tag, _as_items("tags", self.tags))))
        if not isinstance(self.separator, str):
            raise YalisError(f"separator is {self.separator!r}; give the text between two tags")
        given = [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            raise YalisError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(_KINDS)}"
            )
        if not isinstance(self.single_tag, bool):
            raise YalisError(f"single_tag is {self.single_tag!r}; give true or false")
        if (self.separator or self.single_tag) and not self.tags:
            name = "separator" if self.separator else "single_tag"
            raise YalisError(f"{name} is about tags; give it together with tags")
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise YalisError(f"{self.kind} of structured_outputs is larger than {MAX_BYTES} bytes; give a smaller one")

    @property
    def kind(self) -> str:
        """The name of the field that was given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """What was given, as one text. Together with `kind` it identifies the grammar."""
        if self.tags:
            return jsonlib.dumps(
                [self.separator, self.single_tag, [[tag.begin, tag.schema, tag.end] for tag in self.tags]]
            )
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else jsonlib.dumps(value)


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "tags")


def as_structured_outputs(value: Any) -> StructuredOutputs | None:
    """Return the value of SamplingParams.structured_outputs, which may be a dict of the fields above."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise YalisError(f"structured_outputs is {value!r}; give StructuredOutputs(...), such as json={_EXAMPLE}")
    return StructuredOutputs(**value)


def _as_schema(name: str, value: Any) -> str:
    """Return a JSON schema as text. The order of its properties is kept: answers have them in this order."""
    try:
        schema = jsonlib.loads(value) if isinstance(value, str) else value
        text = jsonlib.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise YalisError(f"{name} is no JSON schema ({error}); give one, such as {_EXAMPLE}") from None
    if not isinstance(schema, (dict, bool)):
        raise YalisError(f"{name} is {text[:40]}; give a JSON schema, such as {_EXAMPLE}")
    return text


def _as_tag(value: Any) -> OutputTag:
    if isinstance(value, Mapping) and {"begin", "schema"} <= set(value) <= {"begin", "schema", "end"}:
        return OutputTag(**value)
    if not isinstance(value, OutputTag):
        raise YalisError(f"an item of tags is {value!r}; give OutputTag(begin, schema, end)")
    return value


def _as_items(name: str, value: Any) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, (list, tuple)):
        raise YalisError(f"{name} is {value!r}; give a list")
    return tuple(value or ())


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise YalisError(f"{name} is {value!r}; give a non-empty string of valid Unicode")
