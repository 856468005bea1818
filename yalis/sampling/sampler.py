"""Logits to tokens: penalties, bans, then each row's best token or a draw. Only `Sampled.to_host` waits for the device.

Each rank holds the logits of its share of the vocabulary; all of them find the same tokens. Messages of a step:
- greedy rows: one, in which each rank offers its best token;
- drawn rows: one more before it, with each rank's maximum of a row and its candidates for a top_k;
- log-probabilities: the same two;
- top_p alone: four rounds of a search between these two; a top_k above 1024: four, and with a top_p nine.
All rows of a kind share these messages, and all kinds share the first and the last.

Shapes: R rows, W this rank's share of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.sampling.batch import Penalties, SamplingBatch
from yalis.sampling.drawing import Drawing
from yalis.sampling.noise import token_words
from yalis.sampling.reporting import Reporting
from yalis.sampling.sampled import NO_TOKEN, Sampled
from yalis.sampling.shards import Shards, best


class Sampler:
    """Chooses one token for each row of logits, which depends on that row alone, whatever else is in the batch."""

    def __init__(self, part: range, vocab_size: int, everyone: Communicator, device: torch.device | str) -> None:
        """`part`: the token ids whose logits this rank holds; the ranks of `everyone` hold all, in their order."""
        self._shards = Shards(part, vocab_size, everyone)
        self._words = token_words(torch.arange(part.start, part.stop, device=device))

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits [R, W] of any float type, left as they are."""
        adjusted, shards = _adjust(logits, batch), self._shards
        drawing = Drawing(adjusted, batch.draw, shards) if batch.draw is not None else None
        reporting = Reporting(logits, batch.report, shards) if batch.report is not None else None
        for_draw = drawing.offers() if drawing is not None else []
        for_report = reporting.offers() if reporting is not None else []
        answers = shards.gather(*for_draw, *for_report)
        for_draw, for_report = answers[: len(for_draw)], answers[len(for_draw) :]

        values, places = self._choose(adjusted, drawing, for_draw)
        closing = reporting.closing(places, for_report) if reporting is not None else []
        values, tokens, winner, closing = shards.agree(values, places, *closing)
        # A row of NaN has no best token; what is found there says so when it reaches the host.
        tokens = torch.where(values.isnan(), NO_TOKEN, tokens)[:, 0]
        return Sampled(tokens, reporting.finish(for_report, winner, closing) if reporting is not None else None)

    def _choose(self, logits: Tensor, drawing: Drawing | None, answers: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The best value of each row in this share, and its place: [R, W] -> [R, 1], [R, 1]."""
        if drawing is None:
            return best(logits)
        drawn_values, drawn_places = best(drawing.noisy(self._words, answers))
        if drawing.rows is None:
            return drawn_values, drawn_places
        values, places = best(logits)
        values = values.float().index_copy_(0, drawing.rows, drawn_values)
        return values, places.index_copy_(0, drawing.rows, drawn_places)


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
