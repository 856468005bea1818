"""The chat page at `/`: one HTML document with its style and script inside, and the headers it is served with."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

FOLDER = Path(__file__).parent
#: Parts of the script, in the order in which they are joined. They share one scope.
SCRIPTS = (
    "dom", "sse", "inline", "highlight", "blocks", "storage", "client", "messages", "sidebar", "settings", "app",
)  # fmt: skip

router = APIRouter(include_in_schema=False)


class ChatPage(NamedTuple):
    html: bytes
    headers: dict[str, str]


@router.api_route("/", methods=["GET", "HEAD"])
def show_page(request: Request) -> Response:
    """Return the page. It contains nothing secret, so it needs no API key."""
    page = build_page()
    if request.headers.get("if-none-match") == page.headers["ETag"]:
        return Response(status_code=304, headers=page.headers)
    return Response(page.html, media_type="text/html; charset=utf-8", headers=page.headers)


@cache
def build_page() -> ChatPage:
    """Join the parts of the page. Its policy admits only this style and this script, by their hashes."""
    style = _read("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in SCRIPTS) + "})();\n"
    html = _read("page.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode()
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # The browser refuses to parse a string as HTML or as a script, even if the page asked it to.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(html).hexdigest()[:32]}"',
    }
    return ChatPage(html, headers)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
