"""The rows of a step that report log-probabilities, which are those of the logits before any adjustment.

The sum under the logarithm is taken in integers, so it is exact: the same in any batch, and but for the last bit of a
float64 under any split.

Shapes: L rows, W this rank's share of the vocabulary, P ranks, n alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.sampling.batch import Report, pick
from yalis.sampling.filters import UNITS
from yalis.sampling.sampled import Logprobs
from yalis.sampling.shards import Shards, best


class Reporting:
    def __init__(self, logits: Tensor, report: Report, shards: Shards) -> None:
        """logits [R, W], of all rows of the step."""
        self._logits = pick(logits, report.where).float()
        self._report, self._shards = report, shards

    def offers(self) -> list[Tensor]:
        """What the ranks have to tell each other first: each row's maximum, and the likeliest tokens."""
        top, count = best(self._logits)[0], max(self._report.counts)
        return [top, *self._shards.offer_tokens(self._logits, count)] if count else [top]

    def closing(self, places: Tensor, answers: list[Tensor]) -> list[Tensor]:
        """What they have to tell each other last: the logit of the token chosen here, and the mass of this share.

        places [R, 1] in the share, everyone's offers -> [L, 1], [L, 1]
        """
        chosen = self._logits.gather(1, pick(places, self._report.where))
        mass = (self._logits - _highest(answers)).exp_().mul_(UNITS).to(torch.int64)
        return [chosen, mass.sum(1, keepdim=True).double()]

    def finish(self, answers: list[Tensor], winner: Tensor | None, closing: list[Tensor]) -> Logprobs:
        """From everyone's offers, the rank whose token was chosen [R, 1] (None: this one), everyone's closing."""
        chosen, mass = closing
        if winner is not None:
            chosen = chosen.gather(1, pick(winner, self._report.where))
        norm = mass.sum(1, keepdim=True).div_(UNITS).log_().add_(_highest(answers))
        found = [chosen - norm]
        if len(answers) > 1:
            values, ids = self._shards.merge(answers[1], answers[2], max(self._report.counts))
            found += [values - norm, ids.double()]
        return Logprobs(torch.cat(found, 1), self._report)


def _highest(answers: list[Tensor]) -> Tensor:
    """Each row's maximum; a row without any finite logit stays free of NaN."""
    return answers[0].amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
