"""What the rows of one step need, laid out on the device. A part that no row needs is None and costs nothing.

Shapes: R rows, S of them drawn (not greedy), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from yalis.sampling.filters import top_k_threshold, top_p_threshold
from yalis.sampling.noise import row_keys
from yalis.types import SamplingParams

# Colder than this, scores could overflow; a draw has long been greedy by then (exact ties are still drawn evenly).
_COLDEST = 1e-10


@dataclass(frozen=True)
class SamplingRow:
    """What one row of logits needs, beside the logits, to become a token."""

    params: SamplingParams
    seed: int  # 0 to 2^63 - 1
    position: int  # of the token to be chosen; with the seed it picks the noise
    history: tuple[Sequence[int], Sequence[int]] | None = None  # (prompt, output) ids, where params.needs_history
    banned: tuple[int, ...] = ()  # ids this row may not give, such as the end tokens before min_tokens

    def __post_init__(self) -> None:
        if self.params.needs_history and self.history is None:
            raise ValueError("a row with penalties needs its history")


@dataclass(frozen=True)
class Penalties:
    """One entry for each token a row has seen."""

    places: Tensor  # row * V + token, each once
    repetition: Tensor
    minus: Tensor  # presence + frequency * count

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Penalties | None:
        places, repetition, minus = [], [], []
        for i, row in enumerate(rows):
            if not row.params.needs_history or row.history is None:
                continue
            prompt, output = (np.array(part, dtype=np.int64) for part in row.history)
            counts = np.bincount(output, minlength=vocab_size)
            seen = np.flatnonzero(counts + np.bincount(prompt, minlength=vocab_size))
            count = counts[seen]
            places.append(i * vocab_size + seen)
            repetition.append(np.full(len(seen), row.params.repetition_penalty))
            minus.append(row.params.presence_penalty * (count > 0) + row.params.frequency_penalty * count)
        if not places:
            return None
        return cls(
            places=_move(torch.from_numpy(np.concatenate(places)), device),
            repetition=_move(torch.from_numpy(np.concatenate(repetition)).float(), device),
            minus=_move(torch.from_numpy(np.concatenate(minus)).float(), device),
        )


@dataclass(frozen=True)
class Filter:
    """A filter of some of the drawn rows (None: all of them): a top_k with perhaps a top_p, or a top_p alone."""

    rows: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None  # infinite for a row without one
    reach: int  # the largest top_k

    @classmethod
    def build(cls, chosen: list[int], top_k: list[int], top_p: list[float], device: torch.device) -> Filter:
        """`chosen` of the drawn rows, which either all have a top_k or all have none."""
        ks, ps = [top_k[i] for i in chosen], [top_p[i] for i in chosen]
        return cls(
            rows=_send_rows(chosen, len(top_k), device),
            top_k=_send(ks, torch.int64, device) if any(ks) else None,
            top_p=_send(ps, torch.float64, device) if min(ps) < math.inf else None,
            reach=max(ks),
        )

    def threshold(self, scores: Tensor) -> Tensor:
        """The lowest score kept: [rows, V] -> [rows, 1]."""
        if self.top_k is not None:
            return top_k_threshold(scores, self.top_k, self.top_p, self.reach)
        assert self.top_p is not None
        return top_p_threshold(scores, self.top_p)


@dataclass(frozen=True)
class Draw:
    """The rows that are drawn."""

    rows: Tensor | None  # [S]; None: every row
    keys: Tensor  # [S], of the noise
    temperature: Tensor  # [S, 1]
    log_min_p: Tensor | None  # [S, 1]
    filters: tuple[Filter, ...]

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Draw | None:
        chosen = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not chosen:
            return None
        params = [rows[i].params for i in chosen]
        keys = row_keys(torch.tensor([rows[i].seed for i in chosen]), torch.tensor([rows[i].position for i in chosen]))
        temperature = [[max(p.temperature, _COLDEST)] for p in params]
        log_min_p = [[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params]
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        top_p = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
        by_k = [i for i, k in enumerate(top_k) if k]
        by_p = [i for i, p in enumerate(top_p) if p < 1.0 and not top_k[i]]
        return cls(
            rows=_send_rows(chosen, len(rows), device),
            keys=_move(keys, device),
            temperature=_send(temperature, torch.float32, device),
            log_min_p=_send(log_min_p, torch.float32, device) if any(p.min_p > 0 for p in params) else None,
            filters=tuple(Filter.build(some, top_k, top_p, device) for some in (by_k, by_p) if some),
        )

    def lowest(self, scores: Tensor) -> Tensor | None:
        """The lowest score each row may draw, None where all are free: [S, V] -> [S, 1]."""
        lowest = self.log_min_p
        for each in self.filters:
            if each.rows is None:
                threshold = each.threshold(scores)
            else:
                threshold = scores.new_full((len(scores), 1), -math.inf)
                threshold.index_copy_(0, each.rows, each.threshold(scores.index_select(0, each.rows)))
            lowest = threshold if lowest is None else torch.maximum(lowest, threshold)
        return lowest


@dataclass(frozen=True)
class Report:
    """The rows that report log-probabilities."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]  # alternatives that each of them asked for
    where: Tensor | None  # those rows on the device; None: every row

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> Report | None:
        asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        if not asked:
            return None
        return cls(tuple(asked), tuple(asked.values()), _send_rows(list(asked), len(rows), device))


@dataclass(frozen=True)
class SamplingBatch:
    """The rows of one step, in the order of the rows of logits."""

    penalties: Penalties | None
    banned: Tensor | None  # places: row * V + token
    draw: Draw | None
    report: Report | None

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> SamplingBatch:
        device = torch.device(device)
        banned = [i * vocab_size + token for i, row in enumerate(rows) for token in row.banned if token < vocab_size]
        return cls(
            penalties=Penalties.build(rows, vocab_size, device),
            banned=_send(banned, torch.int64, device) if banned else None,
            draw=Draw.build(rows, vocab_size, device),
            report=Report.build(rows, device),
        )


def _send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _move(torch.tensor(values, dtype=dtype), device)


def _send_rows(rows: list[int], total: int, device: torch.device) -> Tensor | None:
    return None if len(rows) == total else _send(rows, torch.int64, device)


def _move(x: Tensor, device: torch.device) -> Tensor:
    """From pinned memory the copy does not wait for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
