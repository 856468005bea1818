"""The ASGI application: endpoints, errors, and what every request passes first."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from yalis import __version__
from yalis.server import chat, completions, metrics, models, responses, tokens
from yalis.server.errors import add_handlers
from yalis.server.gate import Gate
from yalis.server.state import ServerState

ROUTERS = (chat.router, completions.router, metrics.router, models.router, responses.router, tokens.router)


def build_app(state: ServerState) -> ASGIApp:
    api = FastAPI(title="YALIS", version=__version__, docs_url=None, redoc_url=None)  # those pages load scripts
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
