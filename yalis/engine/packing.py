"""A step's sequences as integers: all that the device has to know of a step, packed for one copy.

Shapes: T tokens of all sequences, packed · S sequences · R rows that get logits · W blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.scheduling.plan import SequenceStep

Integers = NDArray[np.int64]

#: What a decode step needs of each sequence, in this order; then come the block tables, a column after the other.
COLUMNS = ("token", "position", "rope row", "slot", "feeder", "context")
#: What a lone prompt needs of each token; then come where it ends, its context, the row that gets logits, its slot, and
#: its blocks.
PROMPT_COLUMNS = ("token", "position", "rope row", "slot")


@dataclass(frozen=True)
class PackedStep:
    """A step on the host."""

    tokens: Integers  # [T], negative where the id is the one last sampled by its feeder
    positions: Integers  # [T]
    rope_rows: Integers  # [T]
    slots: Integers  # [T]
    feeders: Integers  # [T], the row of last_tokens that belongs to the token's sequence
    starts: Integers  # [S + 1]
    contexts: Integers  # [S]
    tables: Integers  # [S, W]
    logit_rows: Integers  # [R]
    query_lens: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.query_lens)

    @property
    def decode_only(self) -> bool:
        """Every sequence brings one token and gets the next."""
        return len(self.tokens) == len(self.query_lens) == len(self.logit_rows)

    @property
    def lone_prompt(self) -> bool:
        """A sequence on its own brings several tokens, all known, and gets the next."""
        return len(self.query_lens) == 1 < len(self.tokens) and len(self.logit_rows) == 1 and self.tokens.min() >= 0

    def unpack(self, device: torch.device, last_tokens: Tensor, hidden: Tensor | None) -> tuple[ForwardBatch, Tensor]:
        """The step on the device, by one copy, and the rows of last_tokens where its choices go, [R]."""
        parts = (
            self.tokens, self.positions, self.rope_rows, self.slots, self.feeders, self.starts, self.contexts,
            self.tables.reshape(-1), self.logit_rows, self.feeders[self.logit_rows],
        )  # fmt: skip
        ends = np.cumsum([pitch(len(part)) for part in parts])
        array = np.zeros(ends[-1], dtype=np.int64)
        for part, end in zip(parts, ends, strict=True):
            array[end - pitch(len(part)) :][: len(part)] = part
        packed = to_device(array, device).tensor_split(ends[:-1].tolist())
        ids, places, rows, where, feeders, begin, context, table, wanted, owners = (
            each[: len(part)] for each, part in zip(packed, parts, strict=True)
        )
        if (self.tokens < 0).any():
            ids = torch.where(ids < 0, last_tokens.index_select(0, feeders), ids)
        batch = ForwardBatch(
            token_ids=ids,
            positions=places,
            rope_rows=rows,
            kv_slots=where,
            query_start=begin.to(torch.int32),
            context_len=context.to(torch.int32),
            block_tables=table.view(self.tables.shape).to(torch.int32),
            logit_rows=wanted,
            query_lens=self.query_lens,
            context_lens=tuple(self.contexts.tolist()),
            hidden=hidden,
        )
        return batch, owners

    def fill(self, out: Integers, rows: int, nobody: int) -> int:
        """Write a decode step into `out`, filled up to `rows` sequences; returns how much of it that takes.

        What fills it up goes nowhere: its slot is -1, its feeder `nobody`, its context the first token of block 0.
        """
        count, width = self.tables.shape
        columns, tables = split_packed(out, rows, width)
        own = (self.tokens, self.positions, self.rope_rows, self.slots, self.feeders, self.contexts)
        for column, values, idle in zip(columns, own, (0, 0, 0, -1, nobody, 1), strict=True):
            column[:count], column[count:] = values, idle
        tables[:, :count], tables[:, count:] = self.tables.T, 0
        return (len(COLUMNS) + width) * pitch(rows)

    def fill_prompt(self, out: Integers, tokens: int, width: int) -> int:
        """Write a lone prompt into `out`, filled up to so many tokens and blocks; returns how much of it that takes.

        What fills it up belongs to no sequence: it attends to nothing, and goes nowhere.
        """
        count, blocks = len(self.tokens), self.tables.shape[1]
        columns, starts, context, wanted, slot, table = split_prompt(out, tokens, width)
        own = (self.tokens, self.positions, self.rope_rows, self.slots)
        for column, values, idle in zip(columns, own, (0, 0, 0, -1), strict=True):
            column[:count], column[count:] = values, idle
        starts[:] = self.starts
        context[0], wanted[0], slot[0] = self.contexts[0], self.logit_rows[0], self.feeders[0]
        table[:blocks], table[blocks:] = self.tables[0], 0
        return prompt_room(tokens, width)


def prompt_room(tokens: int, width: int) -> int:
    return len(PROMPT_COLUMNS) * pitch(tokens) + 4 * pitch(1) + width


def split_prompt(packed: Any, tokens: int, width: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The columns, [4, tokens], begin and end, [2], the context, row and slot, [1] each, and the table of a prompt."""
    size = pitch(tokens)
    first = len(PROMPT_COLUMNS) * size
    columns, rest = packed[:first].reshape(-1, size)[:, :tokens], packed[first:]
    context, wanted, slot = (rest[i * pitch(1) :][:1] for i in (1, 2, 3))
    return columns, rest[:2], context, wanted, slot, rest[4 * pitch(1) :][:width]


def split_packed(packed: Any, rows: int, width: int) -> tuple[Any, Any]:
    """The columns, [6, rows], and the tables, [width, rows], of a decode step that was packed into this array."""
    lines = packed[: (len(COLUMNS) + width) * pitch(rows)].reshape(-1, pitch(rows))[:, :rows]
    return lines[: len(COLUMNS)], lines[len(COLUMNS) :]


def pitch(count: int) -> int:
    """The room for so many numbers: whole steps of 16 bytes, for kernels are compiled anew for other addresses."""
    return count + count % 2


class Packer:
    """Packs steps. Remembers each slot's block table, which changes only every block_size tokens."""

    def __init__(self, max_num_seqs: int, most_blocks: int, block_size: int, rope_length: int) -> None:
        self._block_size, self._rope_length = block_size, rope_length
        self._tables = np.zeros((max_num_seqs, most_blocks), dtype=np.int64)
        self._known: list[tuple[int, ...]] = [()] * max_num_seqs

    def pack(self, steps: Sequence[SequenceStep], logit_rows: Sequence[int] | None = None) -> PackedStep:
        """`logit_rows`: other rows than the last of each sequence that samples."""
        counts = [step.count for step in steps]
        slots = np.array([step.request_slot for step in steps], dtype=np.int64)
        first = np.array([step.start for step in steps], dtype=np.int64)
        tables = self._gather(steps, slots)
        starts = np.zeros(len(steps) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        tokens = np.fromiter(chain.from_iterable(step.tokens for step in steps), np.int64, total)
        owner = np.arange(total)
        if total > len(steps):
            owner = np.repeat(owner[: len(steps)], counts)
        positions = np.arange(total) + (first - starts[:-1])[owner]
        block, place = np.divmod(positions, self._block_size)
        rope_rows = positions
        if any(step.long_rope for step in steps):
            rope_rows = positions + np.array([step.long_rope for step in steps])[owner] * self._rope_length
        if logit_rows is None:
            samples = [step.samples for step in steps]
            logit_rows = (starts[1:] - 1)[samples].tolist()
        return PackedStep(
            tokens=tokens,
            positions=positions,
            rope_rows=rope_rows,
            slots=tables[owner, block] * self._block_size + place,
            feeders=slots[owner],
            starts=starts,
            contexts=first + np.diff(starts),
            tables=tables,
            logit_rows=np.array(logit_rows, dtype=np.int64),
            query_lens=tuple(counts),
        )

    def _gather(self, steps: Sequence[SequenceStep], slots: Integers) -> Integers:
        for step in steps:
            known = self._known[step.request_slot]
            if step.blocks is not known:
                row = self._tables[step.request_slot]
                row[: len(step.blocks)] = step.blocks
                row[len(step.blocks) : len(known)] = 0
                self._known[step.request_slot] = step.blocks
        return self._tables[slots, : max(len(step.blocks) for step in steps)]


def to_device(values: Integers, device: torch.device) -> Tensor:
    """From pinned memory, so that the host does not wait for the device."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
