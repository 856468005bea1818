"""The parts of the OpenAI API that batch files and the server share: sampling fields, choices, log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from yalis.errors import YalisError
from yalis.types import SAMPLING_FIELDS, Completion, FinishReason, StructuredOutputs, TokenLogprobs

#: Other names of fields of SamplingParams.
SAMPLING_ALIASES = frozenset({"max_completion_tokens", "top_logprobs", "response_format"})

_LOWEST_LOGPROB = -9999.0  # what the OpenAI API reports for minus infinity, which JSON does not have


#: finish_reason of the API, which has no word for an answer whose grammar could not continue. Like one that reached
#: max_tokens it is not complete.
_FINISH_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "cancelled": "length"}


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_text(self, token: int) -> str: ...


def sampling_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that a request sets; null means not set, as in the OpenAI API."""
    given = {name: value for name, value in request.items() if name in SAMPLING_FIELDS and value is not None}
    max_tokens = request.get("max_completion_tokens")
    if max_tokens is not None and given.setdefault("max_tokens", max_tokens) != max_tokens:
        raise YalisError(
            f"max_tokens is {given['max_tokens']!r} and max_completion_tokens {max_tokens!r}; give one of them"
        )
    # Chat requests have `logprobs: true, top_logprobs: 5`; completion requests have `logprobs: 5`.
    top_logprobs = request.get("top_logprobs")
    if isinstance(given.get("logprobs"), bool):
        given["logprobs"] = (0 if top_logprobs is None else top_logprobs) if given["logprobs"] else None
    elif top_logprobs is not None:
        raise YalisError(f"top_logprobs is {top_logprobs!r} without logprobs; set logprobs to true with it")
    if (wanted := request.get("response_format")) is not None:
        if "structured_outputs" in given:
            raise YalisError("response_format and structured_outputs both say what an answer must be; give one of them")
        given["structured_outputs"] = parse_format("response_format", wanted, "json_schema")
    return given


def parse_format(field: str, wanted: Any, inner: str | None = None) -> StructuredOutputs | None:
    """Return what response_format of chat requests, or text.format of responses, asks for; None for any text.

    `inner`: the key under which a schema and its name are, if it is not `wanted` itself. Every schema is enforced, with
    `strict` or without.
    """
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    described = wanted.get(inner) if kind == "json_schema" and inner else wanted
    schema = described.get("schema") if kind == "json_schema" and isinstance(described, Mapping) else None
    if not isinstance(schema, (dict, bool)):
        example = '"schema": {...}' if inner is None else f'"{inner}": {{"name": ..., "schema": {{...}}}}'
        raise YalisError(
            f'{field} is {_shorten(wanted)}; give {{"type": "json_schema", {example}}}, {{"type": "json_object"}} or '
            '{"type": "text"}'
        )
    try:
        return StructuredOutputs(json=json.dumps(schema))
    except YalisError as error:
        raise YalisError(f"{field} cannot be used: {error}") from error


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def finish_reason(reason: FinishReason) -> str:
    """Return the finish reason of a completion in the words of the API."""
    return _FINISH_REASONS[reason]


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class ChoiceFormat:
    """Makes the choices of responses. Keeps the text of tokens in log-probabilities, of which there are few."""

    def __init__(self, tokenizer: TokenTexts | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def chat_choice(self, completion: Completion) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self.chat_logprobs(completion.logprobs),
            "finish_reason": finish_reason(completion.finish_reason),
            "token_ids": completion.token_ids,
        }

    def chat_logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if tokens is None else {"content": [self._chat_token(token) for token in tokens]}

    def text_choice(self, completion: Completion) -> dict[str, Any]:
        return {
            "text": completion.text,
            "logprobs": None if completion.logprobs is None else self.text_logprobs(completion.logprobs),
            "finish_reason": finish_reason(completion.finish_reason),
            "token_ids": completion.token_ids,
        }

    def text_logprobs(self, tokens: Sequence[TokenLogprobs | None], offset: int = 0, first: int = 0) -> dict[str, Any]:
        """Return the log-probabilities of the tokens of a text.

        `offset`: the characters before them. `first`: the id of a first token that has no log-probability.
        """
        texts = [self._text(first if token is None else token.token_id) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": [
                None if token is None else {self._text(id): _finite(logprob) for id, logprob in token.top.items()}
                for token in tokens
            ],
            "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
        }

    def prompt_logprobs(self, tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of a prompt as vLLM's server does: by token id, for each of its tokens."""
        return [
            None
            if token is None
            else {
                str(id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": self._text(id)}
                for id, one in token.items()
            }
            for token in tokens
        ]

    def _chat_token(self, token: TokenLogprobs) -> dict[str, Any]:
        top = sorted(token.top.items(), key=lambda pair: -pair[1])
        return {
            **self._token(token.token_id, token.logprob),
            "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in top],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        encoded = None if "\ufffd" in text else list(text.encode("utf-8"))  # part of a character: no text of its own
        return {"token": text, "logprob": _finite(logprob), "bytes": encoded}

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            text = f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)
            self._texts[token_id] = text
        return self._texts[token_id]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
