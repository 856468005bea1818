"""/v1/completions: continues a text, several texts, or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from yalis.engine.async_llm import RequestStream
from yalis.openai_api import ChoiceFormat, finish_reason
from yalis.server.answers import ChunkEncoder, Header, encode, output_usage, prompt_fields, run
from yalis.server.errors import ApiError, FieldNames, JsonResponse, shown
from yalis.server.protocol import CompletionRequest
from yalis.server.route import StrictRoute
from yalis.server.sampling import TEXT_DEFAULTS, sampling_params
from yalis.server.state import ServerState, server_state
from yalis.server.streams import EventStream
from yalis.types import Prompt, RequestOutput, SamplingParams

router = APIRouter(route_class=StrictRoute)

_MAX_PROMPTS = 1024


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    state = server_state(request)
    state.check_model(body.model)
    body.check_stream()
    prompts = _prompts(body.prompt)
    sampling = _sampling(state, body)
    answer, fields = TextAnswer(state, body, prompts), FieldNames("prompt", body.grammar_field)
    if not body.stream:
        outputs = await run(request, state, prompts, sampling, fields=fields)
        return JsonResponse(answer.response(outputs))
    stream = await state.submit(prompts, sampling, fields=fields)
    return EventStream(answer.chunks(stream), stream.close)


class TextAnswer:
    """The response to one request, whole or as chunks. The choices of prompt i are i * n to i * n + n - 1."""

    def __init__(self, state: ServerState, body: CompletionRequest, prompts: list[Prompt]) -> None:
        self._tokenizer = state.llm.tokenizer
        self._body, self._prompts, self._n = body, prompts, body.n or 1
        self._header = Header("cmpl", "text_completion", state.model_name)
        self._choices = ChoiceFormat(self._tokenizer)

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            {"index": index * self._n + completion.index, **self._choice(index, output, completion.index)}
            for index, output in enumerate(outputs)
            for completion in output.completions
        ]
        return {**self._header.fields(), "choices": choices, "usage": output_usage(outputs)}

    async def chunks(self, stream: RequestStream) -> AsyncIterator[bytes]:
        body = self._body
        encoder = ChunkEncoder(self._header, body.stream_options)
        encoder.count(sum(map(len, stream.prompt_token_ids)), 0)
        first_index = {id: index * self._n for index, id in enumerate(stream.ids)}
        offsets: dict[int, int] = {}  # of the next token in the text, by choice
        outputs: list[RequestOutput] = []
        if body.echo:
            for index, ids in enumerate(stream.prompt_token_ids):
                text = self._prompt_text(index, ids)
                for choice in range(index * self._n, (index + 1) * self._n):
                    offsets[choice] = len(text)
                    yield encoder.chunk(f'"index":{choice},"text":{encode(text)},"logprobs":null,"finish_reason":null')
        async for event in stream:
            encoder.count(0, len(event.token_ids))
            index = first_index[event.request_id] + event.completion_index
            if event.output is not None:
                outputs.append(event.output)
            logprobs = "null"
            if event.logprobs is not None:
                content = self._choices.text_logprobs(event.logprobs, offsets.get(index, 0))
                logprobs, offsets[index] = encode(content), offsets.get(index, 0) + sum(map(len, content["tokens"]))
            extra = f',"token_ids":{event.token_ids}' if body.return_token_ids else ""
            if event.completion is not None:
                extra += f',"stop_reason":{encode(event.completion.stop_reason)}'
            elif not event.text and event.logprobs is None and not extra:
                continue  # the text is held back until it is final
            yield encoder.chunk(
                f'"index":{index},"text":{encode(event.text)},"logprobs":{logprobs},'
                f'"finish_reason":{encode(event.finish_reason and finish_reason(event.finish_reason))}{extra}'
            )
        if encoder.wants_usage:
            yield encoder.usage(output_usage(outputs))

    def _choice(self, prompt: int, output: RequestOutput, index: int) -> dict[str, Any]:
        completion = output.completions[index]
        asked = self._body.prompt_logprobs is not None or self._body.return_token_ids
        choice = {
            **self._choices.text_choice(completion),
            "stop_reason": completion.stop_reason,
            **(prompt_fields(output, self._choices, self._body.return_token_ids) if asked else {}),
        }
        if not self._body.return_token_ids:
            del choice["token_ids"]
        if self._body.echo:
            choice["text"] = self._prompt_text(prompt, output.prompt_token_ids) + choice["text"]
            if completion.logprobs is not None:
                tokens = [*(output.prompt_logprobs or ()), *completion.logprobs]
                choice["logprobs"] = self._choices.text_logprobs(tokens, first=output.prompt_token_ids[0])
        return choice

    def _prompt_text(self, prompt: int, token_ids: list[int]) -> str:
        given = self._prompts[prompt]
        if isinstance(given, str):
            return given
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)


def _sampling(state: ServerState, body: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters; with echo they also ask for what the echoed prompt needs."""
    scores_prompt = body.echo and body.prompt_logprobs is None and (body.logprobs is not None or body.max_tokens == 0)
    if scores_prompt:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs or 0})
    return sampling_params(state.llm, body, TEXT_DEFAULTS)


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a request: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if isinstance(value[0], (str, list)) and len(value) > _MAX_PROMPTS:
            raise ApiError(f"prompt has {len(value)} prompts; give at most {_MAX_PROMPTS}", param="prompt")
        if all(isinstance(one, str) or _is_ids(one) for one in value) and len(set(map(type, value))) == 1:
            return value
    raise ApiError(
        f"prompt is {shown(value)}; give a text, a list of token ids, or a list of several of these",
        param="prompt",
        code="invalid_value",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
