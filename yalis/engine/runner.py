"""One forward step on one rank: a StepPlan becomes a ForwardBatch, logits, and sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from yalis.attention.base import AttentionNeeds, ForwardBatch, LayerCache
from yalis.attention.choose import choose_backend
from yalis.cache.pool import KVPool
from yalis.checkpoint.base import Checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import count_blocks, is_out_of_memory, longest_context, resolve_dtype
from yalis.engine.graphs import DecodeGraphs
from yalis.errors import YalisFailure
from yalis.layers.attention import uneven_edges
from yalis.log import get_logger
from yalis.models.decoder import Decoder
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.sampled import Sampled
from yalis.sampling.sampler import Sampler
from yalis.scheduling.plan import SequenceStep, StepOutput, StepPlan
from yalis.spec import ModelSpec
from yalis.types import SamplingParams

log = get_logger(__name__)


class PendingStep:
    """A step that was launched; `result()` waits for its tokens."""

    def __init__(self, plan: StepPlan, sampled: Sampled | None, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises if what a device computed is not to be believed."""
        self._plan, self._check = plan, check
        self._sampled = sampled.begin_copy() if sampled is not None else None

    def result(self) -> StepOutput:
        if self._sampled is None:
            return StepOutput(self._plan.number, {})
        tokens, logprobs = self._sampled.to_host()
        self._check()
        ids = [step.request_id for step in self._plan.sequences if step.samples]
        return StepOutput(
            self._plan.number,
            dict(zip(ids, tokens, strict=True)),
            {id: found for id, found in zip(ids, logprobs, strict=True) if found is not None},
        )


@dataclass
class StageTimes:
    """Where a rank's host time went, counted since it was loaded; on a CPU the host computes."""

    busy: float = 0.0  # computing
    waiting: float = 0.0  # for the stage before


class Runner:
    """Holds one rank's part of the model, its KV cache and the sampler."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        eos: frozenset[int],
        device: torch.device,
        grid: Grid | None = None,
        stage: Stage | None = None,
        settle: Callable[[int], int] = lambda blocks: blocks,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle`: from the KV blocks that fit here to those that fit on every rank; `check`: raises if what the
        device computed since is not to be believed."""
        self.check = check
        self.spec, self.eos, self.block_size = spec, eos, config.block_size
        self.device, self.grid, self.stage = device, grid or Grid(), stage or Stage()
        self.dtype = resolve_dtype(config.dtype, spec.dtype, device)
        self.times = StageTimes()
        grid = self.grid
        heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
        edges = uneven_edges(heads, kv_heads, spec.num_heads // spec.num_kv_heads)
        needs = AttentionNeeds(
            len(heads) + sum(edges), len(kv_heads), spec.head_dim, self.dtype, device, config.block_size,
            window=any(spec.windows), softcap=spec.attention_softcap is not None,
        )  # fmt: skip
        self.backend = choose_backend(config.attention, needs)(needs)
        wanted_len = longest_context(config, spec, checkpoint.label)
        try:
            self.model = Decoder(spec, grid, self.stage, wanted_len, self.dtype, device)
            self.model.load(checkpoint)
            self.vocabulary = grid.vocabulary(spec.vocab_size)
            self.sampler = Sampler(self.vocabulary, spec.vocab_size, grid.everyone, device)
            self.last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
            self.pool = self._make_pool(config, needs, wanted_len, settle)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise YalisFailure(
                f"{checkpoint.label} in {self.dtype} with these settings does not fit the memory of {self.device}; "
                "give a smaller --kv-blocks, --kv-memory or --max-num-seqs, --dtype bfloat16, or a smaller model"
            ) from error
        self.caches = [LayerCache(*self.pool.layer(index)) for index in range(len(self.model.layers))]
        self.graphs = DecodeGraphs(
            lambda batch: self.model(batch, self.caches, self.backend),
            self.backend.capturable and grid.capturable,
            -(-wanted_len // config.block_size),
        )
        capacity = self.pool.num_blocks * config.block_size
        # A length the user did not ask for shrinks to what the cache holds; one that was asked for is refused later.
        self.max_model_len = wanted_len if config.max_model_len else min(wanted_len, capacity)
        log.info("%s %s attention=%s kv_blocks=%d", self.device, self.dtype, self.backend.name, self.pool.num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def weight_bytes(self) -> int:
        """What this rank holds of the model."""
        return sum(x.nbytes for x in self.model.parameters())

    def _make_pool(
        self, config: EngineConfig, needs: AttentionNeeds, max_len: int, settle: Callable[[int], int]
    ) -> KVPool:
        shape = (len(self.model.layers), config.block_size, needs.num_kv_heads, needs.head_dim)
        per_sequence = -(-max_len // config.block_size)
        if self.device.type == "cuda" and config.kv_blocks is None and config.kv_memory is None:
            self._rehearse(config, needs, min(max_len, config.max_batch_tokens))
        block_bytes = KVPool.block_bytes(*shape, self.dtype)
        blocks = settle(count_blocks(config, self.device, block_bytes, per_sequence * config.max_num_seqs))
        layers, block_size, kv_heads, head_dim = shape
        return KVPool(layers, blocks, block_size, kv_heads, head_dim, self.dtype, self.device)

    def _rehearse(self, config: EngineConfig, needs: AttentionNeeds, tokens: int) -> None:
        """Run the largest step once, so that the allocator holds its activations before the rest becomes KV blocks."""
        blocks = -(-tokens // config.block_size)
        pool = KVPool(1, blocks, config.block_size, needs.num_kv_heads, needs.head_dim, self.dtype, self.device)
        step = SequenceStep(
            request_id=-1, slot=0, start=0, tokens=(0,) * tokens, blocks=tuple(range(blocks)), samples=False,
            output_len=0, long_rope=False, params=SamplingParams(), history=None,
        )  # fmt: skip
        rows = min(tokens, config.max_num_seqs)
        batch = self.build([step], logit_rows=range(tokens - rows, tokens))
        if not self.stage.first:
            batch = replace(batch, hidden=torch.zeros(tokens, self.model.hidden, dtype=self.dtype, device=self.device))
        logits = self.model(batch, [LayerCache(*pool.layer(0))] * len(self.model.layers), self.backend)
        if not self.stage.last:
            return
        hungriest = SamplingParams(temperature=1.0, top_p=0.9, logprobs=0)
        sampling = [SamplingRow(hungriest, seed=0, position=0)] * rows
        self._choose(logits, sampling)

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """Start the step; on a GPU this returns before the tokens are known. None where another stage samples them."""
        begin = time.perf_counter()
        batch = self.build(plan.sequences)
        ready = time.perf_counter()
        hidden = self.stage.receive((plan.num_tokens, self.model.hidden), self.dtype, self.device)
        arrived = time.perf_counter()
        if hidden is not None:
            batch = replace(batch, hidden=hidden)
        out = self.graphs.run(batch)
        pending = None
        if self.stage.last:
            pending = self._sample(plan, out)
        else:
            self.stage.pass_on(out.clone())  # a replay's result is overwritten by the next
        self.times.busy += time.perf_counter() - begin - (arrived - ready)
        self.times.waiting += arrived - ready
        return pending

    def _sample(self, plan: StepPlan, logits: Tensor) -> PendingStep:
        sampling = [step for step in plan.sequences if step.samples]
        if not sampling:
            return PendingStep(plan, None, self.check)
        sampled = self._choose(logits, [self._sampling_row(step) for step in sampling])
        slots = self._to_device(np.array([step.slot for step in sampling], dtype=np.int64))
        self.last_tokens.index_copy_(0, slots, sampled.tokens.clamp(min=0))
        return PendingStep(plan, sampled, self.check)

    def _choose(self, logits: Tensor, rows: list[SamplingRow]) -> Sampled:
        batch = SamplingBatch.build(rows, self.vocabulary, self.spec.vocab_size, self.device)
        return self.sampler.sample(logits, batch)

    def _sampling_row(self, step: SequenceStep) -> SamplingRow:
        params = step.params
        banned: tuple[int, ...] = ()
        if step.output_len < params.min_tokens:
            banned = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos))
        assert params.seed is not None, "the engine's caller draws a seed"
        return SamplingRow(params, params.seed, step.start + step.count, history=step.history, banned=banned)

    def build(self, steps: Sequence[SequenceStep], logit_rows: Sequence[int] | None = None) -> ForwardBatch:
        """Pack the sequences' tokens into one batch: a few host arrays, one copy to the device."""
        counts = [step.count for step in steps]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        total = int(starts[-1])
        tokens = np.fromiter((token for step in steps for token in step.tokens), np.int64, total)
        owner = np.repeat(np.arange(len(steps)), counts)
        first = np.array([step.start for step in steps], dtype=np.int64)
        positions = np.arange(total) - starts[owner] + first[owner]
        tables = np.zeros((len(steps), max(len(step.blocks) for step in steps)), dtype=np.int64)
        for row, step in enumerate(steps):
            tables[row, : len(step.blocks)] = step.blocks
        slots = tables[owner, positions // self.block_size] * self.block_size + positions % self.block_size
        rope_rows = positions + np.array([step.long_rope for step in steps])[owner] * self.model.rotary.length
        feeders = np.array([step.slot for step in steps], dtype=np.int64)[owner]
        if logit_rows is None:
            logit_rows = [int(starts[row + 1]) - 1 for row, step in enumerate(steps) if step.samples]
        contexts = tuple(step.start + step.count for step in steps)
        parts = (
            tokens, positions, rope_rows, slots, feeders, starts, np.array(contexts), tables.reshape(-1), logit_rows
        )  # fmt: skip
        sizes = [len(part) for part in parts]
        packed = self._to_device(np.concatenate(parts)).split(sizes)
        ids, places, rows, where, slot_of, begin, context, table, wanted = packed
        if (tokens < 0).any():
            ids = torch.where(ids < 0, self.last_tokens.index_select(0, slot_of), ids)
        return ForwardBatch(
            token_ids=ids,
            positions=places,
            rope_rows=rows,
            slots=where,
            query_start=begin.to(torch.int32),
            context_len=context.to(torch.int32),
            block_tables=table.view(tables.shape).to(torch.int32),
            logit_rows=wanted,
            query_lens=tuple(counts),
            context_lens=contexts,
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.asarray(values, dtype=np.int64))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)
