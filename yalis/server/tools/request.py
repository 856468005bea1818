"""The tools of one request: its prompt, its grammar, and the parser of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yalis.server.tools.definitions import FieldError, Tool, ToolChoice
from yalis.server.tools.formats import ToolFormat, choose_format
from yalis.server.tools.history import render_messages
from yalis.server.tools.parser import ToolCallParser
from yalis.types import Message, SamplingParams, StructuredOutputs


@dataclass(frozen=True)
class ToolRequest:
    """How tools change a request for a chat answer."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool  # an answer may have several calls
    chat_template: str
    format: ToolFormat

    @property
    def active(self) -> bool:
        """Whether the model may call tools."""
        return self.choice.mode != "none"

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the chat template expects them."""
        return render_messages(messages, self.tools if self.active else (), self.format, self.chat_template)

    def variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the variables of the chat template: those that were given, and the tools."""
        variables = dict(given or {})
        if self.active and not self.format.described:
            variables["tools"] = [tool.as_template_variable() for tool in self.tools]
        return variables

    def sampling(self, sampling: SamplingParams, field: str) -> SamplingParams:
        """Return the sampling parameters for answers with calls.

        `field`: the field of the request with the structured outputs that the parameters may have.
        """
        required = self.structured_outputs()
        if self.active and sampling.structured_outputs is not None:
            raise FieldError(field, f'{field} is set with tools; give one of them, or tool_choice "none"')
        return replace(
            sampling,
            structured_outputs=required or sampling.structured_outputs,
            keep_special_tokens=(*sampling.keep_special_tokens, *self.kept_special_tokens()),
        )

    def structured_outputs(self) -> StructuredOutputs | None:
        """Return the grammar of answers that must contain a call; None if they need not."""
        if self.choice.mode != "required":
            return None
        tools = [tool for tool in self.tools if tool.name in self.choice.names]
        return self.format.enforced(tools, single=self.choice.named or not self.parallel)

    def grammar_field(self, other: str) -> str:
        """Return the field of the request that an error of the grammar is about: tools, or `other`."""
        return "tools" if self.choice.mode == "required" else other

    def kept_special_tokens(self) -> tuple[str, ...]:
        """Return the special tokens that the parser needs in the text."""
        return self.format.special_tokens if self.active else ()

    def parser(self) -> ToolCallParser | None:
        """Return a parser for one answer; None if its text is all content."""
        if not self.active:
            return None
        return self.format.parser(self.choice.names, None if self.parallel else 1)


def tool_request(
    tools: Sequence[Tool], choice: ToolChoice, parallel: bool | None, chat_template: str | Mapping[str, str] | None
) -> ToolRequest:
    """Return what the tools of a request mean for a model with this chat template."""
    text = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
    return ToolRequest(tuple(tools), choice, parallel is not False, text, choose_format(chat_template))
