"""A model on its ranks: opens and closes it, and has its properties and measurements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from yalis.checkpoint.generation_config import sampling_defaults
from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from yalis.checkpoint.unsupported import ignored_parts
from yalis.comm.selection import check_backend_name
from yalis.config import EngineConfig
from yalis.engine.device import reduced_context
from yalis.engine.engine import Engine, EngineStats
from yalis.engine.expert_choice import list_splits
from yalis.engine.interrupts import interrupts_held
from yalis.engine.replica_ranks import RankReport, ReplicaRanks, agree, agree_on_model
from yalis.engine.replicas import ReplicaRouter
from yalis.engine.request_loop import RequestLoop
from yalis.engine.step_profiler import Profile
from yalis.engine.worker import join_engine, serve_rank
from yalis.errors import YalisError, YalisFailure
from yalis.launch.launchers import detect_launcher
from yalis.log import get_logger
from yalis.sampling.grammar import GrammarCompiler
from yalis.spec import ModelSpec, read_spec
from yalis.types import RankTopology, SamplingParams

log = get_logger(__name__)

_Result = TypeVar("_Result")

_NO_EMBEDDINGS = "YALIS generates text and computes no embeddings, classes or scores"
#: Attributes of vLLM's LLM that this one does not have.
_VLLM_ATTRIBUTES = {
    "beam_search": "beam search is not supported; give SamplingParams(n=..., temperature=1.0) for several completions",
    "classify": _NO_EMBEDDINGS,
    "embed": _NO_EMBEDDINGS,
    "llm_engine": "there is no LLMEngine; the LLM itself has max_model_len, spec, config, stats and topology",
    "start_profile": "write `with llm.profile() as profile:`",
    "encode": f"{_NO_EMBEDDINGS}; llm.tokenizer.encode(text) returns token ids",
    "score": f"{_NO_EMBEDDINGS}; SamplingParams(prompt_logprobs=0) returns log-probabilities of a prompt",
}


class LoadedModel:
    """The base of LLM: everything but its requests."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. On ranks of a launcher other than 0, serve rank 0 until it closes its LLM."""
        self.config = config
        self.tokenizer: Tokenizer | None = None
        #: fields of SamplingParams that the model's generation_config.json sets
        self.sampling_defaults: dict[str, Any] = {}
        self._loop: RequestLoop | None = None
        self._ranks: ReplicaRanks | None = None
        # Ranks of a launcher join before the model is opened, so that an error there reaches all of them.
        self._world = None if detect_launcher().size == 1 else join_engine(self.config)
        #: 0 on the process that submits requests and receives results
        self.rank = 0 if self._world is None else self._world.rank
        if self._world is not None and self.rank > 0:
            serve_rank(self._world, self.config)
            return
        try:
            self._open()
        except BaseException as error:
            reason = error
            if self._world is not None:
                reason = self._world.abort(error)
                if self._ranks is not None:
                    self._ranks.close()
                self._leave()
            if reason is error:
                raise
            raise reason from reason.__cause__

    def _open(self) -> None:
        config = self.config
        check_backend_name(config.allreduce)
        checkpoint = open_checkpoint(config.model, config.load, config.load_seed)
        try:
            self.spec: ModelSpec = read_spec(checkpoint.config, checkpoint.label)
            list_splits(config, self.spec, checkpoint.label)  # raises if there is none
            for warning in ignored_parts(checkpoint, self.spec.num_layers):
                log.warning("%s", warning)
            if config.generation_config == "auto":
                self.sampling_defaults = sampling_defaults(checkpoint.source)
            self.tokenizer = load_tokenizer(checkpoint, config.tokenizer)
            eos = frozenset(
                (*eos_token_ids(checkpoint), *(self.tokenizer.eos_ids if self.tokenizer is not None else ()))
            )
            if self._world is None:
                self._world = join_engine(config)
            world = self._world
            with world.progress.step():
                agree(world, config)
                agree_on_model(world, checkpoint, eos)
                tokenizer = self.tokenizer  # a function that refers to this LLM would keep it alive
                self.grammars = GrammarCompiler(lambda: tokenizer, self.spec.vocab_size, eos, checkpoint.label)
                self._ranks = ReplicaRanks(world, config, self.spec, checkpoint, eos, grammars=self.grammars)
                engine = Engine(config, self.spec, self._ranks, eos)
                self._loop = RequestLoop(
                    engine if config.dp == 1 else ReplicaRouter(engine, world.open_links(0), config.max_num_seqs), world
                )
            world.set_idle()
            reduced = reduced_context(config, self.spec, engine.device, self.max_model_len)
            if reduced is not None and config.kv_blocks is None:  # which the user, or a benchmark, has counted
                log.warning("%s", reduced)
            self._ranks = None
            self._finalizer = weakref.finalize(self, self._loop.close)
            self._finalizer.atexit = False  # the world has its own exit handler
        finally:
            checkpoint.close()

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Explain what vLLM's LLM has and this one does not."""
            if name in _VLLM_ATTRIBUTES:
                raise AttributeError(f"LLM has no {name!r}: {_VLLM_ATTRIBUTES[name]}")
            return object.__getattribute__(self, name)  # raises the usual AttributeError

    @property
    def num_unfinished(self) -> int:
        """Requests without a result yet."""
        return len(self._loop.requests) if self._loop is not None else 0

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters of requests that give none, with `changes`: the model's generation_config.json over
        the defaults of SamplingParams. With generation_config="none" they are those of SamplingParams alone."""
        return SamplingParams(**{**self.sampling_defaults, **changes})

    def get_default_sampling_params(self) -> SamplingParams:
        """The same as default_sampling_params(), under vLLM's name."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer, as vLLM's method of this name does: the same as `tokenizer.hf`."""
        if self.tokenizer is None:
            raise YalisError(f"{self.config.model} has no tokenizer; give the folder of one with tokenizer=")
        return self.tokenizer.hf

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self._running().engine.max_model_len

    @property
    def device(self) -> torch.device:
        """The device of rank 0."""
        return self._running().engine.device

    @property
    def stats(self) -> EngineStats:
        return self._running().engine.stats

    @property
    def job_failure(self) -> YalisFailure | None:
        """The failure that ended the job, such as a rank that died while no request ran; None while it is healthy."""
        return None if self._world is None else self._world.job_failure()

    @property
    def scheduler_settings(self) -> dict[str, Any]:
        """The fields of SchedulerConfig, and the KV blocks of one replica as `num_blocks`."""
        engine = self._engine
        scheduler = (engine.local if isinstance(engine, ReplicaRouter) else engine).scheduler
        return {**asdict(scheduler.config), "num_blocks": scheduler.blocks.num_blocks}

    @property
    def topology(self) -> RankTopology:
        """The hosts that the ranks run on, and the launcher that started the ranks."""
        self._running()
        assert self._world is not None
        members = self._world.members
        return RankTopology(
            tuple(member.host for member in members),
            tuple(member.node for member in members),
            detect_launcher().launcher,
        )

    def announce_stop(self) -> None:
        """Tell the other ranks that this process will soon close the LLM: they wait longer after a SIGTERM."""
        if self._world is not None:
            self._world.announce_stop()

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Profile the steps that run inside the block. After it, `ranks` of the yielded object has a profile per rank.

        Requests may be running when the block begins and when it ends. Needs dp=1. No other thread may wait for output
        inside the block: the profile of a CPU covers the thread that entered it.
        """
        engine = self._single_engine("profile()")
        if engine.runner.profiler.running:
            raise YalisError("this LLM is being profiled already; leave the first profile() block before the next")
        try:
            with interrupts_held():  # torch crashes at exit if its profiler was started and never stopped
                profile = Profile(self._between_steps(engine.start_profiling))
            yield profile
        except BaseException:
            with suppress(YalisError), interrupts_held():  # the error of the block is the one to raise
                if engine.runner.profiler.running:
                    self._between_steps(engine.stop_profiling)
            raise
        with interrupts_held():
            profile.ranks = self._between_steps(engine.stop_profiling)

    def rank_reports(self) -> list[RankReport]:
        """Return memory and busy time of each rank. Needs dp=1 and no unfinished request."""
        engine = self._single_engine("rank_reports()")
        if self.num_unfinished:
            raise YalisError("requests are unfinished; call rank_reports() after they have finished")
        return self._between_steps(engine.reports)

    def set_micro_batches(self, count: int) -> None:
        """Set how many steps may be in flight at once from now on, as the field micro_batches does. Needs dp=1."""
        engine = self._single_engine("set_micro_batches()")
        self._between_steps(lambda: engine.set_micro_batches(count))

    def close(self) -> None:
        if self._loop is not None:
            self._finalizer()
            self._world = None

    def _leave(self) -> None:
        """End the ranks that this process started. Ranks of a launcher stay and wait for the next LLM."""
        if self._world is not None and detect_launcher().size == 1:
            self._world.close()
        self._world = None

    @property
    def _engine(self) -> Engine | ReplicaRouter:
        return self._running().engine

    def _running(self) -> RequestLoop:
        if self._loop is None:
            raise YalisError("this LLM is closed; create a new one")
        _ = self._loop.engine  # raises YalisError if it cannot be used
        return self._loop

    def _single_engine(self, call: str) -> Engine:
        engine = self._engine
        if isinstance(engine, ReplicaRouter):
            raise YalisError(f"{call} covers one replica and dp is {self.config.dp}; create the LLM with dp=1")
        return engine

    def _between_steps(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that uses all ranks, while no step runs."""
        loop = self._running()

        def run() -> _Result:
            with loop.phase_running():
                return function()

        return loop.call(run)
