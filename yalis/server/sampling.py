"""Sampling parameters of a request: its fields, over the model's generation_config.json, over the API's defaults."""

from __future__ import annotations

import re
from typing import Any

from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.openai_api import sampling_fields
from yalis.server.errors import ApiError, request_error
from yalis.server.protocol import GenerationRequest
from yalis.structured_outputs import as_structured_outputs
from yalis.types import SamplingParams

_MAX_LOGPROBS = 20  # most likely tokens for each output token, as in OpenAI's API
_MAX_STOPS, _MAX_STOP_CHARS = 100, 10_000  # each is looked for after every token
#: Of /v1/chat/completions: an answer may fill the context.
CHAT_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}
#: Of /v1/completions.
TEXT_DEFAULTS: dict[str, Any] = {**CHAT_DEFAULTS, "max_tokens": 16}


def sampling_params(llm: LLM, request: GenerationRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Raises YalisError or ApiError for a value that is not accepted."""
    given = sampling_fields(request.__dict__)
    has_top_logprobs = "top_logprobs" in type(request).model_fields
    try:
        given["structured_outputs"] = as_structured_outputs(given.get("structured_outputs"))
    except YalisError as error:
        raise ApiError(str(error), param="structured_outputs", code="invalid_value") from error
    renamed = request.max_tokens is None and getattr(request, "max_completion_tokens", None) is not None
    max_tokens = "max_completion_tokens" if renamed else "max_tokens"
    return make_sampling(llm, defaults, given, max_tokens, "top_logprobs" if has_top_logprobs else "logprobs")


def make_sampling(
    llm: LLM, defaults: dict[str, Any], given: dict[str, Any], max_tokens: str, logprobs: str
) -> SamplingParams:
    """Return the parameters of a request. `max_tokens` and `logprobs`: the names of these fields there, for errors."""
    count = given.get("logprobs")
    if isinstance(count, int) and not 0 <= count <= _MAX_LOGPROBS:
        message = f"{logprobs} is {count}; give a whole number from 0 to {_MAX_LOGPROBS}"
        raise ApiError(message, param=logprobs, code="invalid_value")
    stop = given.get("stop") or ()
    if not isinstance(stop, str) and (len(stop) > _MAX_STOPS or sum(map(len, stop)) > _MAX_STOP_CHARS):
        message = f"stop has too many strings; give at most {_MAX_STOPS}, with {_MAX_STOP_CHARS} characters together"
        raise ApiError(message, param="stop", code="invalid_value")
    try:
        return SamplingParams(**{**defaults, **llm.sampling_defaults, **given})
    except YalisError as error:
        raise request_error(type(error)(re.sub(r"\bmax_tokens\b", max_tokens, str(error)))) from error
