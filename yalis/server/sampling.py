"""Sampling parameters of a request: its fields, over the model's generation_config.json, over the API's defaults."""

from __future__ import annotations

from typing import Any

from yalis.engine.llm import LLM
from yalis.openai_api import sampling_fields
from yalis.server.protocol import GenerationRequest
from yalis.types import SamplingParams

_MAX_LOGPROBS = 20  # most likely tokens for each output token, as in OpenAI's API

#: Of /v1/chat/completions: an answer may fill the context.
CHAT_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}
#: Of /v1/completions.
TEXT_DEFAULTS: dict[str, Any] = {**CHAT_DEFAULTS, "max_tokens": 16}


def sampling_params(llm: LLM, request: GenerationRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Raises YalisError for a field that SamplingParams does not accept."""
    return SamplingParams(**{**defaults, **llm.sampling_defaults, **sampling_fields(request.__dict__)})
