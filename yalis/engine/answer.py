"""One completion in the making: its tokens, text, stop strings and timing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.engine.detokenize import Detokenizer
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.types import Completion, FinishReason, Metrics, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Progress:
    """How far a call to generate() is."""

    finished: int
    total: int
    output_tokens: int  # of the engine, since it began


class Answer:
    """Gathers what the engine emits for one sequence."""

    def __init__(self, sequence: Request, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._detokenizer = Detokenizer(tokenizer, params.stop, params.min_tokens) if tokenizer is not None else None
        self._new_text: list[str] = []
        self._told_tokens = 0
        self._begin = time.perf_counter()
        self._first = self._last = self._begin

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def receive(self, item: Emitted) -> bool:
        """Take one emitted token or ending; True when a stop string ends this answer here."""
        if self.finish_reason is not None:
            return False
        if item.token is not None:
            self._last = time.perf_counter()
            if not self._tokens:
                self._first = self._last
            self._tokens.append(item.token)
            if self._logprobs is not None and item.logprobs is not None:
                self._logprobs.append(item.logprobs)
            if self._detokenizer is not None:
                self._new_text.append(self._detokenizer.feed([item.token]))
                if self._detokenizer.stopped is not None:
                    self.finish_reason = "stop"
                    return item.finish_reason is None
        if item.finish_reason is not None:
            self._finish(item.finish_reason)
        return False

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._detokenizer is not None:
            self._new_text.append(self._detokenizer.finish())
            if self._detokenizer.stopped is not None:  # completed by what was held back
                self.finish_reason = "stop"

    def take_delta(self) -> tuple[str, list[int]]:
        """Text and tokens that became sure since the last call."""
        text, tokens = "".join(self._new_text), self._tokens[self._told_tokens :]
        self._new_text.clear()
        self._told_tokens = len(self._tokens)
        return text, tokens

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "an answer is a completion only once it has ended"
        after_first = len(self._tokens) - 1
        metrics = Metrics(
            time_to_first_token=self._first - self._begin,
            time_per_token=(self._last - self._first) / after_first if after_first > 0 else 0.0,
            total=self._last - self._begin,
            prompt_tokens=len(self.sequence.prompt),
            cached_tokens=self.sequence.cached_tokens,
            output_tokens=len(self._tokens),
        )
        text = self._detokenizer.text if self._detokenizer is not None else ""
        return Completion(text, list(self._tokens), self.finish_reason, self._logprobs, metrics)
