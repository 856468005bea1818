"""What every request passes before its endpoint: request id, host, origin, API key and size of the body."""

from __future__ import annotations

import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yalis.log import get_logger
from yalis.server.config import is_loopback
from yalis.server.errors import ApiError, as_api_error
from yalis.server.state import ServerState

log = get_logger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_ONCE = (b"host", b"origin", b"authorization")
_LOGGED_PATH = 200  # characters
_WITHOUT_KEY = ("/health", "/")  # the page has no secret, and asks for the key


class Gate:
    """An ASGI middleware. It logs each request with its id, never with its body."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        self._max_body = int(state.config.max_body * 2**20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        start, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except Exception as error:  # also of an endpoint that has been answered already
            if not status:
                await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - start
            path = scope["path"][:_LOGGED_PATH].encode("unicode_escape").decode()
            log.info("%s %s %s %d %.3f s", request_id.decode(), scope["method"], path, status, seconds)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError for a request that must not reach an endpoint."""
        for name in _ONCE:  # a proxy might check the first and this server the last
            if sum(key == name for key, _ in scope["headers"]) > 1:
                raise ApiError(f"the header {name.decode()} is there more than once; send it once", code="wrong_header")
        host = headers.get(b"host", b"").decode("latin-1")
        self._check_host(host)
        self._check_origin(headers.get(b"origin"), host)
        if scope["path"] not in _WITHOUT_KEY and not self._state.keys.accept(headers.get(b"authorization")):
            raise ApiError(
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY`",
                401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body:
            raise self._too_large()

    def _check_host(self, host: str) -> None:
        """Refuse names that a web page could point to this host (DNS rebinding)."""
        config = self._state.config
        name = _host_name(host)
        if config.is_local and not is_loopback(name) and name not in config.allowed_host:
            raise ApiError(
                f"this server is for this host only, and the host header is {host[:60]!r}; "
                "`yalis serve --allowed-host` accepts another name",
                403,
                code="wrong_host",
            )

    def _check_origin(self, origin: bytes | None, host: str) -> None:
        """Refuse requests that another site's page makes in a browser, unless --cors-origin allows it."""
        if origin is None:
            return
        text = origin.decode("latin-1")
        accepted = self._state.config.cors_origin
        if _netloc(text) != host and text not in accepted and "*" not in accepted:
            raise ApiError(
                f"pages of {text[:60]!r} may not use this server; `yalis serve --cors-origin` allows it",
                403,
                code="wrong_origin",
            )

    def _limited(self, receive: Receive) -> Receive:
        """Return a `receive` that refuses a body above the limit; a chunked body does not announce its length."""
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        limit = f"{self._state.config.max_body:g} MiB"
        return ApiError(f"the body is larger than {limit}; send less", 413, code="body_too_large")


def _netloc(origin: str) -> str | None:
    """Return the host and port of an origin; None if it is malformed."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """Return the name in a host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
