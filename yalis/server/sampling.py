"""Sampling parameters of a request: its fields, over the model's generation_config.json, over the API's defaults."""

from __future__ import annotations

from typing import Any

from yalis.engine.llm import LLM
from yalis.openai_api import sampling_fields
from yalis.server.errors import ApiError
from yalis.server.protocol import GenerationRequest
from yalis.types import SamplingParams

_MAX_LOGPROBS = 20  # most likely tokens for each output token, as in OpenAI's API

#: Of /v1/chat/completions: an answer may fill the context.
CHAT_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}
#: Of /v1/completions.
TEXT_DEFAULTS: dict[str, Any] = {**CHAT_DEFAULTS, "max_tokens": 16}


def sampling_params(llm: LLM, request: GenerationRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Raises YalisError or ApiError for a value that is not accepted."""
    given = sampling_fields(request.__dict__)
    if (given.get("logprobs") or 0) > _MAX_LOGPROBS:
        name = "logprobs" if "top_logprobs" not in type(request).model_fields else "top_logprobs"
        raise ApiError(
            f"{name} is {given['logprobs']}; give a whole number from 0 to {_MAX_LOGPROBS}",
            param=name,
            code="invalid_value",
        )
    return SamplingParams(**{**defaults, **llm.sampling_defaults, **given})
