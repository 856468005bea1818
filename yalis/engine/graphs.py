"""Steps recorded once for a number of sequences or tokens, and replayed without the host's work in between.

On a CPU a decode step of few sequences is a tape of native calls, made when a size is met again. On a GPU it is a CUDA
graph, made before the first request for each of a few sizes; a step is filled up to the next of them. So is a short
prompt that comes alone: launching it takes the host longer than the device computes. A step that cannot be replayed
runs op by op, as ever.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.config import EngineConfig
from yalis.engine.oom import OutOfMemory, explain_oom, suggest_fit
from yalis.engine.packing import COLUMNS, PackedStep, pitch, prompt_room, split_packed, split_prompt
from yalis.kernels import ops
from yalis.kernels.pdl import enable_pdl, pdl_enabled
from yalis.kernels.replay import ReplayBuffer, record
from yalis.log import get_logger
from yalis.sampling.sampled_tokens import NO_TOKEN

log = get_logger(__name__)

# Tapes kept: each holds its own activations.
MOST_TAPES = 16
# Sequences of the largest CUDA graph: a step of more computes for longer than its launches take.
MOST_SEQUENCES = 512
# Tokens of lone prompts that graphs are made for: a longer one computes for longer than its launches take.
PROMPTS = (16, 32, 64, 128, 192, 256, 384, 512)
# What the driver keeps of one at most.
DRIVER_BYTES = 64 << 20
# Host buffers in rotation: one is written while the copies of those before may not have begun.
BUFFERS = 4

Forward = Callable[[ForwardBatch], Tensor]


@dataclass(frozen=True)
class Forwarded:
    """What a step gave, until the next one overwrites it."""

    out: Tensor  # logits [R, vocabulary share]; before the last stage hidden states [T, hidden]
    owners: Tensor  # [R], the rows of last_tokens that the choices belong to
    tokens: Tensor | None = None  # [R], each row's best token where that was recorded too; last_tokens has it then


class DecodeGraphs:
    """Runs steps, op by op; the classes below replay what they have recorded."""

    #: whether steps that need nothing more take the tokens that a recording chose
    choosing = False
    #: of the device's memory, kept by what was recorded; a tape's is the host's
    nbytes = 0

    def __init__(self, forward: Forward, last_tokens: Tensor, dependent: bool = False) -> None:
        """`dependent`: launches may begin while the one before still runs."""
        self._forward, self._last_tokens, self._dependent = forward, last_tokens, dependent
        self.replays = 0

    def run(self, step: PackedStep, hidden: Tensor | None = None) -> Forwarded:
        """`hidden`: what the pipeline stage before gave."""
        batch, owners = step.unpack(self._last_tokens.device, self._last_tokens, hidden)
        with self._launches():
            return Forwarded(self._forward(batch), owners)

    def forget(self) -> None:
        """Let go of what holds communicators; nothing of that is replayed from now on."""

    def _launches(self) -> AbstractContextManager[None]:
        return enable_pdl(self._last_tokens.device) if self._dependent else nullcontext()


@dataclass(frozen=True)
class _Taped:
    tape: ReplayBuffer
    batch: ForwardBatch  # whose tensors the tape reads

    def fill(self, step: PackedStep, last_tokens: Tensor, hidden: Tensor | None) -> None:
        """What changes from step to step; sequences bring a token each, and every token gets logits."""
        batch, tokens = self.batch, step.tokens
        if tokens.min() < 0:
            tokens = np.where(tokens < 0, last_tokens.numpy()[step.feeders], tokens)
        for tensor, values in (
            (batch.token_ids, tokens),
            (batch.positions, step.positions),
            (batch.rope_rows, step.rope_rows),
            (batch.kv_slots, step.slots),
            (batch.context_len, step.contexts),
            (batch.block_tables[:, : step.tables.shape[1]], step.tables),
        ):
            tensor.numpy()[...] = values
        if batch.hidden is not None and hidden is not None:
            batch.hidden.copy_(hidden)


class Tapes(DecodeGraphs):
    """On a CPU."""

    def __init__(self, forward: Forward, last_tokens: Tensor, most_blocks: int) -> None:
        super().__init__(forward, last_tokens)
        self._usable, self._most_blocks = True, most_blocks
        self._recorded: OrderedDict[tuple[int, int], _Taped] = OrderedDict()  # by sequences and threads
        self._seen: set[tuple[int, int]] = set()

    def run(self, step: PackedStep, hidden: Tensor | None = None) -> Forwarded:
        if not (self._usable and step.decode_only and step.sequences <= ops.NATIVE_MAX_ROWS):
            return super().run(step, hidden)
        key = step.sequences, torch.get_num_threads()
        found = self._recorded.get(key)
        if found is not None:
            self._recorded.move_to_end(key)
            found.fill(step, self._last_tokens, hidden)
            self.replays += 1
            return Forwarded(found.tape.replay(), torch.from_numpy(step.feeders))
        if key in self._seen:
            return self._record(key, step, hidden)
        self._seen.add(key)  # a size met once may not come again
        return super().run(step, hidden)

    def _record(self, key: tuple[int, int], step: PackedStep, hidden: Tensor | None) -> Forwarded:
        batch, owners = step.unpack(self._last_tokens.device, self._last_tokens, hidden)
        static = self._make_static(batch)
        logits, tape = record(lambda: self._forward(static))
        if tape is None:
            self._usable = False
            return Forwarded(logits, owners)
        self._recorded[key] = _Taped(tape, static)
        if len(self._recorded) > MOST_TAPES:
            self._recorded.popitem(last=False)
        return Forwarded(logits, owners)

    def _make_static(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy with room for the longest block tables."""
        sequences, width = batch.block_tables.shape
        tables = batch.block_tables.new_zeros(sequences, self._most_blocks)
        tables[:, :width] = batch.block_tables
        own: dict[str, Any] = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, Tensor)}
        return replace(batch, **{**own, "block_tables": tables})


def sizes_for(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that steps are filled up to, closer together where there are few."""
    most = min(max_num_seqs, MOST_SEQUENCES)
    return [*(size for size in (1, 2, 4, *range(8, 65, 8), *range(96, most, 32)) if size < most), most]


def prompts_for(longest: int, max_batch_tokens: int) -> list[int]:
    """The numbers of tokens that lone prompts are filled up to, none larger than what holds the longest."""
    most = min(next((size for size in PROMPTS if size >= longest), PROMPTS[-1]), max_batch_tokens)
    return [size for size in PROMPTS if size <= most]


class Inbox:
    """A packed step on its way to the device: written into one of a few pinned buffers, then one copy.

    The device has one buffer, which the graphs of all sizes read: they follow each other in one stream.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.packed = torch.zeros(size, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(BUFFERS)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._turns = itertools.cycle(range(BUFFERS))

    def send(self, fill: Callable[[Any], int]) -> None:
        """`fill` writes a step into an array, and says how much of it that takes."""
        turn = next(self._turns)
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # done long ago, unless the host is this many steps ahead
        used = fill(self._arrays[turn])
        self.packed[:used].copy_(self._buffers[turn][:used], non_blocking=True)
        if copied is not None:
            copied.record()


class CudaRecording:
    """What a function did on the device, as a CUDA graph."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and others may ask the device things meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = function()

    def replay(self) -> None:
        self._graph.replay()


class Size(NamedTuple):
    """Of a recorded step: a token for each sequence, or a lone prompt."""

    tokens: int
    sequences: int

    def __str__(self) -> str:
        lone = self.sequences < self.tokens
        return f"a prompt of {self.tokens} tokens" if lone else f"a decode step of {self.tokens} sequences"


@dataclass(frozen=True)
class _Recorded:
    recording: CudaRecording
    batch: ForwardBatch  # whose tensors the graph reads
    out: Tensor
    owners: Tensor
    tokens: Tensor | None


class CudaGraphs(DecodeGraphs):
    """On a GPU: one graph for each size, all in one memory pool, since they never run at the same time."""

    recording = CudaRecording

    def __init__(
        self,
        config: EngineConfig,
        forward: Forward,
        last_tokens: Tensor,
        longest: int,
        most_blocks: int,
        chooses: bool,
        make_hidden: Callable[[int], Tensor | None],
        dependent: bool,
    ) -> None:
        """The last row of last_tokens is nobody's. `chooses`: logits are whole rows, whose best token is recorded too;
        `make_hidden`: room for what the stage before gives."""
        super().__init__(forward, last_tokens, dependent)
        self._config = config
        self._chooses, self._make_hidden = chooses, make_hidden
        self._nobody = last_tokens.shape[0] - 1
        self._most_blocks = most_blocks
        self.sizes = sizes_for(self._nobody)
        self.prompts = prompts_for(longest, config.max_batch_tokens)
        rooms = [prompt_room(size, most_blocks) for size in self.prompts]
        room = max((len(COLUMNS) + most_blocks) * pitch(self.sizes[-1]), *rooms, 0)
        self._inbox = Inbox(room, last_tokens.device)
        self._recorded: dict[Size, _Recorded] = {}
        self._pool: Any = None
        self.choosing = True

    def run(self, step: PackedStep, hidden: Tensor | None = None) -> Forwarded:
        size = self._size_for(step) if self._recorded else None
        if size is None:
            return super().run(step, hidden)
        found, count = self._recorded[size], len(step.tokens)
        if step.decode_only:
            self._inbox.send(lambda out: step.fill(out, size.sequences, self._nobody))
        else:
            self._inbox.send(lambda out: step.fill_prompt(out, size.tokens, self._most_blocks))
        if found.batch.hidden is not None and hidden is not None:
            with torch.inference_mode():  # where it was made
                found.batch.hidden[:count].copy_(hidden)
        found.recording.replay()
        self.replays += 1
        tokens = found.tokens[:count] if found.tokens is not None and self.choosing else None
        return Forwarded(found.out[:count], found.owners[:count], tokens)

    def _size_for(self, step: PackedStep) -> Size | None:
        """The smallest that holds the step."""
        count = len(step.tokens)
        if step.decode_only:
            return next((Size(size, size) for size in self.sizes if size >= count), None)
        if not step.lone_prompt:
            return None
        return next((Size(size, 1) for size in self.prompts if size >= count), None)

    def forget(self) -> None:
        self._recorded.clear()
        self._pool = None

    def _kinds(self) -> list[list[Size]]:
        """What to record, the largest first, and of each kind too."""
        kinds = [Size(size, size) for size in reversed(self.sizes)], [Size(size, 1) for size in reversed(self.prompts)]
        return sorted(filter(None, kinds), reverse=True)

    def record(self, block_bytes: int = 0) -> None:
        """Make all graphs, the largest first, so that the others find room in what it leaves.

        `block_bytes`: of the KV cache, where that has taken its memory.
        """
        device = self._last_tokens.device
        torch.cuda.empty_cache()  # which recording does too: what was left there is no graph's
        before = _Memory.of(device)
        for size in itertools.chain(*self._kinds()):
            self._record(size, block_bytes)
        self.nbytes = before.taken(device, len(self._recorded))
        sizes, prompts = (", ".join(map(str, numbers)) for numbers in (self.sizes, self.prompts))
        log.info("recorded decode steps of %s sequences and prompts of %s tokens in %.0f MiB",
                 sizes, prompts or "no", self.nbytes / 2**20)  # fmt: skip

    def rehearse(self) -> int:
        """Bytes that all graphs will take, found by making the two largest of each kind, which are dropped again."""
        device, total = self._last_tokens.device, 0
        torch.cuda.empty_cache()
        for sizes in self._kinds():
            found = []
            for size in sizes[:2]:
                before = _Memory.of(device)
                self._record(size)
                found.append(before.taken(device, 1))
            total += sum(found[:1]) + sum(found[1:]) * (len(sizes) - 1)
        self.forget()
        torch.cuda.empty_cache()
        return total

    def _record(self, size: Size, block_bytes: int = 0) -> None:
        from yalis.kernels import token_feedback

        batch, owners = self._idle_prompt(size.tokens) if size.sequences < size.tokens else self._idle_step(size.tokens)
        device = owners.device

        def step() -> tuple[Tensor, Tensor | None]:
            with self._launches():
                ids = batch.token_ids
                if size.sequences == size.tokens:
                    ids = token_feedback.use_last_tokens(ids, self._last_tokens, owners, pdl_enabled())
                out = self._forward(replace(batch, token_ids=ids))
                if not self._chooses:
                    return out, None
                return out, token_feedback.pick_greedy(out, self._last_tokens, owners, NO_TOKEN, pdl_enabled())

        def say(lack: OutOfMemory) -> str:
            counts = (size.tokens, 0) if size.sequences < size.tokens else (0, size.sequences)
            ways = ", or ".join([*suggest_fit(lack, self._config, device, *counts, block_bytes), "--eager"])
            return f"{device} ran out of memory recording {size}: {lack}; give {ways}"

        with explain_oom(device, say):
            if self._pool is None and device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            step()  # whatever is compiled, loaded or reserved by the first run
            recording = self.recording(step, self._pool)
        self._recorded[size] = _Recorded(recording, batch, recording.result[0], owners, recording.result[1])

    # Idle throughout: the runs that are recorded, and those before, must not touch the cache.

    def _idle_prompt(self, tokens: int) -> tuple[ForwardBatch, Tensor]:
        """A lone prompt as the inbox has it, and the row of last_tokens that it belongs to."""
        columns, starts, context, row, owner, table = split_prompt(self._inbox.packed, tokens, self._most_blocks)
        ids, positions, rope_rows, slots = columns
        # One token, whose context any block table has room for; the others fill it up.
        for column, idle in ((ids, 0), (slots, -1), (context, 1), (row, 0), (owner, self._nobody)):
            column.fill_(idle)
        starts[0], starts[1] = 0, 1
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions.zero_(),
            rope_rows=rope_rows.zero_(),
            kv_slots=slots,
            query_start=starts,
            context_len=context,
            block_tables=table.zero_()[None],
            logit_rows=row,
            query_lens=(tokens,),
            context_lens=(tokens,),
            hidden=self._make_hidden(tokens),
        )
        return batch, owner

    def _idle_step(self, rows: int) -> tuple[ForwardBatch, Tensor]:
        """A decode step as the inbox has it, and the rows of last_tokens that its sequences have."""
        columns, tables = split_packed(self._inbox.packed, rows, self._most_blocks)
        ids, positions, rope_rows, slots, owners, contexts = columns
        for column, idle in zip((ids, slots, owners, contexts), (0, -1, self._nobody, 1), strict=True):
            column.fill_(idle)
        device = ids.device
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions.zero_(),
            rope_rows=rope_rows.zero_(),
            kv_slots=slots,
            query_start=torch.arange(rows + 1, device=device, dtype=torch.int32),
            context_len=contexts,
            block_tables=tables.zero_().t(),
            logit_rows=torch.arange(rows, device=device),
            query_lens=(1,) * rows,
            context_lens=(1,) * rows,
            hidden=self._make_hidden(rows),
        )
        return batch, owners


@dataclass(frozen=True)
class _Memory:
    """A device's, at a moment."""

    free: int
    held: int  # by this process's allocator

    @classmethod
    def of(cls, device: torch.device) -> _Memory:
        if device.type != "cuda":
            return cls(0, 0)
        torch.cuda.synchronize(device)
        return cls(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))

    def taken(self, device: torch.device, graphs: int) -> int:
        """Bytes that so many graphs took since.

        Other processes on this GPU take memory meanwhile: no more than this one's own, and the driver's part.
        """
        now = _Memory.of(device)
        return max(0, min(self.free - now.free, now.held - self.held + graphs * DRIVER_BYTES))
