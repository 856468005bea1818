"""What the endpoints of a running server share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from yalis.engine.async_llm import AsyncLLM, RequestStream
from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.server.config import ServeConfig
from yalis.server.errors import ApiError, FieldNames, request_error, shown
from yalis.server.keys import ApiKeys
from yalis.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from yalis.server.metrics import ServerMetrics


PROMPT_FIELDS = FieldNames("prompt")


@dataclass
class ServerState:
    """Endpoints get it by server_state(request)."""

    llm: LLM
    async_llm: AsyncLLM
    config: ServeConfig
    keys: ApiKeys
    metrics: ServerMetrics
    draining: bool = False  # new requests are refused with 503
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.config.name_of(self.llm.config.model)

    @property
    def max_running(self) -> int:
        """Completions that may run at once."""
        return self.llm.config.max_num_seqs * self.llm.config.dp

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless this is the model that is served, or None."""
        if name is not None and name != self.model_name:
            raise ApiError(
                f"the model {shown(name)} is not served here; give {self.model_name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        template_kwargs: dict[str, Any] | None = None,
        events: bool = True,
        fields: FieldNames = PROMPT_FIELDS,
    ) -> RequestStream:
        """Queue the prompts; raise ApiError if the server drains, too many requests wait, or a prompt is not usable.

        `fields`: of the request, for errors.
        """
        if self.draining:
            raise ApiError("the server is shutting down", 503, code="draining", headers={"retry-after": "10"})
        completions, most = len(prompts) * sampling.n, self.max_running + self.config.max_queue
        if completions > most:
            raise ApiError(
                f"the request is for {completions} completions; this server accepts {most} at a time", param="n"
            )
        if self.async_llm.num_open + completions > most:
            seconds = max(1, round(self.metrics.seconds_to_finish(self.max_running)))
            raise ApiError(
                f"{self.config.max_queue} completions wait already; try again in {seconds} s",
                429,
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        try:
            return await self.async_llm.submit(prompts, sampling, template_kwargs, events)
        except YalisFailure:
            raise
        except YalisError as error:
            raise request_error(error, fields) from error


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
