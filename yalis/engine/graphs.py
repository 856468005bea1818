"""Decode steps recorded once for a number of sequences, and replayed without the host's work in between.

On a CPU a step of few sequences is a tape of native calls. A step that needs more than those runs op by op, as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.kernels import ops
from yalis.kernels.tape import Tape, record

# Tapes kept: each holds its own activations.
MOST_TAPES = 16


@dataclass(frozen=True)
class Recorded:
    tape: Tape
    batch: ForwardBatch  # whose tensors the tape reads


class DecodeGraphs:
    """Runs `forward` for a batch, from a recording where it may and has one."""

    def __init__(self, forward: Callable[[ForwardBatch], Tensor], capturable: bool, most_blocks: int) -> None:
        self._forward, self._usable, self._most_blocks = forward, capturable, most_blocks
        self._recorded: OrderedDict[tuple[int, int], Recorded] = OrderedDict()  # by sequences and threads
        self._seen: set[tuple[int, int]] = set()
        self.replays = 0

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits; those of a replay are overwritten by the next step."""
        sequences = len(batch.query_lens)
        wanted = batch.logit_rows.shape[0]
        if not (self._usable and batch.decode_only and sequences == wanted <= ops.MOST_ROWS):
            return self._forward(batch)
        key = sequences, torch.get_num_threads()
        found = self._recorded.get(key)
        if found is not None:
            self._recorded.move_to_end(key)
            _fill(found.batch, batch)
            self.replays += 1
            return found.tape.replay()
        if key in self._seen:
            return self._record(key, batch)
        self._seen.add(key)  # a size met once may not come again
        return self._forward(batch)

    def _record(self, key: tuple[int, int], batch: ForwardBatch) -> Tensor:
        static = self._make_static(batch)
        logits, tape = record(lambda: self._forward(static))
        if tape is None:
            self._usable = False
            return logits
        self._recorded[key] = Recorded(tape, static)
        if len(self._recorded) > MOST_TAPES:
            self._recorded.popitem(last=False)
        return logits

    def _make_static(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy with room for the longest block tables."""
        tables = batch.block_tables.new_zeros(len(batch.query_lens), self._most_blocks)
        own: dict[str, Any] = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, Tensor)}
        static = replace(batch, **{**own, "block_tables": tables})
        _fill(static, batch)
        return static


def _fill(static: ForwardBatch, batch: ForwardBatch) -> None:
    """What changes from step to step; sequences bring a token each, and every token gets logits."""
    static.token_ids.copy_(batch.token_ids)
    static.positions.copy_(batch.positions)
    static.rope_rows.copy_(batch.rope_rows)
    static.slots.copy_(batch.slots)
    static.context_len.copy_(batch.context_len)
    static.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
    if static.hidden is not None and batch.hidden is not None:
        static.hidden.copy_(batch.hidden)
