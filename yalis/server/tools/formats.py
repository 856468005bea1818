"""The formats of tool calls, and which of them a chat template uses."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from yalis.server.tools.definitions import Tool
from yalis.server.tools.parser import HermesParser, LlamaParser, MistralParser, ToolCallParser
from yalis.types import OutputTag, StructuredOutputs

_ALPHANUMERIC = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: str
    parser_class: type[ToolCallParser]
    begin: str  # the text of a call before its arguments, with NAME for the name of the tool
    end: str  # the text after them
    separator: str  # between two calls
    special_tokens: tuple[str, ...]  # texts that may be special tokens of the tokenizer, and that the parser reads
    described: bool = False  # a message describes the tools, because the chat template does not
    single_call_messages: bool = False  # the template accepts one call in a message of the history
    short_ids: bool = False  # the template accepts ids of nine letters and digits only

    def new_id(self) -> str:
        """Return an id for a call."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def parser(self, names: Collection[str], max_calls: int | None = None) -> ToolCallParser:
        """Return a parser for one answer; see ToolCallParser."""
        return self.parser_class(names, self.new_id, max_calls)

    def enforced(self, tools: Sequence[Tool], single: bool) -> StructuredOutputs:
        """Return the grammar of an answer that calls one or more of these tools, or exactly one if `single`."""
        tags = [OutputTag(self.begin.replace("NAME", tool.name), tool.parameters, self.end) for tool in tools]
        return StructuredOutputs(tags=tuple(tags), separator=self.separator, single_tag=single)


HERMES = ToolFormat(
    "hermes",
    HermesParser,
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    special_tokens=("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(
    "llama3_json",
    LlamaParser,
    begin='{"name": "NAME", "parameters": ',
    end="}",
    separator="; ",
    special_tokens=("<|python_tag|>",),
    single_call_messages=True,
)
MISTRAL = ToolFormat(
    "mistral",
    MistralParser,
    begin='[TOOL_CALLS][{"name": "NAME", "arguments": ',
    end="}]",
    separator="",
    special_tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    short_ids=True,
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    MistralParser,
    begin="[TOOL_CALLS]NAME[ARGS]",
    end="",
    separator="",
    special_tokens=MISTRAL.special_tokens,
    short_ids=True,
)
#: For templates that do not render tools, or render them for a format that is not supported.
DESCRIBED = replace(HERMES, name="described", described=True)

#: Texts in templates whose calls are marked by <tool_call>, but are not Hermes' JSON: of Qwen3-Coder, GLM and Gemma.
_NOT_HERMES = ("<function=", "<arg_key>", "<|tool_call>")


#: The second is in the instructions of the templates of Llama 3.2 and 4.
_LLAMA_HINTS = ("<|python_tag|>", '{"name": function name, "parameters": ')


def choose_format(chat_template: str | Mapping[str, str] | None) -> ToolFormat:
    """Return the format that a chat template uses, or DESCRIBED if it uses none of those above.

    A model with several templates has one for tools, named tool_use.
    """
    if isinstance(chat_template, Mapping):
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    text = chat_template or ""
    if "tools" not in text:
        return DESCRIBED
    if "[TOOL_CALLS]" in text:
        return MISTRAL_ARGS if "[ARGS]" in text else MISTRAL
    if "<tool_call>" in text and "arguments" in text and not any(other in text for other in _NOT_HERMES):
        return HERMES
    if any(hint in text for hint in _LLAMA_HINTS):
        return LLAMA
    return DESCRIBED
