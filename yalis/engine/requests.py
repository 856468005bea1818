"""Requests of an LLM while they run, and how their output reaches the caller.

A request has n completions, each of them one sequence of the engine. Every request belongs to a RequestGroup, through
which its results and deltas are delivered. The requests of `submit()` share one group, which `poll()` and `events()`
read; each call to `generate()` or `stream()` has a group of its own.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.engine.detokenize import Detokenizer
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.types import Completion, FinishReason, Metrics, RequestEvent, RequestOutput, SamplingParams, TokenLogprobs


class PendingRequest:
    """A prompt and its n completions while they are generated."""

    def __init__(self, id: int, prompt: str | None, token_ids: list[int], group: RequestGroup) -> None:
        self.id, self.prompt, self.token_ids, self.group = id, prompt, token_ids, group
        self.completions: list[PendingCompletion] = []
        self.submit_time = time.perf_counter()
        self.undelivered = 0  # completions whose last event has not been read

    def add(self, sequence: Request, params: SamplingParams, tokenizer: Tokenizer | None) -> PendingCompletion:
        completion = PendingCompletion(self, len(self.completions), sequence, params, tokenizer)
        self.completions.append(completion)
        self.undelivered += 1
        return completion

    @property
    def num_tokens(self) -> int:
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        completions = [completion.result() for completion in self.completions]
        return RequestOutput(self.prompt, self.token_ids, completions, self.completions[0].prompt_logprobs, self.id)


class PendingCompletion:
    """Collects the tokens of one sequence: their text, stop strings, log-probabilities and timing."""

    def __init__(
        self,
        request: PendingRequest,
        index: int,
        sequence: Request,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request, self.index, self.sequence = request, index, sequence
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # those of the request's first completion
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._stop_token_ids = params.stop_token_ids
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            decoder = tokenizer.keeping(params.keep_special_tokens)
            self._detokenizer = Detokenizer(decoder, params.stop, params.min_tokens)
        self._new_text: list[str] = []  # since the last take_delta()
        self._undecoded: list[int] = []  # tokens that are decoded when their text is read
        self._delivered_tokens = 0
        self._first_token_time = self._last_token_time = request.submit_time
        #: time.perf_counter() of each token, if the group asks for it
        self.token_times: list[float] | None = [] if request.group.timed else None

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def append(self, emitted: Emitted) -> bool:
        """Add an emitted token or the end of the sequence.

        Returns True if the text reached a stop string, which the scheduler cannot see: the caller must then finish the
        sequence in the engine.
        """
        if self.finish_reason is not None:
            return False
        if emitted.prompt_logprobs is not None:
            self.prompt_logprobs = list(emitted.prompt_logprobs)
            self._set_decoder(self.prompt_logprobs)
            self._last_token_time = time.perf_counter()  # the only time of a request that generates nothing
        if emitted.token is not None:
            self._last_token_time = time.perf_counter()
            if not self._tokens:
                self._first_token_time = self._last_token_time
            if self.token_times is not None:
                self.token_times.append(self._last_token_time)
            self._tokens.append(emitted.token)
            if self._logprobs is not None and emitted.logprobs is not None:
                self._logprobs.append(emitted.logprobs)
                self._set_decoder([emitted.logprobs])
            if self._detokenizer is not None:
                self._undecoded.append(emitted.token)
                if self._detokenizer.may_stop:
                    self._decode()
                    if self._detokenizer.stopped is not None:
                        self.finish_reason = "stop"
                        return emitted.finish_reason is None
        if emitted.finish_reason is not None:
            self._finish(emitted.finish_reason)
        return False

    def _set_decoder(self, logprobs: Sequence[TokenLogprobs | None]) -> None:
        if self._tokenizer is not None:
            decode = self._tokenizer.token_text
            for one in logprobs:
                if one is not None:
                    one.set_decoder(decode)

    def _decode(self) -> None:
        """Decode the tokens that have come since the last time. Many at once take little longer than one."""
        if self._detokenizer is not None and self._undecoded:
            self._new_text.append(self._detokenizer.feed(self._undecoded))
            self._undecoded.clear()

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._decode()
        if self._detokenizer is not None:
            self._new_text.append(self._detokenizer.finish())
            if self._detokenizer.stopped is not None:  # the text held back until now completed a stop string
                self.finish_reason = "stop"

    def take_delta(self) -> tuple[str, list[int], list[TokenLogprobs] | None]:
        """Return the text, the token ids and their log-probabilities that were added since the last call."""
        self._decode()
        start, self._delivered_tokens = self._delivered_tokens, len(self._tokens)
        text = "".join(self._new_text)
        self._new_text.clear()
        return text, self._tokens[start:], None if self._logprobs is None else self._logprobs[start:]

    def result(self) -> Completion:
        assert self.finish_reason is not None, "only a finished completion has a result"
        after_first = len(self._tokens) - 1
        decode_time = self._last_token_time - self._first_token_time
        metrics = Metrics(
            time_to_first_token=self._first_token_time - self.request.submit_time,
            time_per_token=decode_time / after_first if after_first > 0 else 0.0,
            total=self._last_token_time - self.request.submit_time,
            prompt_tokens=len(self.sequence.prompt),
            cached_tokens=self.sequence.cached_tokens,
            output_tokens=len(self._tokens),
        )
        text = self._detokenizer.text if self._detokenizer is not None else ""
        return Completion(
            text, list(self._tokens), self.finish_reason, self._logprobs, metrics, self.index, self._stop_reason()
        )

    def _stop_reason(self) -> str | int | None:
        if self._detokenizer is not None and self._detokenizer.stopped is not None:
            return self._detokenizer.stopped
        stopped = self.finish_reason == "stop" and self._tokens and self._tokens[-1] in self._stop_token_ids
        return self._tokens[-1] if stopped else None


class RequestGroup:
    """Requests whose output is read by the same caller, either as results or as events.

    A result is delivered once: by take_results(), or with the request's last event from next_event(). Deltas are not
    stored but taken from the completion when its event is read, so unread output costs no memory.
    """

    timed = False  # whether the times of all tokens are kept

    def __init__(self, events: bool = True) -> None:
        """`events`: next_event() will be called. Otherwise completions are not kept after they finish."""
        self._events = events
        self.unfinished: set[int] = set()  # request ids
        self.finished: dict[int, RequestOutput] = {}  # results that have not been delivered
        self.output_tokens = 0  # generated for these requests so far
        self.max_output_tokens = 0  # that they can have, within max_tokens and the context
        self.version = 0  # incremented by new output
        self._changed: OrderedDict[tuple[int, int], PendingCompletion] = OrderedDict()  # completions with new output

    def add(self, request: PendingRequest) -> None:
        self.unfinished.add(request.id)

    def notify(self, completion: PendingCompletion) -> None:
        """Record that the completion has new output, and that its request has finished if this was its last part."""
        request = completion.request
        if self._events:
            self._changed[request.id, completion.index] = completion
        if completion.finish_reason is not None and request.finished:
            self.finished[request.id] = request.output()
            # The two refer to each other, and would keep prompt and output until the garbage collector finds them.
            request.completions = []
            self.unfinished.discard(request.id)  # last: other threads then expect the result
        self.version += 1

    def drop_events(self) -> None:
        """Forget the unread events. From here on next_event() returns None."""
        self._events = False
        self._changed.clear()

    def has_events(self) -> bool:
        """Return whether there may be an unread event, or none will come."""
        return bool(self._changed) or not self.unfinished

    def changed_since(self, version: int) -> Callable[[], bool]:
        """Return a function that tells whether there is output since `version`, or none will come."""
        return lambda: self.version != version or not self.unfinished

    def take_results(self) -> list[tuple[int, RequestOutput]]:
        """Return (id, result) of the finished requests; their unread events are dropped."""
        results = list(self.finished.items())
        self.finished.clear()
        for id, output in results:
            for index in range(len(output.completions)):
                self._changed.pop((id, index), None)
        return results

    def next_event(self) -> RequestEvent | None:
        """Return the oldest unread event; None if there is no new output."""
        while self._changed:
            (id, index), completion = self._changed.popitem(last=False)
            text, tokens, logprobs = completion.take_delta()
            if completion.finish_reason is None:
                if text or tokens:
                    return RequestEvent(id, index, text, tokens, logprobs=logprobs)
                continue  # the token's text is held back, and its id was in an earlier event
            completion.request.undelivered -= 1
            output = None if completion.request.undelivered else self.finished.pop(id)
            result = completion.result()
            return RequestEvent(id, index, text, tokens, completion.finish_reason, result, output, logprobs)
        return None
