"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from yalis.engine.async_llm import RequestStream
from yalis.openai_api import ChoiceFormat
from yalis.server.answers import ChunkEncoder, Header, encode, output_usage, prompt_fields, run
from yalis.server.chat_tools import AnswerParser, chat_tools
from yalis.server.errors import ApiError, FieldNames, JsonResponse, shown
from yalis.server.protocol import ChatRequest
from yalis.server.route import StrictRoute
from yalis.server.sampling import CHAT_DEFAULTS, sampling_params
from yalis.server.state import ServerState, server_state
from yalis.server.streams import EventStream
from yalis.server.tools.request import ToolRequest
from yalis.types import Completion, RequestEvent, RequestOutput

router = APIRouter(route_class=StrictRoute)

#: Keys of a message. Templates of reasoning models read "reasoning_content".
_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_NULL_KEYS = frozenset({"audio", "function_call", "refusal", "annotations"})  # in messages that a client sends back


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    state = server_state(request)
    state.check_model(body.model)
    body.check_stream()
    check_messages(body.messages)
    tools = chat_tools(state, body)
    sampling = tools.sampling(sampling_params(state.llm, body, CHAT_DEFAULTS), "response_format")
    answer = ChatAnswer(state, body, tools)
    prompts, variables = [tools.messages(body.messages)], tools.variables(body.chat_template_kwargs)
    fields = FieldNames("messages", tools.grammar_field(body.grammar_field))
    if not body.stream:
        return JsonResponse(answer.response(await run(request, state, prompts, sampling, variables, fields)))
    stream = await state.submit(prompts, sampling, variables, fields=fields)
    return EventStream(answer.chunks(stream), stream.close)


class ChatAnswer:
    """The response to one request, whole or as chunks."""

    def __init__(self, state: ServerState, body: ChatRequest, tools: ToolRequest) -> None:
        self._body, self._model = body, state.model_name
        self._parsers = [AnswerParser(tools) for _ in range(body.n or 1)]
        self._choices = ChoiceFormat(state.llm.tokenizer)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        return {
            **Header("chatcmpl", "chat.completion", self._model).fields(),
            "choices": [self._choice(completion) for completion in output.completions],
            "usage": output_usage(outputs),
            **prompt_fields(output, self._choices, self._body.return_token_ids),
        }

    async def chunks(self, stream: RequestStream) -> AsyncIterator[bytes]:
        header = Header("chatcmpl", "chat.completion.chunk", self._model)
        encoder = ChunkEncoder(header, self._body.stream_options)
        encoder.count(sum(map(len, stream.prompt_token_ids)), 0)
        for index in range(self._body.n or 1):
            yield encoder.chunk(
                f'"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null'
            )
        async for event in stream:
            encoder.count(0, len(event.token_ids))
            logprobs = "null" if event.logprobs is None else encode(self._choices.chat_logprobs(event.logprobs))
            extra = f',"token_ids":{event.token_ids}' if self._body.return_token_ids else ""
            deltas = self._parsers[event.completion_index].deltas(event)
            if not deltas and (event.logprobs or extra):
                deltas = ["{}"]
            for delta in deltas:
                yield encoder.chunk(
                    f'"index":{event.completion_index},"delta":{delta},'
                    f'"logprobs":{logprobs},"finish_reason":null{extra}'
                )
                logprobs, extra = "null", ""
            if event.completion is not None:
                yield encoder.chunk(self._last_choice(event, event.completion))
            if event.output is not None and encoder.wants_usage:
                yield encoder.usage(output_usage([event.output]))

    def _choice(self, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            **self._choices.chat_choice(completion),
            **self._parsers[completion.index].message(completion),
            "stop_reason": completion.stop_reason,
        }
        if not self._body.return_token_ids:
            del choice["token_ids"]
        return choice

    def _last_choice(self, event: RequestEvent, completion: Completion) -> str:
        reason = self._parsers[completion.index].finish_reason(completion)
        return (
            f'"index":{event.completion_index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":{encode(reason)},"stop_reason":{encode(completion.stop_reason)}'
        )


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raise ApiError for what a chat template would drop: unknown keys, and parts that are not text."""
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        for key, value in message.items():
            if key not in _KEYS and not (key in _NULL_KEYS and not value):
                raise ApiError(
                    f"message {index + 1} has {shown(key)}, which is not supported; accepted: "
                    f"{', '.join(sorted(_KEYS))}",
                    param=f"{where}.{key}",
                    code="unsupported",
                )
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise ApiError(
                    f"message {index + 1} has a part of type {shown(kind)}; only text is supported",
                    param=f"{where}.content.{number}",
                    code="unsupported",
                )
