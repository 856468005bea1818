"""What the rows of one step need, laid out on the device. A part that no row needs is None and costs nothing.

A rank holds a share of the vocabulary, `part`; penalties and bans outside it are other ranks' business.

Shapes: R rows, S of them drawn (not greedy), W this rank's share of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from yalis.sampling.noise import row_keys
from yalis.types import SamplingParams

# Colder than this, scores could overflow; a draw has long been greedy by then (exact ties are still drawn evenly).
_COLDEST = 1e-10
# A larger top_k is counted instead of ranked where ranks would have to send that many candidates.
_RANKED = 1024


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
    """One entry for each token of this rank's share that a row has seen."""

    places: Tensor  # row * W + place in the share, each once
    repetition: Tensor
    minus: Tensor  # presence + frequency * count

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], part: range, device: torch.device) -> Penalties | None:
        places, repetition, minus = [], [], []
        for i, row in enumerate(rows):
            if not row.params.needs_history or row.history is None:
                continue
            prompt, output = row.history
            seen, which = np.unique(np.array((*prompt, *output), dtype=np.int64), return_inverse=True)
            count = np.bincount(which[len(prompt) :], minlength=len(seen))
            own = slice(*np.searchsorted(seen, (part.start, part.stop)))
            seen, count = seen[own] - part.start, count[own]
            places.append(i * len(part) + seen)
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
    def build(cls, chosen: list[int], top_k: list[int], top_p: list[float], device: torch.device) -> Filter | None:
        """`chosen` of the drawn rows, which either all have a top_k or all have none."""
        if not chosen:
            return None
        ks, ps = [top_k[i] for i in chosen], [top_p[i] for i in chosen]
        return cls(
            rows=_send_rows(chosen, len(top_k), device),
            top_k=_send(ks, torch.int64, device) if any(ks) else None,
            top_p=_send(ps, torch.float64, device) if min(ps) < math.inf else None,
            reach=max(ks),
        )


@dataclass(frozen=True)
class Draw:
    """The rows that are drawn."""

    rows: Tensor | None  # [S]; None: every row
    keys: Tensor  # [S], of the noise
    temperature: Tensor  # [S, 1]
    log_min_p: Tensor | None  # [S, 1]
    ranked: Filter | None  # by top_k
    counted: Filter | None  # by a large top_k
    nucleus: Filter | None  # by top_p alone

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
        by_k = [i for i, k in enumerate(top_k) if 0 < k <= _RANKED]
        by_large_k = [i for i, k in enumerate(top_k) if k > _RANKED]
        by_p = [i for i, p in enumerate(top_p) if p < 1.0 and not top_k[i]]
        return cls(
            rows=_send_rows(chosen, len(rows), device),
            keys=_move(keys, device),
            temperature=_send(temperature, torch.float32, device),
            log_min_p=_send(log_min_p, torch.float32, device) if any(p.min_p > 0 for p in params) else None,
            ranked=Filter.build(by_k, top_k, top_p, device),
            counted=Filter.build(by_large_k, top_k, top_p, device),
            nucleus=Filter.build(by_p, top_k, top_p, device),
        )


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
    banned: Tensor | None  # places: row * W + place in the share
    draw: Draw | None
    report: Report | None

    @classmethod
    def build(
        cls, rows: Sequence[SamplingRow], part: range, vocab_size: int, device: torch.device | str
    ) -> SamplingBatch:
        device = torch.device(device)
        banned = [
            i * len(part) + token - part.start for i, row in enumerate(rows) for token in row.banned if token in part
        ]
        return cls(
            penalties=Penalties.build(rows, part, device),
            banned=_send(banned, torch.int64, device) if banned else None,
            draw=Draw.build(rows, vocab_size, device),
            report=Report.build(rows, device),
        )


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """These rows of `x`; None: all of them."""
    return x if rows is None else x.index_select(0, rows)


def _send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _move(torch.tensor(values, dtype=dtype), device)


def _send_rows(rows: list[int], total: int, device: torch.device) -> Tensor | None:
    return None if len(rows) == total else _send(rows, torch.int64, device)


def _move(x: Tensor, device: torch.device) -> Tensor:
    """From pinned memory the copy does not wait for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
