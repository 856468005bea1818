"""Log-probabilities of the sampled token and the most likely ones, from the logits before any logits processor.

The sum of exponentials is taken in integers, which is exact: it does not depend on the batch or, apart from the last
bit of a float64, on how the vocabulary is split.

Shapes: L rows, W tokens in this rank's vocabulary shard, P ranks, n alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.sampling.batch import LogprobRows, select_rows
from yalis.sampling.filters import FIXED_POINT_ONE
from yalis.sampling.sampled_tokens import Logprobs
from yalis.sampling.vocab_shards import VocabShards, row_max


class LogprobsBuilder:
    def __init__(self, logits: Tensor, requested: LogprobRows, shards: VocabShards) -> None:
        """`logits`: [R, W], of all rows of the step."""
        self._logits = select_rows(logits, requested.index).float()
        self._requested, self._shards = requested, shards

    def first_message(self) -> list[Tensor]:
        """Return what the ranks exchange first: the maximum of each row, and this shard's most likely tokens."""
        top, count = row_max(self._logits)[0], max(self._requested.counts)
        return [top, *self._shards.local_top_k_tokens(self._logits, count)] if count else [top]

    def last_message(self, indices: Tensor, gathered: list[Tensor]) -> list[Tensor]:
        """Return what the ranks exchange last: the logit of this shard's best token, and this shard's mass.

        `indices`: [R, 1], of the best token in this shard. `gathered`: the first message of all ranks. -> [L, 1] each
        """
        logit = self._logits.gather(1, select_rows(indices, self._requested.index))
        mass = (self._logits - _global_max(gathered)).exp_().mul_(FIXED_POINT_ONE).to(torch.int64)
        return [logit, mass.sum(1, keepdim=True).double()]

    def build(self, first: list[Tensor], winner: Tensor | None, last: list[Tensor]) -> Logprobs:
        """Combine both gathered messages. `winner`: [R, 1], the rank whose token was sampled; None: this one."""
        logit, mass = last
        if winner is not None:
            logit = logit.gather(1, select_rows(winner, self._requested.index))
        log_sum_exp = mass.sum(1, keepdim=True).div_(FIXED_POINT_ONE).log_().add_(_global_max(first))
        columns = [logit - log_sum_exp]
        if len(first) > 1:
            values, ids = self._shards.merge_top_k(first[1], first[2], max(self._requested.counts))
            columns += [values - log_sum_exp, ids.double()]
        return Logprobs(torch.cat(columns, 1), self._requested)


def _global_max(first: list[Tensor]) -> Tensor:
    """Return the maximum of each row; the clamp avoids NaN in a row of -inf."""
    return first[0].amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
