"""Logits to tokens: penalties, bans, then each row's best token or a draw. Only `Sampled.to_host` waits for the device.

Shapes: R rows, S of them drawn (not greedy), V vocabulary, L rows that report log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.errors import YalisFailure
from yalis.sampling.batch import Draw, Penalties, Report, SamplingBatch
from yalis.sampling.noise import gumbel_from, token_words
from yalis.types import TokenLogprobs

#: In place of a token where the logits are not numbers.
NO_TOKEN = -1


@dataclass(frozen=True)
class Logprobs:
    """[L, 1 + 2n] float64: the chosen token's log-probability, those of the n likeliest tokens, and their ids."""

    packed: Tensor
    report: Report

    def to_host(self) -> dict[int, tuple[float, dict[int, float]]]:
        """By row: the chosen token's log-probability, and the alternatives that row asked for, likeliest first."""
        found = {}
        for row, count, (chosen, *rest) in zip(self.report.rows, self.report.counts, self.packed.tolist(), strict=True):
            values, ids = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            found[row] = chosen, {int(token): value for token, value in zip(ids[:count], values[:count], strict=True)}
        return found


@dataclass(frozen=True)
class Sampled:
    """The tokens of one step, on the device, or on their way to the host until `arrived`."""

    tokens: Tensor  # int64 [R]
    logprobs: Logprobs | None
    arrived: torch.cuda.Event | None = None

    def begin_copy(self) -> Sampled:
        """Queue the copy to the host behind this step, so that to_host() waits for this step and not for later ones."""
        if not self.tokens.is_cuda:
            return self
        tokens = self.tokens.to("cpu", non_blocking=True)
        report = self.logprobs
        if report is not None:
            report = Logprobs(report.packed.to("cpu", non_blocking=True), report.report)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Sampled(tokens, report, arrived)

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Waits for the tokens, and for the log-probabilities where they were asked for."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens: list[int] = self.tokens.tolist()
        if NO_TOKEN in tokens:
            raise YalisFailure(
                "the model computes NaN instead of numbers: its weights are damaged (fetch them again), or overflow in "
                "this dtype (give --dtype float32 or bfloat16)"
            )
        found = self.logprobs.to_host() if self.logprobs is not None else {}
        return tokens, [TokenLogprobs(token, *found[i]) if i in found else None for i, token in enumerate(tokens)]


class Sampler:
    """Chooses one token for each row of logits, which depends on that row alone, whatever else is in the batch."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._words = token_words(torch.arange(vocab_size, device=device))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits [R, V] of any float type, left as they are."""
        tokens = self._choose(_adjust(logits, batch), batch.draw)
        # A row of NaN has no best token; what is found there says so when it reaches the host.
        tokens = torch.where(logits.gather(1, tokens[:, None])[:, 0].isnan(), NO_TOKEN, tokens)
        return Sampled(tokens, _logprobs(logits, tokens, batch.report) if batch.report is not None else None)

    def _choose(self, logits: Tensor, draw: Draw | None) -> Tensor:
        if draw is None:
            return _best(logits)
        if draw.rows is None:
            return self._draw(logits.float(), draw)
        return _best(logits).index_copy_(0, draw.rows, self._draw(logits.index_select(0, draw.rows).float(), draw))

    def _draw(self, logits: Tensor, draw: Draw) -> Tensor:
        """Gumbel-max over the tokens that the filters keep: [S, V] -> [S]."""
        # From the best token down, so that no temperature overflows; a row without any finite logit stays free of NaN.
        scores = logits - logits.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        scores /= draw.temperature
        noisy = gumbel_from(draw.keys, self._words).add_(scores)
        lowest = draw.lowest(scores)
        return _best(noisy if lowest is None else noisy.masked_fill_(scores < lowest, float("-inf")))


def _adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.penalties is None and batch.banned is None:
        return logits
    logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if batch.penalties is not None:
        _penalise(logits.view(-1), batch.penalties)
    if batch.banned is not None:
        logits.view(-1).index_fill_(0, batch.banned, float("-inf"))
    return logits


def _penalise(flat: Tensor, penalties: Penalties) -> None:
    value = flat.index_select(0, penalties.places)
    value = torch.where(value > 0, value / penalties.repetition, value * penalties.repetition) - penalties.minus
    flat.index_copy_(0, penalties.places, value)


def _best(scores: Tensor) -> Tensor:
    """The highest score of each row, the lowest id among equals: [R, V] -> [R]."""
    if scores.device.type != "cpu":
        return scores.argmax(1)
    # numpy's argmax uses vector instructions and torch's does not: 6 times faster on a CPU.
    return torch.from_numpy(scores.float().numpy().argmax(1))


def _logprobs(logits: Tensor, tokens: Tensor, report: Report) -> Logprobs:
    if report.where is not None:
        logits, tokens = logits.index_select(0, report.where), tokens.index_select(0, report.where)
    logprobs = logits.float().log_softmax(1)
    top = logprobs.topk(min(max(report.counts), logprobs.shape[1]))
    packed = torch.cat(
        (logprobs.gather(1, tokens[:, None].clamp(min=0)).double(), top.values.double(), top.indices.double()), 1
    )
    return Logprobs(packed, report)
