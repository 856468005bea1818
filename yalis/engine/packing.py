"""The integers that describe a step to the device, packed into one array so that one copy transfers them.

Shapes: T tokens of all sequences, concatenated · S sequences · R rows that get logits · W blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_, itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.kernels import ops
from yalis.sampling.batch import RANDOM_COLUMNS, encode_random, stack_random
from yalis.scheduling.plan import SequenceStep
from yalis.types import SamplingParams

Integers = NDArray[np.int64]
_NO_ROWS: Integers = np.zeros(0, dtype=np.int64)
_NEVER = 2**62  # more output tokens than any request has


class StepKind(Enum):
    """The shape of a step. It selects the layout under which the step can be replayed (engine/step_layouts.py)."""

    DECODE = "decode"  # every sequence has one token and samples the next
    PROMPT = "prompt"  # one sequence has several tokens, all known on the host, and samples the next
    SCORING = "scoring"  # some prompt tokens get log-probabilities
    MIXED = "mixed"  # anything else, such as prefill next to decode or a chunk of a prompt


@dataclass(frozen=True)
class PackedStep:
    """A step in host memory."""

    kind: StepKind
    token_ids: Integers  # [T]; negative: the token last sampled for the request slot
    positions: Integers  # [T]
    rope_rows: Integers  # [T]
    kv_slots: Integers  # [T]
    request_slots: Integers  # [T], the row of last_tokens that belongs to the token's request
    query_starts: Integers  # [S + 1]
    context_lens: Integers  # [S]
    block_tables: Integers  # [S, W], padded with 0
    logit_rows: Integers  # [R], ascending
    sampling_rows: Integers  # [R'], those of the logit rows that a token is sampled from
    scored_rows: Integers  # [R - R'], the others, which score prompt tokens
    query_lens: tuple[int, ...]
    #: whether a recorded step may sample the tokens: SamplingParams.recorded_pick_from of every row is reached
    picks: bool = False
    #: [6, R'], the columns of kernels/sampling.py; None if all rows are greedy
    random: Integers | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def uses_last_tokens(self) -> bool:
        """Whether some token id is negative: it was sampled by a step whose result has not reached the host."""
        return bool(self.token_ids.min() < 0)

    def to_batch(self, device: torch.device, last_tokens: Tensor, hidden: Tensor | None) -> tuple[ForwardBatch, Tensor]:
        """Copy the step to the device in one transfer.

        Returns the batch and the request slots [R] of the tokens that it samples. `hidden` [T, hidden]: the output of
        the previous pipeline stage.
        """
        parts = (
            self.token_ids, self.positions, self.rope_rows, self.kv_slots, self.request_slots, self.query_starts,
            self.context_lens, self.block_tables.reshape(-1), self.logit_rows, self.request_slots[self.sampling_rows],
        )  # fmt: skip
        ends = np.cumsum([padded_len(len(part)) for part in parts])
        array = np.zeros(ends[-1], dtype=np.int64)
        for part, end in zip(parts, ends, strict=True):
            array[end - padded_len(len(part)) :][: len(part)] = part
        packed = to_device(array, device).tensor_split(ends[:-1].tolist())
        (
            token_ids, positions, rope_rows, kv_slots, request_slots, query_starts,
            context_lens, block_tables, logit_rows, sampling_slots,
        ) = (each[: len(part)] for each, part in zip(packed, parts, strict=True))  # fmt: skip
        if self.uses_last_tokens:
            token_ids = ops.use_last_tokens(token_ids, last_tokens, request_slots)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            rope_rows=rope_rows,
            kv_slots=kv_slots,
            query_start=query_starts.to(torch.int32),
            context_len=context_lens.to(torch.int32),
            block_tables=block_tables.view(self.block_tables.shape).to(torch.int32),
            logit_rows=logit_rows,
            query_lens=self.query_lens,
            context_lens=tuple(self.context_lens.tolist()),
            hidden=hidden,
        )
        return batch, sampling_slots

    def split_logit_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices into `logit_rows` of the sampling rows and of the scored rows."""
        sampling, scored = (np.searchsorted(self.logit_rows, rows) for rows in (self.sampling_rows, self.scored_rows))
        return to_device(sampling, device), to_device(scored, device)


def padded_len(count: int) -> int:
    """Round up to a multiple of 16 bytes: Triton compiles a separate kernel for pointers with another alignment."""
    return count + count % 2


class Packer:
    """Packs steps. Caches the block table of each request slot, which changes only every block_size tokens."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, rope_length: int) -> None:
        """`max_blocks`: blocks of the longest sequence; `rope_length`: rows of a rotary table before the second set."""
        self._block_size, self._rope_length = block_size, rope_length
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._cached: list[tuple[int, ...]] = [()] * max_num_seqs
        # The sampling parameters of each request slot, which change only with the request.
        self._params: list[SamplingParams | None] = [None] * max_num_seqs
        self._random = np.zeros((len(RANDOM_COLUMNS) - 1, max_num_seqs), dtype=np.int64)
        self._pick_from = np.zeros(max_num_seqs, dtype=np.int64)

    def pack(self, steps: Sequence[SequenceStep], logit_rows: Sequence[int] | None = None) -> PackedStep:
        """Pack the parts of all sequences in a step.

        `logit_rows`: the rows to compute logits for, instead of the last row of each sequence that samples.
        """
        # One pass of C over all fields: a loop of Python for each of them would take most of the time.
        _, by_slot, begin, by_tokens, by_blocks, by_samples, _, by_rope, by_params, _, _ = zip(*steps, strict=True)
        counts = list(map(len, by_tokens))
        slots = np.array(by_slot, dtype=np.int64)
        first = np.array(begin, dtype=np.int64)
        self._update_slots(by_slot, by_blocks, by_params)
        tables = self._tables[slots, : max(map(len, by_blocks))]
        starts = np.zeros(len(steps) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        token_ids = np.fromiter(chain.from_iterable(by_tokens), np.int64, total)
        sequence = np.arange(total)  # [T], which sequence a token belongs to
        if total > len(steps):
            sequence = np.repeat(sequence[: len(steps)], counts)
        positions = np.arange(total) + (first - starts[:-1])[sequence]
        block, offset = np.divmod(positions, self._block_size)
        rope_rows = positions
        if any(by_rope):
            rope_rows = positions + np.array(by_rope)[sequence] * self._rope_length
        if logit_rows is None:
            sampling_rows = (starts[1:] - 1)[list(by_samples)]
        else:
            sampling_rows = np.array(logit_rows, dtype=np.int64)
        # A row that samples scores nothing, so the search is left out of decode steps.
        scored_rows = _find_scored_rows(steps, starts) if len(sampling_rows) < total else _NO_ROWS
        all_rows = np.sort(np.concatenate((sampling_rows, scored_rows))) if len(scored_rows) else sampling_rows
        picks, random = self._gather_params(steps, slots[sequence[sampling_rows]], positions[sampling_rows] + 1)
        return PackedStep(
            kind=_find_kind(token_ids, len(steps), len(sampling_rows), len(scored_rows)),
            token_ids=token_ids,
            positions=positions,
            rope_rows=rope_rows,
            kv_slots=tables[sequence, block] * self._block_size + offset,
            request_slots=slots[sequence],
            query_starts=starts,
            context_lens=first + np.diff(starts),
            block_tables=tables,
            logit_rows=all_rows,
            sampling_rows=sampling_rows,
            scored_rows=scored_rows,
            query_lens=tuple(counts),
            picks=picks,
            random=random,
        )

    def _update_slots(
        self, slots: Sequence[int], blocks: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
    ) -> None:
        """Store what changed since the last step of each request slot."""
        get = itemgetter(*slots) if len(slots) > 1 else lambda values: (values[slots[0]],)
        if not all(map(is_, blocks, get(self._cached))):
            for slot, table in zip(slots, blocks, strict=True):
                cached = self._cached[slot]
                if table is not cached:
                    row = self._tables[slot]
                    row[: len(table)] = table
                    row[len(table) : len(cached)] = 0
                    self._cached[slot] = table
        if not all(map(is_, params, get(self._params))):
            for slot, one in zip(slots, params, strict=True):
                if one is not self._params[slot]:
                    self._cache_params(slot, one)

    def _cache_params(self, slot: int, params: SamplingParams) -> None:
        self._params[slot] = params
        first = params.recorded_pick_from
        self._pick_from[slot] = _NEVER if first is None else min(first, _NEVER)
        self._random[:, slot] = encode_random([params], [params.seed or 0])[:, 0]

    def _gather_params(
        self, steps: Sequence[SequenceStep], slots: Integers, positions: Integers
    ) -> tuple[bool, Integers | None]:
        """Return PackedStep.picks and PackedStep.random of rows with these request slots, which sample `positions`."""
        first = self._pick_from[slots]
        if first.any() and (
            first.max() == _NEVER
            or any(step.samples and step.output_len < self._pick_from[step.request_slot] for step in steps)
        ):
            return False, None
        encoded = self._random[:, slots]
        return True, stack_random(encoded, positions) if encoded[1].any() else None


def _find_scored_rows(steps: Sequence[SequenceStep], starts: Integers) -> Integers:
    """Return the rows whose logits score prompt tokens, the first rows of their sequences."""
    ranges = [
        np.arange(start, start + len(step.scored)) for step, start in zip(steps, starts, strict=False) if step.scored
    ]
    return np.concatenate(ranges) if ranges else _NO_ROWS


def _find_kind(token_ids: Integers, sequences: int, sampling_rows: int, scored_rows: int) -> StepKind:
    if scored_rows:
        return StepKind.SCORING
    if len(token_ids) == sequences == sampling_rows:
        return StepKind.DECODE
    if sequences == sampling_rows == 1 and token_ids.min() >= 0:
        return StepKind.PROMPT
    return StepKind.MIXED


def to_device(values: Integers, device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, so that the host does not wait for the device."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
