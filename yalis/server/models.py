"""Small endpoints: /v1/models, /health and /version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from yalis import __version__
from yalis.server.errors import ApiError, JsonResponse
from yalis.server.state import ServerState, server_state

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(server_state(request))]}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    state = server_state(request)
    state.check_model(model)
    return _model(state)


@router.get("/health")
async def get_health(request: Request) -> Response:
    """200 while requests are accepted, 503 while the server drains or after the model has failed."""
    state = server_state(request)
    if (failure := state.async_llm.failure) is not None:
        raise failure
    if state.draining:
        raise ApiError("the server is shutting down", 503, code="draining")
    return JsonResponse({"status": "ok"})


@router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": __version__}


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "yalis",
        "max_model_len": state.llm.max_model_len,
        "vocab_size": state.llm.spec.vocab_size,
    }
