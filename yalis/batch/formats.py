"""The two formats of a result line: `flat`, and `openai`, which is that of the OpenAI batch API.

Both have "custom_id", "digest" and "error", which is null for a result, so a job resumes from either. A result contains
no times, so that the files of two runs can be compared.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from yalis.batch.input import InvalidLine, RequestLine
from yalis.batch.output import prompt_logprob_fields, result_fields
from yalis.openai_api import ChoiceFormat, usage
from yalis.types import RequestOutput

if TYPE_CHECKING:
    from yalis.checkpoint.tokenizer import Tokenizer


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
        self._choices: ChoiceFormat | None = None

    def result(self, line: RequestLine, output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
        choices = self._choices = self._choices or ChoiceFormat(tokenizer)
        is_chat = isinstance(line.prompt, list) and bool(line.prompt) and isinstance(line.prompt[0], dict)
        output_tokens = sum(len(completion.token_ids) for completion in output.completions)
        make_choice = choices.chat_choice if is_chat else choices.text_choice
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_unique(line)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,  # clients require it
            "model": self.model_name,
            **prompt_logprob_fields(output),
            "choices": [{"index": index, **make_choice(one)} for index, one in enumerate(output.completions)],
            "usage": usage(len(output.prompt_token_ids), output_tokens),
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


def _response(line: RequestLine | InvalidLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{_unique(line)}", "body": body}


def _unique(line: RequestLine | InvalidLine) -> str:
    """Return the same identifier in every run, and another one for every line of the job."""
    text = f"{line.digest}:{line.custom_id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
