"""The two formats of a result line: `flat`, and `openai`, which is that of the OpenAI batch API.

Both have "custom_id", "digest" and "error", which is null for a result, so a job resumes from either. A result contains
no times, so that the files of two runs can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from yalis.batch.input import InvalidLine, RequestLine
from yalis.batch.output import prompt_logprob_fields, result_fields
from yalis.types import Completion, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from yalis.checkpoint.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # what the OpenAI API reports for minus infinity, which JSON does not have


class ResultFormat(Protocol):
    """Makes the fields of a result line besides "custom_id" and "digest"."""

    def result(self, line: RequestLine, output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]: ...

    def error(self, line: InvalidLine) -> dict[str, Any]: ...


class FlatFormat:
    """Text, token ids and counts at the top level of the line."""

    def result(self, line: RequestLine, output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {**result_fields(output), "error": None}

    def error(self, line: InvalidLine) -> dict[str, Any]:
        return {"error": {"line": line.line_number, "message": line.message}}


class OpenAIFormat:
    """The response of the chat completions API to `messages`, or of the completions API to a `prompt`.

    Each choice also has "token_ids", and the body "prompt_logprobs" if they were requested, as in the flat format. The
    status of an error is 400, and its message is in "response" and in "error".
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[int, str] = {}  # of the tokens in log probabilities, by token id

    def result(self, line: RequestLine, output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
        self._tokenizer = tokenizer
        is_chat = isinstance(line.prompt, list) and bool(line.prompt) and isinstance(line.prompt[0], dict)
        prompt_tokens = len(output.prompt_token_ids)
        output_tokens = sum(len(completion.token_ids) for completion in output.completions)
        make_choice = self._chat_choice if is_chat else self._text_choice
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_unique(line)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,  # clients require it
            "model": self.model_name,
            **prompt_logprob_fields(output),
            "choices": [{"index": index, **make_choice(one)} for index, one in enumerate(output.completions)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
            },
        }
        return {"id": f"batch_req_{_unique(line)}", "response": _response(line, 200, body), "error": None}

    def error(self, line: InvalidLine) -> dict[str, Any]:
        kind = "invalid_request_error"
        body = {"error": {"message": line.message, "type": kind, "param": None, "code": None}}
        return {
            "id": f"batch_req_{_unique(line)}",
            "response": _response(line, 400, body),
            "error": {"code": kind, "message": line.message, "line": line.line_number},
        }

    def _chat_choice(self, completion: Completion) -> dict[str, Any]:
        logprobs = completion.logprobs
        return {
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if logprobs is None else {"content": [self._chat_token(token) for token in logprobs]},
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }

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

    def _text_choice(self, completion: Completion) -> dict[str, Any]:
        logprobs = completion.logprobs
        return {
            "text": completion.text,
            "logprobs": None if logprobs is None else self._text_logprobs(logprobs),
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }

    def _text_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._text(token.token_id) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._text(token_id): _finite(logprob) for token_id, logprob in token.top.items()} for token in tokens
            ],
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            text = f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)
            self._texts[token_id] = text
        return self._texts[token_id]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _response(line: RequestLine | InvalidLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{_unique(line)}", "body": body}


def _unique(line: RequestLine | InvalidLine) -> str:
    """Return the same identifier in every run, and another one for every line of the job."""
    text = f"{line.digest}:{line.custom_id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
