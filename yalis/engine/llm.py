"""The public LLM: text in, text out, over the engine's token ids."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Union

import torch

from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from yalis.comm.selection import check_backend_name
from yalis.config import DEFAULT_MODEL, EngineConfig
from yalis.engine.answer import Answer, Progress
from yalis.engine.device import release_memory
from yalis.engine.engine import Engine, EngineStats
from yalis.engine.interrupts import Stopped, interrupts_held
from yalis.engine.replica_ranks import RankReport, ReplicaRanks, agree, agree_on_model, split_of
from yalis.engine.replicas import Replicas
from yalis.engine.step_profiler import Profile, RankProfile
from yalis.engine.worker import WORKER, serve_rank
from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.parallel.plan import Split
from yalis.sampling.noise import derive_seed
from yalis.scheduling.plan import Emitted
from yalis.spec import ModelSpec, read_spec
from yalis.types import Message, Prompt, RankTopology, RequestOutput, SamplingParams, StreamChunk

Sampling = Union[SamplingParams, Sequence[SamplingParams], None]
Results = dict[int, RequestOutput]
News = deque["tuple[_Request, int]"]

_EMPTY = "the prompt is empty; give at least one character or token id"


class LLM:
    """A loaded model. Keyword arguments are the fields of EngineConfig, the same names as the command line's flags.

    `generate`, `chat` and `stream` run requests to their end; `submit`, `poll` and `cancel` are what they are made of.
    Close it, or use it in a `with` block, to give its memory back. It belongs to one thread.

    With tp, pp or dp above 1 it starts the other ranks itself, unless a launcher (torchrun, srun, mpirun) has: then
    every rank runs the same script, `LLM(...)` of ranks other than the first returns once the first has closed its own,
    and their `generate`, `chat` and `stream` give nothing: use results where `llm.rank == 0`.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **fields: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(fields) - known):
            raise YalisError(f"LLM has no argument {unknown[0]!r}; accepted: {', '.join(sorted(known))}")
        self.config = EngineConfig(model=str(model), **fields)
        self._requests: dict[int, _Request] = {}
        self._by_sequence: dict[int, tuple[_Request, int]] = {}
        self._done: Results = {}  # of submit(), until a poll() takes them
        self._next_id = 0
        self.tokenizer: Tokenizer | None = None
        self._engine: Engine | Replicas | None = None
        self._ranks: ReplicaRanks | None = None
        split = split_of(self.config)
        # Ranks that a launcher started meet first, so that all of them hear what is wrong with the model.
        self._world = None if detect_launcher().size == 1 else join(split.size, WORKER, self.config.join_timeout)
        #: 0 for the process that reads requests and gets results
        self.rank = 0 if self._world is None else self._world.rank
        if self._world is not None and self.rank > 0:
            serve_rank(self._world, self.config)
            return
        try:
            self._open(split)
        except BaseException as error:
            if self._world is not None:
                self._world.fail(first_line(error) if isinstance(error, Exception) else type(error).__name__)
                if self._ranks is not None:
                    self._ranks.close()
                self._leave()
            raise

    def _open(self, split: Split) -> None:
        config = self.config
        check_backend_name(config.allreduce)
        checkpoint = open_checkpoint(config.model, config.load, config.load_seed)
        try:
            self.spec: ModelSpec = read_spec(checkpoint.config, checkpoint.label)
            split.check(self.spec, checkpoint.label)
            self.tokenizer = load_tokenizer(checkpoint, config.tokenizer)
            eos = frozenset(
                (*eos_token_ids(checkpoint), *(self.tokenizer.eos_ids if self.tokenizer is not None else ()))
            )
            if self._world is None:
                self._world = join(split.size, WORKER, config.join_timeout)
            world = self._world
            agree(world, config)
            agree_on_model(world, checkpoint, eos)
            self._ranks = ReplicaRanks(world, config, self.spec, checkpoint, eos)
            engine = Engine(config, self.spec, self._ranks, eos)
            self._engine = engine if config.dp == 1 else Replicas(engine, world.open_links(0), config.max_num_seqs)
        finally:
            checkpoint.close()

    # Whole jobs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the order of the prompts. Ranks other than the first get none.

        A Ctrl-C becomes Stopped, a KeyboardInterrupt whose `done` has the results with what there is of them; so has
        a YalisFailure, such as a rank that died.
        """
        if self.rank > 0:
            return []
        done: Results = {}
        ids = self._submit_all(prompts, sampling, done)
        try:
            while len(done) < len(ids):
                self._advance()
                if progress is not None:
                    progress(Progress(len(done), len(ids), self.stats.output_tokens))
        except KeyboardInterrupt as interrupt:
            words = f"{len(done)} of {len(ids)} prompts done"
            self._cancel_all(ids)
            raise Stopped(words, [done[id] for id in ids]) from interrupt
        except YalisFailure as failure:
            self._cancel_all(ids)
            failure.done = [done[id] for id in ids]
            raise
        finally:
            self._cancel_all(ids)
        return [done[id] for id in ids]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; a message is {"role": ..., "content": ...}."""
        if not messages:
            raise YalisError('the conversation is empty; give at least one {"role": "user", "content": ...}')
        conversations = [messages] if isinstance(messages[0], dict) else list(messages)
        return self.generate([list(conversation) for conversation in conversations], sampling)  # type: ignore[arg-type]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None) -> Iterator[StreamChunk]:
        """Text as it becomes sure. Leaving the loop early cancels what is unfinished."""
        if self.rank > 0:
            return
        news: News = deque()
        ids = self._submit_all(prompts, sampling, {}, news)
        left = {(id, index) for id in ids for index in range(len(self._requests[id].answers))}
        try:
            while left:
                if not news:
                    self._advance()
                    continue
                request, index = news.popleft()
                answer, place = request.answers[index], ids[request.id]
                text, tokens = answer.take_delta()
                if answer.finish_reason is None:
                    if text or tokens:
                        yield StreamChunk(place, index, text, tokens, None)
                elif (request.id, index) in left:
                    left.remove((request.id, index))
                    yield StreamChunk(place, index, text, tokens, answer.finish_reason, answer.completion())
        finally:
            self._cancel_all(ids)

    # One request at a time

    def submit(self, prompt: Prompt, sampling: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id; raises YalisError for a prompt that cannot be run."""
        return self._submit(prompt, sampling or SamplingParams(), self._done)

    def poll(self) -> list[tuple[int, RequestOutput]]:
        """Run one engine step; returns (id, result) of the submitted requests that finished since the last call."""
        self._advance()
        done = list(self._done.items())
        self._done.clear()
        return done

    def cancel(self, request_id: int) -> None:
        """Stop a request. Its result, with what it has so far, comes from the next poll(); unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None or self._engine is None:
            return
        with interrupts_held():
            for answer in request.answers:
                if answer.finish_reason is None:
                    self._apply(self._engine.cancel(answer.sequence.id))

    @property
    def num_unfinished(self) -> int:
        """Requests without a result yet."""
        return len(self._requests)

    def tokens_so_far(self) -> dict[int, int]:
        """Of every request without a result, by id; 0 until it has begun."""
        return {id: sum(answer.num_tokens for answer in request.answers) for id, request in self._requests.items()}

    @property
    def max_model_len(self) -> int:
        return self._running().max_model_len

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self._running().device

    @property
    def stats(self) -> EngineStats:
        return self._running().stats

    # Measurements

    @property
    def topology(self) -> RankTopology:
        """The hosts that the ranks run on, and what started the ranks."""
        self._running()
        assert self._world is not None
        members = self._world.members
        return RankTopology(
            tuple(member.host for member in members),
            tuple(member.node for member in members),
            detect_launcher().launcher,
        )

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Profile the steps run inside the block on every rank; afterwards `ranks` of the result has a profile of each.

        Requests may be running when the block begins and when it ends. Needs dp=1.
        """
        engine = self._single_engine("profile()")
        if engine.runner.profiler.running:
            raise YalisError("this LLM is being profiled already; leave the first profile() block before the next")
        with interrupts_held(), self._phase_running():
            profile = Profile(engine.start_profiling())
        try:
            yield profile
        except BaseException:
            with suppress(YalisError):  # the error of the block is the one to raise
                self._stop_profiling(engine)
            raise
        profile.ranks = self._stop_profiling(engine)

    def _stop_profiling(self, engine: Engine) -> list[RankProfile]:
        with interrupts_held(), self._phase_running():
            return engine.stop_profiling()

    def rank_reports(self) -> list[RankReport]:
        """Return memory and busy time of each rank. Needs dp=1, and no unfinished request."""
        engine = self._single_engine("rank_reports()")
        if self._requests:
            raise YalisError(f"{len(self._requests)} requests are unfinished; call rank_reports() when all have ended")
        with interrupts_held(), self._phase_running():
            return engine.reports()

    def set_micro_batches(self, count: int) -> None:
        """Set how many steps may be in flight at once from now on, as the field micro_batches does. Needs dp=1."""
        self._single_engine("set_micro_batches()").set_micro_batches(count)

    def close(self) -> None:
        """Let go of the model and its memory; unfinished requests are dropped."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._requests.clear()
        self._by_sequence.clear()
        self._done.clear()
        device = engine.device
        engine.close()
        self._leave()
        del engine
        self._ranks = None
        release_memory(device)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _leave(self) -> None:
        """Ranks that we started end with the engine; those of a launcher wait for the next one."""
        if self._world is not None and detect_launcher().size == 1:
            self._world.close()
        self._world = None

    def _single_engine(self, call: str) -> Engine:
        engine = self._running()
        if isinstance(engine, Replicas):
            raise YalisError(f"{call} covers one replica and dp is {self.config.dp}; create the LLM with dp=1")
        return engine

    def _running(self) -> Engine | Replicas:
        if self._engine is None:
            raise YalisError("this LLM is closed; make a new one")
        return self._engine

    def _submit_all(
        self, prompts: Any, sampling: Sampling, results: Results, news: News | None = None
    ) -> dict[int, int]:
        """Request ids in order, each with its prompt's place; nothing is queued unless every prompt is good."""
        prompts = list(prompts) if _is_many(prompts) else [prompts]
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if not isinstance(sampling, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in sampling):
            raise YalisError(f"sampling is {sampling!r}; give SamplingParams(...), or a list with one for each prompt")
        if len(sampling) != len(prompts):
            raise YalisError(
                f"{len(prompts)} prompts came with {len(sampling)} SamplingParams; give one, or one for each"
            )
        ids: dict[int, int] = {}
        try:
            for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                ids[self._submit(prompt, params, results, news)] = index
        except BaseException:
            self._cancel_all(ids)
            raise
        return ids

    def _submit(self, prompt: Prompt, sampling: SamplingParams, results: Results, news: News | None = None) -> int:
        engine = self._running()
        text, tokens = self._tokenize(prompt)
        tokens = self._check(tokens, sampling, engine)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        request = _Request(self._next_id, text, tokens, [], results, news)
        self._next_id += 1
        self._requests[request.id] = request
        for index in range(sampling.n):
            params = dataclasses.replace(sampling, seed=derive_seed(seed, index), n=1)
            sequence = engine.add(tokens, params)
            request.answers.append(Answer(sequence, params, self.tokenizer))
            self._by_sequence[sequence.id] = (request, index)
        return request.id

    def _cancel_all(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.cancel(id)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, (str, list, tuple)):
            given = type(prompt).__name__
            raise YalisError(f"a prompt is of type {given}; give a string, a list of token ids, or a list of messages")
        if not prompt:
            raise YalisError(_EMPTY)
        if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
            return None, list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise YalisError(
                f"{self.config.model} has no tokenizer for texts and chats; give token ids, or a tokenizer's folder "
                "with --tokenizer"
            )
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, self.tokenizer.encode_chat(list(prompt))  # type: ignore[arg-type]

    def _check(self, tokens: Sequence[Any], sampling: SamplingParams, engine: Engine | Replicas) -> list[int]:
        """The ids as plain integers, if this model can run them."""
        if not tokens:
            raise YalisError(_EMPTY)
        vocab = self.spec.vocab_size
        ids = _ids(tokens, vocab)
        _ids(sampling.stop_token_ids, vocab)  # or it says what is wrong with one
        if len(tokens) >= engine.max_model_len:
            raise YalisError(
                f"the prompt has {len(tokens)} tokens, but the context holds {engine.max_model_len} and one "
                f"of them is to be generated; shorten it{self._longer_context(engine.max_model_len)}"
            )
        if sampling.stop and self.tokenizer is None:
            raise YalisError(
                "stop strings need a tokenizer; give stop_token_ids, or a tokenizer's folder with --tokenizer"
            )
        return ids

    def _longer_context(self, held: int) -> str:
        """What would make it hold more: that depends on what bounds it."""
        if held >= self.spec.max_position:
            return ": the model was made for no more"
        return f", or raise {'--max-model-len' if self.config.max_model_len else '--kv-memory or --kv-blocks'}"

    def _advance(self) -> None:
        """One engine step and what follows from it, whole even when Ctrl-C is pressed meanwhile."""
        engine = self._running()
        with interrupts_held(), self._phase_running():
            self._apply(engine.step())

    @contextmanager
    def _phase_running(self) -> Iterator[None]:
        """A rank that dies while nothing runs ends the next call; one that dies meanwhile may hold this one up."""
        assert self._world is not None
        self._world.phase = "running"
        try:
            yield
        finally:
            self._world.phase = "idle"

    def _apply(self, emitted: list[Emitted]) -> None:
        for item in emitted:
            if item.request_id not in self._by_sequence:
                continue
            request, index = self._by_sequence[item.request_id]
            answer = request.answers[index]
            if answer.receive(item):
                # A stop string was found: the scheduler learns it here, one step late.
                self._running().finish(answer.sequence.id)
            if request.news is not None:
                request.news.append((request, index))
            if request.finished:
                del self._requests[request.id]
                for ended in request.answers:
                    del self._by_sequence[ended.sequence.id]
                request.results[request.id] = request.output()


@dataclasses.dataclass
class _Request:
    """A prompt and its n answers in the making."""

    id: int
    prompt: str | None
    tokens: list[int]
    answers: list[Answer]
    results: Results  # where its result goes: to the call that asked, or to poll()
    news: News | None  # where a stream hears that one of its answers moved

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def output(self) -> RequestOutput:
        return RequestOutput(self.prompt, self.tokens, [answer.completion() for answer in self.answers])


def _ids(tokens: Sequence[Any], vocab: int) -> list[int]:
    """Plain integers, if a vocabulary of this size has them all."""
    # Nearly always they are that already: a long prompt is not to be looked at token by token.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab:
        return list(tokens)
    for token in tokens:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token < vocab:
            raise YalisError(f"token id {token!r} is not one of this model's, which are 0 to {vocab - 1}")
    return [operator.index(token) for token in tokens]


def _is_many(prompts: Any) -> bool:
    """Whether this is a list of prompts rather than one prompt of ids or messages."""
    if not isinstance(prompts, (list, tuple)):
        return False
    return not (prompts and (isinstance(prompts[0], dict) or hasattr(prompts[0], "__index__")))
