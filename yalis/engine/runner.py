"""Runs the steps of one rank: packs a StepPlan, runs the model, and samples tokens from the logits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from yalis import env
from yalis.attention.base import AttentionNeeds, LayerCache
from yalis.attention.choose import choose_backend
from yalis.cache.pool import KVPool
from yalis.cache_folders import cache_folder
from yalis.checkpoint.base import Checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import count_blocks, resolve_block_size, resolve_dtype, resolve_max_len
from yalis.engine.executor import make_executor
from yalis.engine.expert_load import ExpertLoad
from yalis.engine.forward import StepResult
from yalis.engine.grammar_states import GrammarStates
from yalis.engine.oom import (
    OutOfMemory,
    allocated_bytes,
    cache_does_not_fit,
    explain_oom,
    step_does_not_fit,
    weights_do_not_fit,
)
from yalis.engine.packing import PackedStep, Packer
from yalis.engine.step_layouts import PROMPT_SIZES, StepLimits
from yalis.engine.step_profiler import StepProfiler
from yalis.errors import YalisError
from yalis.kernels import ops
from yalis.layers.attention import head_padding
from yalis.layers.mlp import route_uniformly
from yalis.log import get_logger
from yalis.models.decoder import Decoder
from yalis.parallel.memory import rank_memory
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, RankCoords, Split
from yalis.sampling.batch import LARGEST_PARAMS, SamplingBatch, SamplingRow
from yalis.sampling.grammar import GrammarCompiler, unless_required
from yalis.sampling.prompt_logprobs import PromptScorer, ScoredTokens
from yalis.sampling.sampled_tokens import SampledTokens
from yalis.sampling.sampler import Sampler
from yalis.scheduling.plan import NO_TOKEN_ALLOWED, SequenceStep, StepOutput, StepPlan
from yalis.spec import ModelSpec
from yalis.types import SamplingParams, TokenLogprobs

log = get_logger(__name__)


class PendingStep:
    """A step that was launched. `result()` waits for its tokens."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: SampledTokens | None,
        check: Callable[[], None] = lambda: None,
        scored: ScoredTokens | None = None,
        stuck: Collection[int] = (),
    ) -> None:
        """`check` raises if a communicator reports that the results of the device are invalid. `stuck`: ids of requests
        that no token can continue."""
        self._plan, self._check, self._stuck = plan, check, stuck
        self._sampled = sampled.start_copy() if sampled is not None else None
        self._scored = scored.start_copy() if scored is not None else None

    def result(self) -> StepOutput:
        prompt_logprobs = {} if self._scored is None else self._prompt_logprobs(self._scored)
        if self._sampled is None:
            return StepOutput(self._plan.step_id, {}, {}, prompt_logprobs)
        tokens, logprobs = self._sampled.to_host()
        self._check()
        ids = [step.request_id for step in self._plan.sequences if step.samples]
        return StepOutput(
            self._plan.step_id,
            {**dict(zip(ids, tokens, strict=True)), **dict.fromkeys(self._stuck, NO_TOKEN_ALLOWED)},
            {id: logprob for id, logprob in zip(ids, logprobs, strict=True) if logprob is not None},
            prompt_logprobs,
        )

    def _prompt_logprobs(self, scored: ScoredTokens) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probabilities of prompt tokens by request id."""
        logprobs = iter(scored.to_host())
        self._check()
        return {
            step.request_id: list(itertools.islice(logprobs, len(step.scored)))
            for step in self._plan.sequences
            if step.scored
        }


@dataclass
class StageTimes:
    """Host time of a rank since it was loaded, in seconds. On a CPU it includes the computation."""

    busy: float = 0.0  # packing, launching and sampling
    waiting: float = 0.0  # for the previous pipeline stage


class Runner:
    """One rank's part of the model with its KV cache, step executor and sampler."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        eos: frozenset[int],
        device: torch.device,
        grid: Grid | None = None,
        stage: Stage | None = None,
        min_over_ranks: Callable[[int], int] = lambda blocks: blocks,
        check: Callable[[], None] = lambda: None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`min_over_ranks`: maps the number of KV blocks that fit on this rank to the number that fits on all ranks.

        `check` raises if a communicator reports that the results of the device are invalid. `reading` is entered while
        weights are read. `grammars` compiles structured outputs; without it, no request may have any.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches and graph captures use the current device
        if device.type == "cuda" or config.compile:
            env.set_compile_cache_dirs(partial(cache_folder, to_write=True))
        self.check = check
        self.config, self.spec, self.eos = config, spec, eos
        self.block_size = resolve_block_size(config.block_size, device)
        self.device, self.grid, self.stage = device, grid or Grid(), stage or Stage()
        self.dtype = resolve_dtype(config.dtype, spec.dtype, device)
        self.times = StageTimes()
        self._block_bytes = 0  # of one KV block, once the cache is allocated
        self.grammars = None if grammars is None else GrammarStates(grammars)
        #: whether to use the tokens that recorded steps sample, where the sampling parameters allow it
        self.use_recorded_picks = True
        self.recorded_picks = 0  # steps in which they were used
        grid = self.grid
        heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
        padding = head_padding(heads, kv_heads, spec.num_heads // spec.num_kv_heads)
        needs = AttentionNeeds(
            len(heads) + sum(padding), len(kv_heads), spec.head_dim, self.dtype, device, self.block_size,
            window=any(spec.windows), softcap=spec.attention_softcap is not None, sinks=spec.attention_sinks,
        )  # fmt: skip
        self.backend = choose_backend(config.attention, needs)(needs)
        if config.routing == "uniform" and spec.moe is None:
            raise YalisError(f"routing='uniform' is for a mixture of experts, and {checkpoint.label} has no experts")
        max_len = resolve_max_len(config, spec, checkpoint.label)
        max_blocks = -(-max_len // self.block_size)
        explain = partial(self._model_too_large, label=checkpoint.label)
        with explain_oom(device, explain):
            self.model = Decoder(spec, grid, self.stage, max_len, self.dtype, device)
            with reading():
                self.model.load(checkpoint)
            if config.routing == "uniform":
                numbers = self.stage.layers(spec.num_layers)
                blocks = dict(zip(numbers, self.model.layers, strict=True))
                route_uniformly(blocks, max(config.max_batch_tokens, config.max_num_seqs, PROMPT_SIZES[-1]))
            self.expert_load = ExpertLoad(self.model, grid, device)
            if config.compile:
                from yalis.models.compile import compile_blocks  # defines torch ops that only compiled blocks need

                compile_blocks(self.model)
            self.vocabulary = grid.vocabulary(spec.vocab_size)
            self.sampler = Sampler(self.vocabulary, spec.vocab_size, grid.tp_group, device)
            self.scorer = PromptScorer(self.vocabulary, spec.vocab_size, grid.tp_group, device)
            # A row for each request slot, and one for the padding of recorded steps.
            self.last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=self.device)
            self.packer = Packer(config.max_num_seqs, max_blocks, self.block_size, max_len)
            limits = StepLimits(config.max_num_seqs, config.max_batch_tokens, max_len, max_blocks)
            groups = (grid.row_group, grid.col_group, grid.tp_group, self.stage.pp_group)
            self.profiler = StepProfiler(device, groups, self.expert_load.own_pairs)
            self.executor = make_executor(config, self.model, self.backend, grid, self.stage, self.last_tokens, limits)
        self.pool = self._make_pool(config, needs, max_len, min_over_ranks)
        self.executor.set_kv_caches([LayerCache(*self.pool.layer(i)) for i in range(len(self.model.layers))])
        self.executor.warm_up(self._warm_up_steps(max_len), self._block_bytes)
        self.expert_load.reset()
        self._idle_bytes = allocated_bytes(device)  # memory allocated between steps
        capacity = self.pool.num_blocks * self.block_size
        # The default length shrinks to what the KV cache holds. If the user set it, longer prompts are rejected later.
        self.max_model_len = max_len if config.max_model_len else min(max_len, capacity)
        log.info("%s %s attention=%s kv_blocks=%d", self.device, self.dtype, self.backend.name, self.pool.num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on this rank."""
        return sum(x.nbytes for x in self.model.parameters())

    def _make_pool(
        self, config: EngineConfig, needs: AttentionNeeds, max_len: int, min_over_ranks: Callable[[int], int]
    ) -> KVPool:
        """Allocate the KV cache. On a GPU, its size is the memory that activations and CUDA graphs leave free."""
        shape = (len(self.model.layers), self.block_size, needs.num_kv_heads, needs.head_dim)
        max_blocks = -(-max_len // self.block_size) * config.max_num_seqs
        graph_bytes = 0
        if self.device.type == "cuda" and config.kv_blocks is None and config.kv_memory is None:
            tokens = min(max_len, config.max_batch_tokens)
            with explain_oom(self.device, partial(self._step_too_large, tokens=tokens, sequences=1)):
                graph_bytes = self._profile_memory(needs, tokens)
        block_bytes = KVPool.block_bytes(*shape, self.dtype)
        blocks = min_over_ranks(count_blocks(config, self.device, block_bytes, max_blocks, graph_bytes))
        layers, block_size, kv_heads, head_dim = shape
        explain = partial(cache_does_not_fit, config=config, blocks=blocks, block_bytes=block_bytes, device=self.device)
        with explain_oom(self.device, explain):
            pool = KVPool(layers, blocks, block_size, kv_heads, head_dim, self.dtype, self.device)
        self._block_bytes = block_bytes
        return pool

    def _model_too_large(self, oom: OutOfMemory, label: str) -> str:
        ranks = Split(self.grid.rows, self.grid.cols, self.stage.count).size
        return weights_do_not_fit(oom, label, self._count_weight_bytes(), ranks, self.dtype, self.device)

    def _count_weight_bytes(self) -> int:
        """Return the size that the weights of this rank will have, computed from the spec."""
        grid, stage = self.grid, self.stage
        split = Split(grid.rows, grid.cols, stage.count, expert_parallel=grid.expert_parallel)
        rank = split.rank(RankCoords(0, stage.index, grid.row, grid.col))
        return rank_memory(self.spec, split, rank, self.dtype.itemsize, self.block_size).weight_bytes

    def _step_too_large(self, oom: OutOfMemory, tokens: int, sequences: int) -> str:
        return step_does_not_fit(oom, self.config, self.device, tokens, sequences, self._block_bytes)

    def _profile_memory(self, needs: AttentionNeeds, tokens: int) -> int:
        """Run the largest prefill once, so that the caching allocator holds the peak of activation memory.

        The remaining GPU memory is then given to the KV cache. Returns the bytes that CUDA graphs will need. They are
        measured first because graph capture empties the caching allocator.
        """
        blocks = -(-tokens // self.block_size)
        pool = KVPool(1, blocks, self.block_size, needs.num_kv_heads, needs.head_dim, self.dtype, self.device)
        self.executor.set_kv_caches([LayerCache(*pool.layer(0))] * len(self.model.layers))
        graph_bytes = self.executor.measure_graphs()
        rows = min(tokens, self.config.max_num_seqs)
        # A step of FUSED_GATE_MIN_ROWS or more never writes some activations, so a smaller one may need more memory.
        for count in sorted({min(tokens, ops.FUSED_GATE_MIN_ROWS - 1), tokens}):
            logit_rows = range(count - min(rows, count), count)
            packed = self.packer.pack([dummy_prompt(0, count, self.block_size)], logit_rows)
            logits = self.executor.dry_run(packed).out
        if self.stage.last:
            self._run_sampler(logits, [SamplingRow(LARGEST_PARAMS, seed=0, position=0)] * rows)
        return graph_bytes

    def _warm_up_steps(self, max_len: int) -> Iterator[PackedStep]:
        """Yield prompts whose lengths cover all kernel variants, alone and next to a decoding sequence."""
        config = self.config
        max_len = min(max_len, self.pool.num_blocks * self.block_size)
        sizes = [(16, 0), (32, 0), (64, 0), (65, 0), (128, 0), (600, 0), (65, 1)]  # (prompt tokens, decoding sequences)
        if config.max_batch_tokens >= ops.FUSED_GATE_MIN_ROWS:
            sizes.append((ops.FUSED_GATE_MIN_ROWS, 0))
        for prompt_tokens, decoding in sizes:
            whole, rest = divmod(min(prompt_tokens, config.max_batch_tokens - decoding), max_len)
            lengths = [max_len] * whole + [rest] * (rest > 0) + [1] * decoding
            if len(lengths) <= config.max_num_seqs:
                yield self.packer.pack([dummy_prompt(i, length, self.block_size) for i, length in enumerate(lengths)])

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """Start the step. On a GPU this returns before it has run. None if another pipeline stage samples."""
        explain = partial(self._step_too_large, tokens=plan.num_tokens, sequences=len(plan.sequences))
        with self.profiler.step(plan), explain_oom(self.device, explain, self._idle_bytes):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> PendingStep | None:
        begin = time.perf_counter()
        step = self.packer.pack(plan.sequences)
        ready = time.perf_counter()
        hidden = self.stage.receive((plan.num_tokens, self.model.hidden), self.dtype, self.device)
        arrived = time.perf_counter()
        result = self.executor.run(step, hidden)
        pending = None
        if self.stage.last:
            scored = None if result.scored is None else self._score(plan, result.scored)
            sampled, stuck = self._sample(plan, step, result)
            pending = PendingStep(plan, sampled, self.check, scored, stuck)
        else:
            self.stage.send(result.out.clone())  # the next replay overwrites the result
        self.times.busy += time.perf_counter() - begin - (arrived - ready)
        self.times.waiting += arrived - ready
        return pending

    def _score(self, plan: StepPlan, x: Tensor) -> ScoredTokens:
        """Return the log-probabilities of prompt tokens. `x` [N, hidden]: the input of the LM head."""
        tokens = [token for step in plan.sequences for token in step.scored]
        counts = [step.params.prompt_logprobs or 0 for step in plan.sequences for _ in step.scored]
        return self.scorer.score(x, self.model.compute_logits, tokens, counts)

    def _sample(self, plan: StepPlan, packed: PackedStep, result: StepResult) -> tuple[SampledTokens | None, list[int]]:
        """Return the tokens of the sequences that sample, None if none of them does, and the ids of those that no token
        can continue."""
        if not len(packed.sampling_rows):
            return None, []
        if self.use_recorded_picks:
            if result.tokens is not None:
                self.recorded_picks += 1
                return SampledTokens(result.tokens, None), []
            if packed.picks and self.sampler.fused:
                # An eager step, such as prompts that arrive while others decode: no Python work for each row.
                slots = result.sampling_slots
                tokens = self.sampler.sample_packed(result.out, packed.random, self.last_tokens, slots)
                return SampledTokens(tokens, None), []
        sampling = [step for step in plan.sequences if step.samples]
        # The masks of structured outputs are computed here, on the host, while a GPU runs the step.
        rows = [self._sampling_row(step) for step in sampling]
        stuck = [
            step.request_id
            for step, row in zip(sampling, rows, strict=True)
            if row.allowed is None and step.params.structured_outputs is not None
        ]
        sampled = self._run_sampler(result.out, rows)
        # NO_TOKEN (-1, a row with NaN logits) is no valid index for the steps launched before result() raises.
        self.last_tokens.index_copy_(0, result.sampling_slots, sampled.tokens.clamp(min=0))
        return sampled, stuck

    def _run_sampler(self, logits: Tensor, rows: list[SamplingRow]) -> SampledTokens:
        batch = SamplingBatch.build(rows, self.vocabulary, self.spec.vocab_size, self.device)
        return self.sampler.sample(logits, batch)

    def _sampling_row(self, step: SequenceStep) -> SamplingRow:
        params = step.params
        banned: tuple[int, ...] = ()
        if step.output_len < params.min_tokens:
            banned = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos))
        allowed = None
        if params.structured_outputs is not None:
            assert self.grammars is not None, "the engine refuses structured outputs without a compiler"
            allowed = self.grammars.next_tokens(step)
            if banned and allowed is not None:
                banned = unless_required(allowed, banned)
        assert params.seed is not None, "the engine sets a seed for every request"
        return SamplingRow(params, params.seed, step.start + step.num_tokens, step.history, banned, allowed)


def dummy_prompt(request_slot: int, tokens: int, block_size: int) -> SequenceStep:
    """Return a prompt for steps whose result is not used, such as warm-up. It uses the first KV blocks."""
    return SequenceStep(
        request_id=-1, request_slot=request_slot, start=0, tokens=(0,) * tokens,
        blocks=tuple(range(-(-tokens // block_size))), samples=True, output_len=0, long_rope=False,
        params=SamplingParams(), history=None,
    )  # fmt: skip
