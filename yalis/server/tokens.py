"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from yalis.engine.prompts import check_token_ids
from yalis.errors import YalisError
from yalis.server.chat import check_messages
from yalis.server.chat_tools import chat_tools
from yalis.server.errors import ApiError, FieldNames, request_error, shown
from yalis.server.protocol import DetokenizeRequest, TokenizeRequest
from yalis.server.route import StrictRoute
from yalis.server.state import server_state
from yalis.types import Prompt

router = APIRouter(route_class=StrictRoute)

_MAX_TOKENS = 1_000_000  # of /detokenize


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The token ids of a text, or of a conversation in the model's chat template."""
    state = server_state(request)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give prompt or messages, one of the two", param="prompt", code="invalid_value")
    field = "prompt" if body.messages is None else "messages"
    prompt: Prompt = body.prompt or ""
    variables = None
    if body.messages is not None:
        check_messages(body.messages)
        tools = chat_tools(state, body)
        prompt, variables = tools.messages(body.messages), tools.variables(body.chat_template_kwargs)
    try:
        ids = await state.async_llm.tokenize(prompt, variables)
    except YalisError as error:
        raise request_error(error, FieldNames(field)) from error
    return {"count": len(ids), "max_model_len": state.llm.max_model_len, "tokens": ids}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """The text of token ids, with the texts of special tokens."""
    state = server_state(request)
    state.check_model(body.model)
    tokenizer = state.llm.tokenizer
    if tokenizer is None:
        raise ApiError("this model has no tokenizer", code="no_tokenizer")
    if not isinstance(body.tokens, list):
        raise ApiError(f"tokens is {shown(body.tokens)}; give a list of token ids", param="tokens")
    if len(body.tokens) > _MAX_TOKENS:
        raise ApiError(f"tokens has {len(body.tokens)} token ids; give at most {_MAX_TOKENS}", param="tokens")
    try:
        ids = check_token_ids(body.tokens, state.llm.spec.vocab_size)
    except YalisError as error:
        raise request_error(error, FieldNames("tokens")) from error
    return {"prompt": await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)}
