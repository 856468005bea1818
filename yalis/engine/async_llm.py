"""An LLM for asyncio: one thread runs the step loop, and coroutines receive the output of their requests.

The thread wakes the event loop once per step, for all requests with new output. Text and tokens stay in the request
until its coroutine reads them, so a slow reader gets longer deltas and costs no memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from yalis.engine.llm import LLM
from yalis.engine.request_loop import RequestLoop
from yalis.engine.requests import PendingCompletion, PendingRequest, RequestGroup
from yalis.errors import YalisFailure, describe_error
from yalis.types import FinishReason, Prompt, RequestEvent, RequestOutput, SamplingParams

#: Longer prompts, and conversations, are tokenized in a thread: they would delay the other requests of the event loop.
_SHORT_PROMPT = 2000  # characters, or token ids


class AsyncLLM:
    """Runs requests of one asyncio event loop, the one that is running when it is created.

    Every method is called from that loop. Close it before the LLM.
    """

    def __init__(self, llm: LLM, on_finished: Callable[[FinishedCompletion], None] | None = None) -> None:
        """`on_finished` is called in the event loop for every completion that has finished or was cancelled."""
        self.llm = llm
        self._on_finished = on_finished
        self._finished: deque[FinishedCompletion] = deque()  # that `on_finished` was not called for
        self._loop = asyncio.get_running_loop()
        self._requests: RequestLoop = llm.request_loop
        self._changed: list[RequestStream] = []  # with output that the event loop has not been told of
        self._open: set[RequestStream] = set()
        self._failure: YalisFailure | None = None
        self._work = threading.Event()  # set when there are steps to run
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="yalis-steps", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> YalisFailure | None:
        """The failure that ended the model, such as a rank that died; None while it can run requests."""
        return self._failure or self.llm.job_failure

    @property
    def num_open(self) -> int:
        """Completions that have not finished: running, and waiting."""
        return sum(stream.num_completions for stream in self._open)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, template_kwargs: dict[str, Any] | None = None
    ) -> AsyncIterator[RequestEvent]:
        """Yield the new output of a request, until it has finished. The last event has the whole result.

        Leaving the loop, or cancelling the task, cancels the request before the next step. Raises YalisError for a
        prompt that cannot be run, and YalisFailure if the model fails.
        """
        stream = await self.submit([prompt], sampling, template_kwargs)
        try:
            async for event in stream:
                yield event
        finally:
            stream.close()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        template_kwargs: dict[str, Any] | None = None,
        events: bool = True,
    ) -> RequestStream:
        """Queue a request for each prompt. The caller reads the stream and closes it.

        `events`: the stream will be iterated over. Without them it costs less, and has only results().
        """
        if (failure := self.failure) is not None:
            raise failure
        chosen = sampling or self.llm.default_sampling_params()
        stream = RequestStream(self, len(prompts) * chosen.n, events)
        self._open.add(stream)  # before the prompts are tokenized, so that it counts
        try:
            submit = partial(self.llm.submit_all, list(prompts), chosen, stream.group, template_kwargs)
            if self._is_quick(prompts) and chosen.structured_outputs is None:  # whose compilation may take seconds
                stream.ids = submit()
            else:
                thread = self._loop.run_in_executor(None, submit)
                thread.add_done_callback(lambda _: None if stream in self._open else stream.close())
                stream.ids = await asyncio.shield(thread)
        except BaseException:
            stream.close()  # if the task was cancelled, the thread may still be about to submit it
            raise
        self._work.set()
        return stream

    async def tokenize(self, prompt: Prompt, template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt, which are not checked."""
        if self._is_quick([prompt]):
            return self.llm.encode_prompt(prompt, template_kwargs)
        return await asyncio.to_thread(self.llm.encode_prompt, prompt, template_kwargs)

    async def close(self) -> None:
        """End the step thread. Open requests end with a failure."""
        self._closing = True
        self._work.set()
        await asyncio.to_thread(self._thread.join)
        self._wake()
        self._fail(YalisFailure("the model was closed"))

    def _is_quick(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether tokenizing the prompts delays the event loop by less than about a millisecond."""
        return sum(map(_size, prompts)) <= _SHORT_PROMPT and not self.llm.is_encoding

    def _leave(self, stream: RequestStream) -> None:
        """Forget a stream, and cancel its requests that have not finished."""
        self._open.discard(stream)
        group = stream.group
        if group.unfinished and self._failure is None and not self._closing:
            self._requests.cancel(list(group.unfinished))
            self._work.set()  # to commit the steps in flight, which frees the KV blocks
        with self._requests.output:
            group.drop_events()

    def _wake(self) -> None:
        """Wake the readers of the streams with new output. Runs in the event loop."""
        with self._requests.output:
            changed = self._changed[:]
            self._changed.clear()
            for stream in changed:
                stream.group.is_listed = False
        for stream in changed:
            stream.wake()
        while self._finished:
            finished = self._finished.popleft()
            if self._on_finished is not None:
                self._on_finished(finished)

    def _fail(self, failure: YalisFailure) -> None:
        """End every open request with this failure. Runs in the event loop."""
        self._failure = self._failure or failure
        for stream in list(self._open):
            stream.wake(self._failure)

    # The step thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._work.wait()
                self._work.clear()
                self._announce()  # requests that were cancelled between two steps
                while not self._closing and self._requests.has_work:
                    self._requests.advance_once(self._has_changed)
                    self._announce()
        except BaseException as error:
            failure = error if isinstance(error, YalisFailure) else YalisFailure(describe_error(error))
            if failure is not error:
                failure.__cause__ = error
            self._failure = failure
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _announce(self) -> None:
        if self._changed:
            self._loop.call_soon_threadsafe(self._wake)

    def _has_changed(self) -> bool:
        return bool(self._changed)


@dataclass(frozen=True)
class FinishedCompletion:
    """What is measured of a completion. Times are those of time.perf_counter()."""

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    request_tokens: list[int] | None  # generated by each completion of the request, if this is the last one to finish
    submit_time: float
    token_times: list[float]


class RequestStream:
    """The requests of one call to submit(). One coroutine reads it, by iterating over its events or as results()."""

    def __init__(self, owner: AsyncLLM, num_completions: int, events: bool) -> None:
        self.num_completions = num_completions
        self.ids: list[int] = []  # of the requests, in the order of the prompts
        self.group = _Group(self, owner, events)
        self._owner = owner
        self._waiter: asyncio.Future[None] | None = None

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        return [self.group.prompts[id] for id in self.ids]

    async def __aiter__(self) -> AsyncIterator[RequestEvent]:
        group, output = self.group, self._owner._requests.output
        while True:
            with output:
                event, unfinished = group.next_event(), bool(group.unfinished)
            if event is not None:
                yield event
            elif not unfinished:
                return
            else:
                await self._wait()

    async def results(self) -> list[RequestOutput]:
        """Wait until all requests have finished and return their results."""
        while self.group.unfinished:
            await self._wait()
        return [self.group.finished.pop(id) for id in self.ids]

    def close(self) -> None:
        """Cancel the requests that have not finished."""
        self._owner._leave(self)

    async def _wait(self) -> None:
        """Wait for output; raises the failure if the model has failed."""
        if (failure := self._owner.failure) is not None:
            raise failure
        self._waiter = asyncio.get_running_loop().create_future()
        if not self.group.has_events():
            await self._waiter
        self._waiter = None

    def wake(self, failure: YalisFailure | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if failure is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(failure)


class _Group(RequestGroup):
    """The output of the requests of a stream. Steps run in another thread, which holds RequestLoop.output."""

    timed = True

    def __init__(self, stream: RequestStream, owner: AsyncLLM, events: bool) -> None:
        super().__init__(events)
        self.is_listed = False  # in `owner._changed`
        self.prompts: dict[int, list[int]] = {}  # token ids, by request id
        self._stream, self._owner = stream, owner

    def add(self, request: PendingRequest) -> None:
        super().add(request)
        self.prompts[request.id] = request.token_ids

    def notify(self, completion: PendingCompletion) -> None:
        if completion.finish_reason is not None:  # measured first: a finished request drops its completions
            self._owner._finished.append(_measure(completion, completion.finish_reason))
        super().notify(completion)
        if not self.is_listed and self.has_events():
            self.is_listed = True
            self._owner._changed.append(self._stream)


def _measure(completion: PendingCompletion, reason: FinishReason) -> FinishedCompletion:
    sequence, request = completion.sequence, completion.request
    return FinishedCompletion(
        reason,
        len(sequence.prompt),
        sequence.cached_tokens,
        sequence.params.max_tokens,
        [one.num_tokens for one in request.completions] if request.finished else None,
        request.submit_time,
        completion.token_times or [],
    )


def _size(prompt: Prompt) -> float:
    """Return how many characters or token ids a prompt has; infinite for a conversation, whose template may be slow."""
    if isinstance(prompt, dict):
        return float("inf")
    if isinstance(prompt, str):
        return len(prompt)
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else float("inf")
