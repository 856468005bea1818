"""The ASGI application: endpoints, errors, and what every request passes first."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from yalis import __version__
from yalis.server import chat, completions, metrics, models, responses, tokens
from yalis.server.errors import ErrorBody, add_handlers
from yalis.server.gate import Gate
from yalis.server.page import page
from yalis.server.state import ServerState

ROUTERS = tuple(module.router for module in (chat, completions, metrics, models, page, responses, tokens))


def build_app(state: ServerState) -> ASGIApp:
    api = FastAPI(
        title="YALIS",
        version=__version__,
        docs_url=None,  # these pages load scripts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name http:// also behind a proxy with TLS
        responses={
            "4XX": {"model": ErrorBody, "description": "The request is refused; the message says why."},
            "5XX": {"model": ErrorBody, "description": "The server shuts down, or the model has failed."},
        },
    )
    api.state.server = state
    add_handlers(api)
    for router in ROUTERS:
        api.include_router(router)
    app: ASGIApp = Gate(api, state)
    if state.config.cors_origin:
        app = CORSMiddleware(
            app,
            allow_origins=state.config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
