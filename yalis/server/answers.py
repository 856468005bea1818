"""What the answers of all endpoints share: their header, usage, and chunks that are cheap to encode."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from yalis.openai_api import ChoiceFormat, usage
from yalis.server.errors import FieldNames
from yalis.server.protocol import StreamOptions
from yalis.server.state import PROMPT_FIELDS, ServerState
from yalis.server.streams import until_disconnect
from yalis.types import Prompt, RequestOutput, SamplingParams

#: JSON on one line, in ASCII: some clients treat U+2028 as the end of a line.
encode = json.JSONEncoder(separators=(",", ":")).encode


class Header:
    """The fields that every chunk of an answer repeats."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.id, self.kind, self.model = f"{prefix}-{uuid.uuid4().hex}", kind, model
        self.created = int(time.time())

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}


class ChunkEncoder:
    """Server-sent events of an answer. 64 streams of a GPU are thousands of chunks a second."""

    def __init__(self, header: Header, options: StreamOptions | None) -> None:
        """With usage, a last chunk has that of the whole answer. In the others it is null, or what it is so far."""
        self.wants_usage = options is not None and options.include_usage
        self._running_usage = self.wants_usage and options is not None and options.continuous_usage_stats
        self._prompt_tokens = self._output_tokens = 0
        self._head = f"data: {encode(header.fields())[:-1]},"
        self._tail = '}],"usage":null}\n\n' if self.wants_usage else "}]}\n\n"

    def count(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add tokens to the usage of the next chunks."""
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens

    def chunk(self, choice: str) -> bytes:
        """Return the chunk of one choice, whose fields are given as JSON without braces."""
        tail = self._tail
        if self._running_usage:
            tail = f'}}],"usage":{encode(usage(self._prompt_tokens, self._output_tokens))}}}\n\n'
        return f'{self._head}"choices":[{{{choice}{tail}'.encode("ascii")

    def usage(self, counts: dict[str, Any]) -> bytes:
        return f'{self._head}"choices":[],"usage":{encode(counts)}}}\n\n'.encode("ascii")


async def run(
    request: Request,
    state: ServerState,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    template_kwargs: dict[str, Any] | None = None,
    fields: FieldNames = PROMPT_FIELDS,
) -> list[RequestOutput]:
    """Run the prompts to completion; if the client disconnects they are cancelled."""
    stream = await state.submit(prompts, sampling, template_kwargs, events=False, fields=fields)
    try:
        return await until_disconnect(request, stream.results())
    finally:
        stream.close()


def prompt_fields(output: RequestOutput, choices: ChoiceFormat, with_token_ids: bool | None) -> dict[str, Any]:
    """Return what a response has about its prompt beyond OpenAI's fields, if it was requested."""
    fields: dict[str, Any] = {}
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = choices.prompt_logprobs(output.prompt_logprobs)
    if with_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    return fields


def output_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the token counts of an answer."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return {**usage(prompt_tokens, output_tokens), "prompt_tokens_details": {"cached_tokens": cached}}
