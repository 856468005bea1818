"""Errors in the shape of the OpenAI API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from yalis.errors import YalisError, YalisFailure
from yalis.launch.liveness import reword
from yalis.log import get_logger
from yalis.openai_api import SAMPLING_ALIASES
from yalis.server.tools.definitions import FieldError
from yalis.structured_outputs import GrammarError, GrammarQueueFull
from yalis.types import SAMPLING_FIELDS

log = get_logger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 60  # characters of a value in a message
_brief = reprlib.Repr()  # does not write all of a value with millions of parts
_brief.maxlist = _brief.maxdict = 20
_brief.maxstring = _brief.maxother = _brief.maxlong = 2 * _SHOWN
#: Fields that a message can begin with.
_FIELDS = SAMPLING_FIELDS | SAMPLING_ALIASES | {"max_output_tokens", "messages", "chat_template_kwargs"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not 200, for the description of the API."""

    error: ErrorDetail


class ApiError(Exception):
    """An error to answer a request with. `param` is the field that was wrong, `code` a word for programs."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.headers = message, status, code, headers
        self.param = None if param is None else param[:_SHOWN]

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), self.status, headers=self.headers)


class JsonResponse(Response):
    """A response in ASCII: what a client sent may contain half a character, which UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True)
class FieldNames:
    """The fields of a request that an error of the engine can be about."""

    prompt: str | None = None
    grammar: str = "structured_outputs"  # the field that said what an answer must be


_NO_FIELDS = FieldNames()


class ClientDisconnected(Exception):
    """The client has closed its connection, so nobody reads the response."""


def as_api_error(error: Exception, target: str = "") -> ApiError:
    """Return the error to answer with after an exception. One that was not written for the user is only logged.

    `target`: method and path of the request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        detail = f"{target} does not exist; /openapi.json lists the endpoints"
        message = detail if error.status_code in (404, 405) else str(error.detail)
        return ApiError(message, error.status_code, headers=error.headers)  # 405 lists the allowed methods
    if isinstance(error, GrammarQueueFull):
        return ApiError(str(error), 503, code="grammar_queue_full", headers={"retry-after": "5"})
    if isinstance(error, YalisFailure):
        return ApiError(f"the model failed: {error}", 503, code="model_failed")
    if isinstance(error, YalisError):
        return request_error(error)
    if isinstance(error, RecursionError):  # values that the parser of JSON could still follow
        return ApiError("the body is nested too deeply", code="invalid_json")
    log.error("internal error: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError("internal error; the log of the server has the reason", 500, code="internal_error")


def add_handlers(app: FastAPI) -> None:
    """Answer every exception of an endpoint in this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, (ClientDisconnect, ClientDisconnected)):
            return Response(status_code=499)  # nobody reads it; the log has nginx's number for it
        return as_api_error(error, f"{request.method} {request.url.path}").response()

    kinds = (
        HTTPException,
        RequestValidationError,
        ApiError,
        YalisError,
        ClientDisconnect,
        ClientDisconnected,
        Exception,
    )
    for kind in kinds:
        app.add_exception_handler(kind, answer)


def shown(value: Any) -> str:
    """Return the value for a message, shortened."""
    text = _brief.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def request_error(error: YalisError, fields: FieldNames = _NO_FIELDS) -> ApiError:
    """Return the error of a prompt or of sampling parameters.

    A message about sampling parameters starts with the name of one; others are about the prompt.
    """
    if isinstance(error, GrammarError):
        message = str(error) if fields.grammar == "structured_outputs" else f"{fields.grammar} {error.problem}"
        return ApiError(message, param=fields.grammar, code=error.code)
    message = reword(str(error))
    if isinstance(error, FieldError):
        return ApiError(message, param=error.param, code="invalid_value")
    if "but the context holds" in message:
        return ApiError(message, param=fields.prompt, code="context_length_exceeded")
    name = re.match(r"[a-z_]+\b", message)
    param = name[0] if name is not None and name[0] in _FIELDS else fields.prompt
    return ApiError(message, param=param, code="invalid_value")


def _validation_error(error: RequestValidationError) -> ApiError:
    """Return the first problem that pydantic found, as a sentence."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if part not in ("body", "str") and "[" not in str(part)]
    param = ".".join(location) or None
    kind, subject = first["type"], param or "the body"
    if kind == "missing":
        return ApiError(f"{subject} is missing; it is required", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(f"{subject} is not a field of this request", param=param, code="unknown_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    given = f" (given: {shown(first['input'])})" if param and "input" in first else ""
    return ApiError(f"{subject}: {problem[:1].lower()}{problem[1:]}{given}", param=param, code="invalid_value")
