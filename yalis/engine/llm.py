"""The public LLM: prompts in, text and token ids out."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from yalis.config import DEFAULT_MODEL, EngineConfig, GridShape
from yalis.engine.interrupts import Stopped
from yalis.engine.loaded_model import LoadedModel
from yalis.engine.progress import Progress, progress_callback
from yalis.engine.prompts import (
    Sampling,
    check_request,
    choose_sampling,
    encode_prompt,
    list_conversations,
    pair_with_sampling,
)
from yalis.engine.request_loop import RequestLoop
from yalis.engine.requests import PendingRequest, RequestGroup
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.keywords import CHAT_KEYWORDS, GENERATE_KEYWORDS, LLM_KEYWORDS, NO_KEYWORDS, check_keywords
from yalis.sampling.noise import derive_seed
from yalis.types import (
    SAMPLING_FIELDS,
    Message,
    Prompt,
    RequestEvent,
    RequestOutput,
    SamplingParams,
    StreamChunk,
)


class LLM(LoadedModel):
    """A loaded model. The keyword arguments are the fields of EngineConfig, named like the flags of the command line.

    `generate`, `chat` and `stream` run requests to completion. `submit`, `events`, `poll` and `cancel` control single
    requests. Close the LLM, or use it in a `with` block, to free its memory; an LLM that is no longer referenced is
    closed too. Any thread may call any method: requests of all threads run in the same batch. A process that was
    forked from the one that created the LLM cannot use it.

    With tp, pp or dp above 1 the LLM starts the other ranks itself, unless a launcher (torchrun, srun, mpirun) started
    them. Under a launcher every rank runs the same script. On ranks other than 0, `LLM(...)` returns once rank 0 has
    closed its LLM, and `generate`, `chat` and `stream` return nothing: use results where `llm.rank == 0`.
    """

    @check_keywords("LLM", LLM_KEYWORDS, SAMPLING_FIELDS)
    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        load: str = "auto",
        load_seed: int = 0,
        routing: str = "model",
        generation_config: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
        block_size: int | None = None,
        kv_blocks: int | None = None,
        kv_memory: float | None = None,
        memory_fraction: float = 0.9,
        prefix_reuse: bool = True,
        eager: bool = False,
        compile: bool = False,
        threads: int | None = None,
        tp: int | str | GridShape = (1, 1),
        pp: int = 1,
        dp: int = 1,
        expert_parallel: bool | None = None,
        micro_batches: int | None = None,
        allreduce: str = "auto",
        ranks_per_node: int | None = None,
        ranks_per_gpu: int = 1,
        join_timeout: float = 300.0,
        step_timeout: float = 600.0,
        insecure_rendezvous: bool = False,
    ) -> None:
        given = {**locals(), "model": os.fspath(model) if isinstance(model, os.PathLike) else model}
        config = EngineConfig(**{field.name: given[field.name] for field in dataclasses.fields(EngineConfig)})
        self._submitted = RequestGroup()  # the requests of submit()
        self._next_id = itertools.count()
        self._encoding = threading.Lock()  # tokenizers may change their state while they encode
        super().__init__(config)

    # Requests that run to completion

    @check_keywords("generate()", GENERATE_KEYWORDS, SAMPLING_FIELDS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        progress: Callable[[Progress], None] | bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt and return the results in the order of the prompts; [] on ranks other than 0.

        A prompt is a string, token ids (a list, or a 1-D array of numpy or torch), a list of chat messages, or a dict
        of vLLM: {"prompt": text} or {"prompt_token_ids": ids}. `sampling` is one SamplingParams for all prompts, or a
        list with one for each; `sampling_params` is vLLM's name for it. The error of an invalid prompt names its index.

        `progress` is called with a Progress after each step. By default a progress line is shown on stderr if that is
        a terminal; `progress=False`, or vLLM's `use_tqdm=False`, turns it off.

        Without `sampling` the prompts run with default_sampling_params(). A SamplingParams is used as it is: a field
        that it does not set has the default of SamplingParams, not that of the model.

        Ctrl-C raises Stopped, a KeyboardInterrupt whose `done` has a result for every prompt with the tokens generated
        so far. A YalisFailure, such as a rank that died, has the same `done`.
        """
        if self.rank > 0:
            return []
        with progress_callback(progress if use_tqdm is None else use_tqdm) as report:
            return self._generate(prompts, choose_sampling(sampling, sampling_params), report)

    def _generate(
        self,
        prompts: Any,
        sampling: Sampling,
        report: Callable[[Progress], None] | None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        group = RequestGroup(events=False)
        loop, ids = self._running(), self.submit_all(prompts, sampling, group, template_kwargs)
        done = group.finished
        try:
            while group.unfinished:
                if report is None:
                    loop.advance(lambda: not group.unfinished)
                else:
                    loop.advance(group.changed_since(group.version))
                    report(Progress(len(done), len(ids), group.output_tokens, group.max_output_tokens))
        except KeyboardInterrupt as interrupt:
            message = f"{len(done)} of {count_of(len(ids), 'prompt')} done"
            loop.cancel_and_wait(ids)
            raise Stopped(message, [done[id] for id in ids]) from interrupt
        except YalisFailure as failure:
            loop.cancel_and_wait(ids)
            failure.done = [done[id] for id in ids]
            raise
        finally:
            loop.cancel(ids)
        return [done[id] for id in ids]

    @check_keywords("chat()", CHAT_KEYWORDS, SAMPLING_FIELDS)
    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        progress: Callable[[Progress], None] | bool | None = None,
        use_tqdm: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list of conversations.

        A conversation is a list of {"role": ..., "content": ...}. Content is a string or a list of text parts,
        {"type": "text", "text": ...}. A string instead of a list is one user message.
        `chat_template_kwargs` are variables of the chat template, such as {"enable_thinking": False} for Qwen3.
        """
        conversations, chosen = list_conversations(messages), choose_sampling(sampling, sampling_params)
        if self.rank > 0:
            return []
        with progress_callback(progress if use_tqdm is None else use_tqdm) as report:
            return self._generate(conversations, chosen, report, chat_template_kwargs)

    @check_keywords("stream()", NO_KEYWORDS, SAMPLING_FIELDS)
    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None, *, sampling_params: Sampling = None
    ) -> Generator[StreamChunk, None, None]:
        """Yield text and token ids as they are generated. Leaving the loop early cancels the unfinished requests."""
        if self.rank > 0:
            return
        group = RequestGroup()
        loop, ids = self._running(), self.submit_all(prompts, choose_sampling(sampling, sampling_params), group)
        prompt_index = {id: index for index, id in enumerate(ids)}
        try:
            for event in self._events(group):
                yield StreamChunk(
                    prompt_index[event.request_id],
                    event.completion_index,
                    event.text,
                    event.token_ids,
                    event.finish_reason,
                    event.completion,
                )
        finally:
            loop.cancel(ids)
            with loop.output:
                group.drop_events()

    # Single requests

    @check_keywords("submit()", NO_KEYWORDS, SAMPLING_FIELDS)
    def submit(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, sampling_params: SamplingParams | None = None
    ) -> int:
        """Queue a prompt and return its request id; raises YalisError for a prompt that cannot be run.

        The output comes from events() or poll(), whichever reads it first: a result is returned once. Requests of
        generate(), chat() and stream() appear in neither. While another thread runs a step, this does not wait for it.
        """
        chosen = choose_sampling(sampling, sampling_params)
        if chosen is not None and not isinstance(chosen, SamplingParams):
            raise YalisError(f"sampling is {chosen!r}; give SamplingParams(...)")
        return self._submit(prompt, chosen or self.default_sampling_params(), self._submitted)

    def events(self) -> Iterator[RequestEvent]:
        """Run steps and yield new output of submitted requests, until none of them is unfinished.

        Between two events the caller may submit and cancel requests, or leave the loop and call events() again later.
        """
        if self.rank == 0:
            self._running()
            yield from self._events(self._submitted)

    def poll(self) -> list[tuple[int, RequestOutput]]:
        """Run one step and return (id, result) of the submitted requests that finished since the last call.

        If another thread runs steps, this waits for new output of the submitted requests instead, at most a second.
        """
        loop, group = self._running(), self._submitted
        changed = group.changed_since(group.version)
        loop.advance_once(lambda: bool(group.finished) or changed())
        with loop.output:
            return group.take_results()

    def cancel(self, request_id: int) -> None:
        """Stop a request; its result has the tokens generated so far. Ids of finished requests are ignored.

        If another thread runs a step, the request ends after that step.
        """
        if self._loop is not None:
            self._loop.cancel([request_id])

    def tokens_so_far(self) -> dict[int, int]:
        """Return the number of tokens generated so far for each unfinished request, by id."""
        requests = self._loop.requests if self._loop is not None else {}
        return {id: request.num_tokens for id, request in list(requests.items())}

    def close(self) -> None:
        """Free the model and its memory. Unfinished requests are dropped without a result."""
        self._submitted = RequestGroup()
        super().close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For AsyncLLM

    @property
    def request_loop(self) -> RequestLoop:
        return self._running()

    @property
    def is_encoding(self) -> bool:
        """Whether a thread tokenizes a prompt; others wait for it."""
        return self._encoding.locked()

    def encode_prompt(self, prompt: Prompt, template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt, which are not checked."""
        with self._encoding:
            return encode_prompt(prompt, self.tokenizer, self.config.model, template_kwargs)[1]

    def submit_all(
        self, prompts: Any, sampling: Sampling, group: RequestGroup, template_kwargs: dict[str, Any] | None = None
    ) -> list[int]:
        """Submit the prompts and return their request ids in order. If one of them is refused, all are cancelled.

        The output goes to `group`.
        """
        ids: list[int] = []
        try:
            pairs = pair_with_sampling(prompts, sampling, self.default_sampling_params())
            for index, (prompt, params) in enumerate(pairs):
                try:
                    ids.append(self._submit(prompt, params, group, template_kwargs))
                except YalisError as error:
                    if len(pairs) == 1 or isinstance(error, YalisFailure):
                        raise
                    raise type(error)(f"prompt {index}: {error}") from error
        except BaseException:
            if self._loop is not None:
                self._loop.cancel(list(group.unfinished))
            raise
        return ids

    # Internals

    def _submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        group: RequestGroup,
        template_kwargs: dict[str, Any] | None = None,
    ) -> int:
        loop = self._running()
        with self._encoding:
            text, tokens = encode_prompt(prompt, self.tokenizer, self.config.model, template_kwargs)
        has_text = self.tokenizer is not None
        tokens = check_request(tokens, sampling, has_text, self.spec, self.config, loop.engine.max_model_len)
        if sampling.structured_outputs is not None:
            self.grammars.start(sampling.structured_outputs)  # compiles it in this thread, before the steps need it
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        request = PendingRequest(next(self._next_id), text, tokens, group)
        group.max_output_tokens += sampling.n * min(sampling.max_tokens, loop.engine.max_model_len - len(tokens))
        params = [dataclasses.replace(sampling, seed=derive_seed(seed, index), n=1) for index in range(sampling.n)]
        # The prompt is the same for all completions, so only the first one scores it.
        params[1:] = [dataclasses.replace(each, prompt_logprobs=None) for each in params[1:]]
        loop.add(request, params, self.tokenizer)
        return request.id

    def _events(self, group: RequestGroup) -> Iterator[RequestEvent]:
        """Yield the group's events, advancing whenever there are none, until its requests have finished."""
        loop = self._running()
        while True:
            with loop.output:
                event, unfinished = group.next_event(), bool(group.unfinished)
            if event is not None:
                yield event
            elif unfinished:
                loop.advance(group.has_events)
            else:
                return
