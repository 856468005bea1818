"""Routes whose JSON bodies are read strictly: UTF-8, no NaN, no nesting that the parser cannot follow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from yalis.server.errors import ApiError, shown

# A list or an object costs a hundred times as much time and memory as its two bytes.
_MAX_BRACKETS = 500_000


class StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_content"):
            self._content = parse_json(await self.body())
        return self._content


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            _check_content_type(strict)
            await strict.json()  # here, because FastAPI hides the reason of an error
            return await handle(strict)

        return handle_strictly


def _check_content_type(request: Request) -> None:
    """Refuse other types: a page of another site can send those from a browser without asking first."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            f"the content type is {shown(given)}; send the header `content-type: application/json`",
            415,
            code="wrong_content_type",
        )


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body; raise ApiError with the reason if it is not JSON."""
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise _bad(f"the body has more than {_MAX_BRACKETS} brackets; send several requests")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_parse_finite)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise _bad(f"the body is not accepted: {error}") from None


def _parse_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # such as 1e400, which could not be sent back as JSON
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _bad(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")
