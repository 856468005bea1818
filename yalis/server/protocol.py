"""The requests of the API: which fields they have, which values of other fields mean nothing, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator

from yalis.keywords import suggest
from yalis.server.errors import ApiError, shown

#: Fields of OpenAI's API that do not change an answer here.
HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

#: Fields that are refused unless their value asks for nothing: (these values, what to do instead).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored here; leave it out"),
}
_CHAT_REFUSED = _REFUSED | {
    "add_special_tokens": ((False,), "send token ids to /v1/completions"),
    "add_generation_prompt": ((True,), "an answer is always generated"),
    "audio": ((), "only text is generated"),
    "chat_template": ((), "the server uses the template of the model; chat_template_kwargs sets its variables"),
    "continue_final_message": ((False,), "send the text of the prompt to /v1/completions"),
    "documents": (([],), "put their text into a message"),
    "echo": ((False,), "use /v1/completions"),
    "function_call": (("none",), "use tools and tool_choice"),
    "functions": (([],), "use tools"),
    "modalities": ((["text"],), "only text is generated"),
    "prediction": ((), "there is no speculative decoding"),
    "reasoning_effort": (("none",), "chat_template_kwargs sets variables of the model's template"),
    "verbosity": (("medium",), "ask for it in a message"),
    "web_search_options": ((), "there is no web search"),
}
_TEXT_REFUSED = _REFUSED | {
    "add_special_tokens": ((True,), "send token ids"),
    "best_of": ((1,), "use n"),
    "prompt_embeds": ((), "send prompt as text or token ids"),
    "suffix": (("",), "text is not inserted; only continued"),
}
#: Of vLLM's SamplingParams.
_SAMPLING_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "allowed_token_ids": ((), "use logit_bias"),
    "bad_words": (([],), "use logit_bias"),
    "include_stop_str_in_output": ((False,), "stop strings are not part of the text"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "skip_special_tokens": ((True,), "token_ids has them"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "use_beam_search": ((False,), "there is no beam search; use n"),
    "priority": ((0,), "requests run in the order of their arrival"),
}

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
#: Checked by hand: pydantic would report an error for every number of a long list of token ids.
PromptField = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]


_MAX_ENTRIES = 20_000
_UNLIMITED = ("prompt", "tokens")  # checked by hand, as token ids


class ApiRequest(BaseModel):
    """A request whose unknown fields are errors, and in which null means that a field is not set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}

    model: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        known = cls.model_fields
        for name, value in content.items():  # pydantic would report an error for each entry
            if isinstance(value, (list, dict)) and len(value) > _MAX_ENTRIES and name not in _UNLIMITED:
                raise ApiError(f"{shown(name)} has more than {_MAX_ENTRIES} entries; give fewer", param=name)
        others = [name for name in content if name not in known]
        for name in others:
            neutral, instead = cls.refused.get(name, ((), ""))
            if name not in cls.refused:
                hint = suggest(name, known) or f"; accepted: {', '.join(sorted(known.keys() - HARMLESS))}"
                raise ApiError(f"{shown(name)} is not a field of this request{hint}", param=name, code="unknown_field")
            value = content[name]
            if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                raise ApiError(
                    f"{name} is {shown(value)}, which is not supported; {instead}", param=name, code="unsupported"
                )
        return {name: value for name, value in content.items() if name in known} if others else content


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM, with include_usage: every chunk has the usage so far
    include_obfuscation: bool | None = None  # there is no padding that could be left out


class GenerationRequest(ApiRequest):
    """What requests for chat and for text share: every field of SamplingParams, and streaming."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @property
    def grammar_field(self) -> str:
        """The field that says what an answer must be."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is set without stream; set stream to true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs is not streamed; leave out stream", param="prompt_logprobs")


class CompletionRequest(GenerationRequest):
    refused = _TEXT_REFUSED | _SAMPLING_REFUSED

    prompt: PromptField
    logprobs: int | None = None
    echo: bool | None = None

    def check_stream(self) -> None:
        super().check_stream()
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError("logprobs of an echoed prompt are not streamed; leave out stream", param="logprobs")


class ChatRequest(GenerationRequest):
    refused = _CHAT_REFUSED | _SAMPLING_REFUSED

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(ApiRequest):
    refused = {
        "add_generation_prompt": ((True,), "the generation prompt is always added"),
        "add_special_tokens": ((), "special tokens are added as for a completion"),
        "return_token_strs": ((False,), "use /detokenize"),
    }

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ApiRequest):
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
