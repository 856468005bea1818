"""The public LLM: text in, text out, over the engine's token ids."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Union

from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from yalis.config import DEFAULT_MODEL, EngineConfig
from yalis.engine.answer import Answer, Progress
from yalis.engine.engine import Engine, EngineStats
from yalis.errors import YalisError
from yalis.sampling.noise import derive_seed
from yalis.scheduling.plan import Emitted
from yalis.spec import ModelSpec, read_spec
from yalis.types import Message, Prompt, RequestOutput, SamplingParams, StreamChunk

Sampling = Union[SamplingParams, Sequence[SamplingParams], None]


class LLM:
    """A loaded model. Keyword arguments are the fields of EngineConfig, the same names as the command line's flags.

    `generate`, `chat` and `stream` run requests to their end; `submit`, `poll` and `cancel` are what they are made of.
    Close it, or use it in a `with` block, to give its memory back.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **fields: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(fields) - known):
            raise YalisError(f"LLM has no argument {unknown[0]!r}; accepted: {', '.join(sorted(known))}")
        self.config = EngineConfig(model=str(model), **fields)
        checkpoint = open_checkpoint(self.config.model, self.config.load, self.config.load_seed)
        try:
            self.spec: ModelSpec = read_spec(checkpoint.config, checkpoint.label)
            self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint, self.config.tokenizer)
            eos = (*eos_token_ids(checkpoint), *(self.tokenizer.eos_ids if self.tokenizer is not None else ()))
            self._engine: Engine | None = Engine(self.config, self.spec, checkpoint, frozenset(eos))
        finally:
            checkpoint.close()
        self._requests: dict[int, _Request] = {}
        self._by_sequence: dict[int, tuple[_Request, int]] = {}
        self._done: dict[int, RequestOutput] = {}  # results nobody has taken yet
        self._next_id = 0

    # Whole jobs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts."""
        ids = self._submit_all(prompts, sampling)
        done: dict[int, RequestOutput] = {}
        try:
            while len(done) < len(ids):
                self._advance()
                done.update((id, self._done.pop(id)) for id in ids if id in self._done)
                if progress is not None:
                    progress(Progress(len(done), len(ids), self.stats.output_tokens))
        finally:
            self._drop(ids.keys() - done.keys())
        return [done[id] for id in ids]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; a message is {"role": ..., "content": ...}."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate([list(conversation) for conversation in conversations], sampling)  # type: ignore[arg-type]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None) -> Iterator[StreamChunk]:
        """Text as it becomes sure. Leaving the loop early cancels what is unfinished."""
        ids = self._submit_all(prompts, sampling)
        left = {(id, index) for id in ids for index in range(len(self._requests[id].answers))}
        try:
            while left:
                for request, index in self._advance():
                    if request.id not in ids:
                        continue
                    answer = request.answers[index]
                    text, tokens = answer.take_delta()
                    if answer.finish_reason is not None:
                        left.discard((request.id, index))
                        yield StreamChunk(
                            ids[request.id], index, text, tokens, answer.finish_reason, answer.completion()
                        )
                    elif text or tokens:
                        yield StreamChunk(ids[request.id], index, text, tokens, None)
        finally:
            self._drop(ids)

    # One request at a time

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id; raises YalisError for a prompt that cannot be run."""
        engine = self._running()
        sampling = sampling or SamplingParams()
        text, tokens = self._tokenize(prompt)
        self._check(tokens, sampling, engine)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        request = _Request(self._next_id, text, tokens, [])
        self._next_id += 1
        self._requests[request.id] = request
        for index in range(sampling.n):
            params = dataclasses.replace(sampling, seed=derive_seed(seed, index), n=1)
            sequence = engine.add(tokens, params)
            request.answers.append(Answer(sequence, params, self.tokenizer))
            self._by_sequence[sequence.id] = (request, index)
        return request.id

    def poll(self) -> list[tuple[int, RequestOutput]]:
        """Run one engine step; returns (request id, result) of the requests that finished since the last call."""
        self._advance()
        done, self._done = self._done, {}
        return list(done.items())

    def cancel(self, request_id: int) -> None:
        """Stop a request. Its result, with what it has so far, comes from the next poll(); unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None or self._engine is None:
            return
        for answer in request.answers:
            if answer.finish_reason is None:
                self._apply(self._engine.scheduler.cancel(answer.sequence.id))

    @property
    def num_unfinished(self) -> int:
        """Requests without a result yet."""
        return len(self._requests)

    @property
    def max_model_len(self) -> int:
        return self._running().max_model_len

    @property
    def stats(self) -> EngineStats:
        return self._running().stats

    def close(self) -> None:
        """Let go of the model and its memory; unfinished requests are dropped."""
        self._engine = None
        self._requests.clear()
        self._by_sequence.clear()
        self._done.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _running(self) -> Engine:
        if self._engine is None:
            raise YalisError("this LLM is closed; make a new one")
        return self._engine

    def _submit_all(self, prompts: Any, sampling: Sampling) -> dict[int, int]:
        """Request ids in order, each with its prompt's place; nothing is queued unless every prompt is good."""
        prompts = list(prompts) if _is_many(prompts) else [prompts]
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise YalisError(
                f"{len(prompts)} prompts came with {len(sampling)} SamplingParams; give one, or one for each"
            )
        ids: dict[int, int] = {}
        try:
            for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                ids[self.submit(prompt, params)] = index
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise YalisError(
                    f"{self.config.model} has no tokenizer; give token ids, or a tokenizer's folder with --tokenizer"
                )
            if not prompt:
                raise YalisError("the prompt is empty; give at least one character or token id")
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple)):
            raise YalisError(
                f"a prompt is {type(prompt).__name__}; give a string, a list of token ids, or a list of messages"
            )
        if not prompt:
            raise YalisError("the prompt is empty; give at least one character or token id")
        if isinstance(prompt[0], dict):
            if self.tokenizer is None:
                raise YalisError(f"{self.config.model} has no tokenizer, so no chat; give token ids, or --tokenizer")
            return None, self.tokenizer.encode_chat(list(prompt))  # type: ignore[arg-type]
        return None, list(prompt)  # type: ignore[arg-type]

    def _check(self, tokens: list[int], sampling: SamplingParams, engine: Engine) -> None:
        if not tokens:
            raise YalisError("the prompt is empty; give at least one character or token id")
        vocab = self.spec.vocab_size
        for token in (*tokens, *sampling.stop_token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise YalisError(f"token id {token!r} is out of range; this model has ids 0 to {vocab - 1}")
        if len(tokens) >= engine.max_model_len:
            raise YalisError(
                f"the prompt has {len(tokens)} tokens, but the context holds {engine.max_model_len} and one "
                "of them is to be generated; shorten it, or raise --max-model-len or --kv-memory where the model allows"
            )
        if sampling.stop and self.tokenizer is None:
            raise YalisError(
                "stop strings need a tokenizer; give stop_token_ids, or a tokenizer's folder with --tokenizer"
            )

    def _advance(self) -> list[tuple[_Request, int]]:
        """One engine step; returns which answers gained a token or an end."""
        return self._apply(self._running().step())

    def _apply(self, emitted: list[Emitted]) -> list[tuple[_Request, int]]:
        touched: dict[tuple[int, int], tuple[_Request, int]] = {}
        for item in emitted:
            if item.request_id not in self._by_sequence:
                continue
            request, index = self._by_sequence[item.request_id]
            answer = request.answers[index]
            if answer.receive(item):
                # A stop string was found: the scheduler learns it here, one step late.
                self._running().scheduler.finish(answer.sequence.id, "stop")
            touched[request.id, index] = (request, index)
        for request, _ in touched.values():
            if request.finished and request.id in self._requests:
                del self._requests[request.id]
                for answer in request.answers:
                    del self._by_sequence[answer.sequence.id]
                self._done[request.id] = request.output()
        return list(touched.values())

    def _drop(self, ids: Iterable[int]) -> None:
        """Cancel requests whose results nobody wants any more."""
        for id in ids:
            self.cancel(id)
            self._done.pop(id, None)


@dataclasses.dataclass
class _Request:
    """A prompt and its n answers in the making."""

    id: int
    prompt: str | None
    tokens: list[int]
    answers: list[Answer]

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def output(self) -> RequestOutput:
        return RequestOutput(self.prompt, self.tokens, [answer.completion() for answer in self.answers])


def _is_many(prompts: Any) -> bool:
    """Whether this is a list of prompts rather than one prompt of ids or messages."""
    return isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], (int, dict)))
