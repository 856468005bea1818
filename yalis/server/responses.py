"""/v1/responses: OpenAI's newer API for conversations, with typed events. Nothing is stored between requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from yalis.engine.async_llm import RequestStream
from yalis.errors import YalisError
from yalis.openai_api import ChoiceFormat, finish_reason, parse_format, sampling_fields
from yalis.server.answers import encode, run
from yalis.server.errors import ApiError, FieldNames, as_api_error, shown
from yalis.server.protocol import ApiRequest
from yalis.server.response_events import ResponseEvents, new_id
from yalis.server.response_items import read_input
from yalis.server.route import StrictRoute
from yalis.server.sampling import CHAT_DEFAULTS, make_sampling
from yalis.server.state import ServerState, server_state
from yalis.server.streams import EventStream
from yalis.server.tools.definitions import read_choice, read_flat_tools
from yalis.server.tools.deltas import ContentDelta, ParsedDelta
from yalis.server.tools.parser import ToolCallParser
from yalis.server.tools.request import ToolRequest, tool_request
from yalis.types import RequestOutput, SamplingParams, StructuredOutputs, TokenLogprobs

router = APIRouter(route_class=StrictRoute)

_LOGPROBS = "message.output_text.logprobs"
#: What `include` may ask for. There are no reasoning items, so there is no content of them to include.
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_STATELESS = "nothing is stored here; send the whole conversation in input"


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: bool | None = None  # there is no padding that could be left out


class ResponsesRequest(ApiRequest):
    refused = {
        "background": ((False,), "requests run while their connection is open"),
        "context_management": (([],), "shorten input"),
        "conversation": ((), _STATELESS),
        "moderation": ((), "there is no moderation"),
        "previous_response_id": ((), _STATELESS),
        "prompt": ((), "send its text in input"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "store": ((False,), "nothing is stored here; leave it out"),
        "truncation": (("disabled",), "a prompt that is too long is an error"),
    }

    model: str
    input: Any
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that a server runs itself, of which there are none
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    state = server_state(request)
    state.check_model(body.model)
    _check_options(body)
    tools = _tools(state, body)
    messages = tools.messages(read_input(body.input, body.instructions))
    sampling = _sampling(state, body, tools)
    answer = ResponseAnswer(state, body, sampling, tools.parser())
    variables = tools.variables(body.chat_template_kwargs)
    fields = FieldNames("input", tools.grammar_field("text.format"))
    if not body.stream:
        outputs = await run(request, state, [messages], sampling, variables, fields)
        # As ASCII: metadata, which is repeated, may have half of a surrogate pair.
        return Response(encode(answer.response(outputs[0])), media_type="application/json")
    stream = await state.submit([messages], sampling, variables, fields=fields)
    return EventStream(answer.events(stream), stream.close)


class ResponseAnswer:
    """The response to one request, whole or as events."""

    def __init__(
        self, state: ServerState, body: ResponsesRequest, sampling: SamplingParams, parser: ToolCallParser | None
    ) -> None:
        self._choices, self._parser = ChoiceFormat(state.llm.tokenizer), parser
        self._events = ResponseEvents(_response_fields(state, body, sampling))

    def response(self, output: RequestOutput) -> dict[str, Any]:
        completion = output.completions[0]
        self._events.add(self._parse(completion.text), self._logprobs(completion.logprobs))
        self._finish(output)
        return self._events.response

    async def events(self, stream: RequestStream) -> AsyncIterator[bytes]:
        yield self._events.start()
        try:
            async for event in stream:
                chunk = self._events.add(self._parse(event.text), self._logprobs(event.logprobs))
                if event.output is not None:
                    chunk += self._finish(event.output)
                if chunk:
                    yield chunk
        except Exception as error:
            yield self._events.fail(as_api_error(error).body()["error"])

    def _parse(self, text: str) -> list[ParsedDelta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [ContentDelta(text)] if text else []

    def _finish(self, output: RequestOutput) -> bytes:
        events = self._events.add(self._parser.finish()) if self._parser is not None else b""
        reason = "max_output_tokens" if finish_reason(output.finish_reason) == "length" else None
        return events + self._events.finish(_usage(output), int(time.time()), reason)

    def _logprobs(self, tokens: list[TokenLogprobs] | None) -> list[dict[str, Any]]:
        formatted = self._choices.chat_logprobs(tokens)
        if formatted is None:
            return []
        content: list[dict[str, Any]] = formatted["content"]
        for token in content:
            for one in (token, *token["top_logprobs"]):
                one["bytes"] = one["bytes"] or []  # this API has a list also for a part of a character
        return content


def _check_options(body: ResponsesRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is set without stream; set stream to true", param="stream_options")
    for name in body.include or ():
        if name not in _INCLUDABLE:
            raise _unsupported("include", f"include has {shown(name)}; accepted: {', '.join(_INCLUDABLE)}")
    for name, value in (body.reasoning or {}).items():
        if value is not None and (name, value) != ("effort", "none"):
            raise _unsupported(
                f"reasoning.{name}",
                f"reasoning.{name} is {shown(value)}, which is not supported; chat_template_kwargs sets variables of "
                "the model's template",
            )


def _tools(state: ServerState, body: ResponsesRequest) -> ToolRequest:
    tools = read_flat_tools(body.tools)
    choice = read_choice(body.tool_choice, tools)
    tokenizer = state.llm.tokenizer
    return tool_request(tools, choice, body.parallel_tool_calls, tokenizer.hf.chat_template if tokenizer else None)


def _sampling(state: ServerState, body: ResponsesRequest, tools: ToolRequest) -> SamplingParams:
    given = sampling_fields(body.__dict__ | {"max_tokens": body.max_output_tokens, "top_logprobs": None})
    if body.wants_logprobs:
        given["logprobs"] = body.top_logprobs or 0
    sampling = make_sampling(state.llm, CHAT_DEFAULTS, given, "max_output_tokens", "top_logprobs")
    if body.wants_logprobs and tools.active:
        raise _unsupported("include", "log-probabilities are not returned with tools; leave out one of them")
    return tools.sampling(dataclasses.replace(sampling, structured_outputs=_text_format(body)), "text.format")


def _text_format(body: ResponsesRequest) -> StructuredOutputs | None:
    text = body.text or {}
    for name, value in text.items():
        if name not in ("format", "verbosity") or (name == "verbosity" and value not in (None, "medium")):
            raise _unsupported(f"text.{name}", f"text.{name} is {shown(value)}, which is not supported; leave it out")
    try:
        return parse_format("text.format", text.get("format") or {"type": "text"})
    except YalisError as error:
        raise ApiError(str(error), param="text.format", code="invalid_value") from error


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="unsupported")


def _usage(output: RequestOutput) -> dict[str, Any]:
    prompt_tokens, output_tokens = len(output.prompt_token_ids), len(output.token_ids)
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.metrics.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def _response_fields(state: ServerState, body: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return the response without its output. It repeats what was asked for, with the values that were used."""
    text = body.text or {}
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()]
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": state.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
