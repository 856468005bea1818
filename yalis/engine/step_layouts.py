"""The input buffers of CUDA graphs: one layout class for each kind of step.

A CUDA graph reads its inputs at fixed addresses and has a fixed size. A layout chooses the sizes to capture (its
buckets), places the integers of a step in the input buffer, and pads a step to the next bucket size. All graphs read
the same device buffer, because steps run one after the other in one stream.

To add a kind of step:
1. add it to StepKind, and let Packer.pack set it (engine/packing.py);
2. write a StepLayout for it here;
3. append that class to LAYOUTS.
StepExecutor then captures a graph for each of its sizes and replays the graphs. A kind without a layout runs eagerly.

This covers capture and replay on a GPU; CpuRecorder records decode steps only. Sampling, StepOutput, Scheduler.commit
and scheduling/wire.py expect one sampled token per sequence, and use_last_tokens() one logit row per token: a step with
several tokens per sequence, such as the verify step of speculative decoding, must extend those too.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.engine.packing import Integers, PackedStep, StepKind, padded_len
from yalis.sampling.batch import RANDOM_COLUMNS

# Sequences of the largest decode graph: a larger step computes for longer than its launches take.
MAX_GRAPH_SEQUENCES = 512
# Tokens of the prompts that graphs are captured for: a longer one computes for longer than its launches take.
PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
# Host buffers in rotation: one is written while the copies of the previous ones may not have started.
STAGING_BUFFERS = 4


@dataclass(frozen=True)
class StepLimits:
    """The largest step that can occur."""

    max_num_seqs: int
    max_batch_tokens: int
    max_len: int  # tokens of a sequence
    max_blocks: int  # KV blocks of a sequence

    @property
    def padding_slot(self) -> int:
        """The request slot of padding rows, which no request uses."""
        return self.max_num_seqs


class StepInputs(NamedTuple):
    """The tensors that a recorded step reads."""

    batch: ForwardBatch
    sampling_slots: Tensor  # [R], the rows of last_tokens that the sampled tokens belong to


class StepLayout(ABC):
    """The bucket sizes of one kind of step and the place of its integers in the input buffer."""

    kind: ClassVar[StepKind]
    #: whether token ids may be negative and stand for the token last sampled
    may_use_last_tokens: ClassVar[bool]

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.sizes = self.choose_sizes(limits)

    @staticmethod
    @abstractmethod
    def choose_sizes(limits: StepLimits) -> list[int]:
        """Return the bucket sizes, in tokens, ascending."""

    def find_size(self, step: PackedStep) -> int | None:
        """Return the smallest bucket size that holds the step, or None if the step is too large."""
        index = bisect_left(self.sizes, step.num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    @abstractmethod
    def buffer_len(self, size: int) -> int:
        """Return how many integers a step padded to this size takes at most."""

    @abstractmethod
    def make_inputs(self, buffer: Tensor, size: int, hidden: Tensor | None) -> StepInputs:
        """Return views into the device buffer for steps of this size, and fill them with padding.

        A step of padding alone can run at any time: it writes no keys and values.
        """

    @abstractmethod
    def fill(self, buffer: Integers, size: int, step: PackedStep) -> int:
        """Write the step into a host copy of the buffer, padded to `size`. Returns how many integers were used."""

    @abstractmethod
    def describe(self, size: int) -> str:
        """Return a name of such a step for messages."""

    @abstractmethod
    def count_work(self, size: int) -> tuple[int, int]:
        """Return (tokens, 0) or (0, sequences), whichever limit the out-of-memory advice should name."""


class DecodeLayout(StepLayout):
    """One token for each sequence. The buffer holds six columns of `size` integers, then the transposed block tables.

    The tables are last, and a table column is a row of the buffer, so a step with short tables copies only a part.
    """

    kind = StepKind.DECODE
    may_use_last_tokens = True
    #: fields of PackedStep, in the order of the buffer
    columns = ("token_ids", "positions", "rope_rows", "kv_slots", "request_slots", "context_lens")

    def __init__(self, limits: StepLimits) -> None:
        super().__init__(limits)
        # A padding row writes no key and value (slot -1) and attends to the first token of block 0.
        self.padding = (0, 0, 0, -1, limits.padding_slot, 1)

    @staticmethod
    def choose_sizes(limits: StepLimits) -> list[int]:
        """Return sizes that are closer together where they are small."""
        largest = min(limits.max_num_seqs, MAX_GRAPH_SEQUENCES)
        return [*(size for size in (1, 2, 4, *range(8, 65, 8), *range(96, largest, 32)) if size < largest), largest]

    def buffer_len(self, size: int) -> int:
        return self._used_len(size, self.limits.max_blocks)

    def make_inputs(self, buffer: Tensor, size: int, hidden: Tensor | None) -> StepInputs:
        columns, tables = self._split(buffer, size, self.limits.max_blocks)
        for column, padding in zip(columns, self.padding, strict=True):
            column.fill_(padding)
        token_ids, positions, rope_rows, kv_slots, request_slots, context_lens = columns
        device = buffer.device
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            rope_rows=rope_rows,
            kv_slots=kv_slots,
            query_start=torch.arange(size + 1, device=device, dtype=torch.int32),
            context_len=context_lens,
            block_tables=tables.zero_().t(),
            logit_rows=torch.arange(size, device=device),
            query_lens=(1,) * size,
            context_lens=(1,) * size,
            hidden=hidden,
        )
        return StepInputs(batch, request_slots)

    def fill(self, buffer: Integers, size: int, step: PackedStep) -> int:
        count, width = step.block_tables.shape
        columns, tables = self._split(buffer, size, width)
        for column, name, padding in zip(columns, self.columns, self.padding, strict=True):
            column[:count], column[count:] = getattr(step, name), padding
        tables[:, :count], tables[:, count:] = step.block_tables.T, 0
        return self._used_len(size, width)

    def describe(self, size: int) -> str:
        return f"a decode step of {size} sequences"

    def count_work(self, size: int) -> tuple[int, int]:
        return 0, size

    def _used_len(self, size: int, width: int) -> int:
        return (len(self.columns) + width) * padded_len(size)

    def _split(self, buffer: Any, size: int, width: int) -> tuple[Any, Any]:
        """Return the columns [6, size] and the transposed block tables [width, size], as views."""
        lines = buffer[: self._used_len(size, width)].reshape(-1, padded_len(size))[:, :size]
        return lines[: len(self.columns)], lines[len(self.columns) :]


class PromptLayout(StepLayout):
    """A single prompt, or the part of it that is not cached. Launching a short one takes longer than computing it.

    The buffer holds four columns of `size` integers, then query_starts, the context length, the row that gets logits,
    the request slot and the block table.
    """

    kind = StepKind.PROMPT
    may_use_last_tokens = False
    #: fields of PackedStep, in the order of the buffer
    columns = ("token_ids", "positions", "rope_rows", "kv_slots")
    # Padding tokens belong to no sequence: they attend to nothing, and write no key and value (slot -1).
    padding = (0, 0, 0, -1)

    @staticmethod
    def choose_sizes(limits: StepLimits) -> list[int]:
        """Return the sizes up to the first that holds the longest sequence and no larger than a step may be."""
        longest = next((size for size in PROMPT_SIZES if size >= limits.max_len), PROMPT_SIZES[-1])
        return [size for size in PROMPT_SIZES if size <= min(longest, limits.max_batch_tokens)]

    def buffer_len(self, size: int) -> int:
        return len(self.columns) * padded_len(size) + 4 * padded_len(1) + self.limits.max_blocks

    def make_inputs(self, buffer: Tensor, size: int, hidden: Tensor | None) -> StepInputs:
        columns, query_starts, context_len, logit_row, request_slot, table = self._split(buffer, size)
        for column, padding in zip(columns, self.padding, strict=True):
            column.fill_(padding)
        # The attention backend needs a sequence: one padding token, whose context fits any block table.
        query_starts[0], query_starts[1] = 0, 1
        for cell, value in ((context_len, 1), (logit_row, 0), (request_slot, self.limits.padding_slot)):
            cell.fill_(value)
        token_ids, positions, rope_rows, kv_slots = columns
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            rope_rows=rope_rows,
            kv_slots=kv_slots,
            query_start=query_starts,
            context_len=context_len,
            block_tables=table.zero_()[None],
            logit_rows=logit_row,
            query_lens=(size,),
            context_lens=(size,),
            hidden=hidden,
        )
        return StepInputs(batch, request_slot)

    def fill(self, buffer: Integers, size: int, step: PackedStep) -> int:
        count, width = step.num_tokens, step.block_tables.shape[1]
        columns, query_starts, context_len, logit_row, request_slot, table = self._split(buffer, size)
        for column, name, padding in zip(columns, self.columns, self.padding, strict=True):
            column[:count], column[count:] = getattr(step, name), padding
        query_starts[:] = step.query_starts
        context_len[0], logit_row[0], request_slot[0] = step.context_lens[0], step.logit_rows[0], step.request_slots[0]
        table[:width], table[width:] = step.block_tables[0], 0
        return self.buffer_len(size)

    def describe(self, size: int) -> str:
        return f"a prompt of {size} tokens"

    def count_work(self, size: int) -> tuple[int, int]:
        return size, 0

    def _split(self, buffer: Any, size: int) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Return the columns [4, size], query_starts [2], context length, logit row and request slot [1], and table."""
        row, cell = padded_len(size), padded_len(1)
        end = len(self.columns) * row
        columns, rest = buffer[:end].reshape(-1, row)[:, :size], buffer[end:]
        context_len, logit_row, request_slot = (rest[i * cell :][:1] for i in (1, 2, 3))
        return columns, rest[:2], context_len, logit_row, request_slot, rest[4 * cell :][: self.limits.max_blocks]


#: The kinds of steps that CUDA graphs are captured for.
LAYOUTS: tuple[type[StepLayout], ...] = (DecodeLayout, PromptLayout)


def fill_random(buffer: Integers, rows: int, step: PackedStep) -> int:
    """Write PackedStep.random into a host buffer, padded to `rows` with greedy rows. Returns the integers used."""
    assert step.random is not None
    used = len(RANDOM_COLUMNS) * rows
    columns = buffer[:used].reshape(-1, rows)
    count = step.random.shape[1]
    columns[:, :count], columns[:, count:] = step.random, 0
    return used


class InputBuffer:
    """The input buffer on the device, and pinned host buffers through which steps are copied to it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.packed = torch.zeros(size, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(STAGING_BUFFERS)]
        self._arrays = [buffer.numpy() for buffer in self._staging]
        self._copied = [
            torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
            for _ in range(STAGING_BUFFERS)
        ]
        self._turns = itertools.cycle(range(STAGING_BUFFERS))

    def send(self, fill: Callable[[Integers, int, PackedStep], int], size: int, step: PackedStep) -> None:
        """Write a step with StepLayout.fill, and start one copy of what it used."""
        turn = next(self._turns)
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # waits only if the host is STAGING_BUFFERS steps ahead
        used = fill(self._arrays[turn], size, step)
        self.packed[:used].copy_(self._staging[turn][:used], non_blocking=True)
        if copied is not None:
            copied.record()
