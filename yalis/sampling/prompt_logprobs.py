"""Log-probabilities of prompt tokens, from the logits of the positions before them.

The logits of a long prompt would not fit in memory. They are computed in chunks of LOGIT_ROWS rows, and only a few
numbers per row are kept. Ranks that hold shards of the vocabulary exchange these once, after the last chunk.

Shapes: N rows, C rows of a chunk, W tokens in this rank's vocabulary shard, P ranks, n alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.sampling.batch import LogprobRows, to_device
from yalis.sampling.sampled_tokens import Logprobs, raise_for_nan
from yalis.sampling.vocab_shards import VocabShards
from yalis.types import TokenLogprobs

#: Rows whose logits are in memory at a time.
LOGIT_ROWS = 64


@dataclass(frozen=True)
class ScoredTokens:
    """Prompt tokens and their log-probabilities, on the device, or being copied to the host until `copied`."""

    token_ids: tuple[int, ...]  # [N]
    logprobs: Logprobs
    copied: torch.cuda.Event | None = None

    def start_copy(self) -> ScoredTokens:
        """Enqueue the copy to the host now, so that to_host() waits for this step and not for later ones."""
        if not self.logprobs.packed.is_cuda:
            return self
        packed = self.logprobs.packed.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return replace(self, logprobs=Logprobs(packed, self.logprobs.requested), copied=copied)

    def to_host(self) -> list[TokenLogprobs]:
        """Wait for the copy and return the log-probabilities of each token."""
        if self.copied is not None:
            self.copied.synchronize()
        raise_for_nan(bool(self.logprobs.packed[:, 0].isnan().any()))
        by_row = self.logprobs.to_host()
        return [TokenLogprobs(token, *by_row[row]) for row, token in enumerate(self.token_ids)]


class PromptScorer:
    """Computes the log-probabilities of given tokens and of the most likely ones."""

    def __init__(self, vocab_shard: range, vocab_size: int, tp_group: Communicator, device: torch.device) -> None:
        """`vocab_shard`: the token ids whose logits this rank has. Shards are in the order of ranks in `tp_group`."""
        self._shard, self._device = vocab_shard, device
        self._shards = VocabShards(vocab_shard, vocab_size, tp_group)

    def score(
        self, x: Tensor, compute_logits: Callable[[Tensor], Tensor], token_ids: Sequence[int], counts: Sequence[int]
    ) -> ScoredTokens:
        """Return the log-probability of a token after each row, and those of the `counts` most likely ones.

        `x`: [N, hidden], the input of the LM head. `compute_logits`: [C, hidden] to [C, W]. `token_ids`, `counts`: [N].
        """
        targets = to_device(torch.tensor(token_ids, dtype=torch.int64), self._device)
        chunks = zip(x.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        parts = [self._reduce(compute_logits(rows), some, max(counts)) for rows, some in chunks]
        packed = self._combine([torch.cat(columns) for columns in zip(*parts, strict=True)], max(counts))
        requested = LogprobRows(tuple(range(len(token_ids))), tuple(counts), None)
        return ScoredTokens(tuple(token_ids), Logprobs(packed, requested))

    def _reduce(self, logits: Tensor, targets: Tensor, count: int) -> list[Tensor]:
        """Return what is kept of [C, W] logits: log-sum-exp, the target's logit, and the most likely tokens."""
        logits = logits.float()
        index = (targets - self._shard.start)[:, None]
        target = logits.gather(1, index.clamp(0, len(self._shard) - 1))
        # The ranks that do not hold the target send -inf, and the maximum over ranks is its logit.
        target = target.masked_fill((index < 0) | (index >= len(self._shard)), float("-inf"))
        columns = [logits.logsumexp(1, keepdim=True).double(), target.double()]
        return [*columns, *self._shards.local_top_k_tokens(logits, count)] if count else columns

    def _combine(self, columns: list[Tensor], count: int) -> Tensor:
        """Combine the columns of all ranks: [N, 1 + 2n], as in `Logprobs`."""
        log_sum_exp, target, *best = self._shards.gather(*columns)
        log_sum_exp = log_sum_exp.logsumexp(1, keepdim=True)
        packed = [target.amax(1, keepdim=True) - log_sum_exp]
        if count:
            values, ids = self._shards.merge_top_k(best[0], best[1], count)
            packed += [values - log_sum_exp, ids.double()]
        return torch.cat(packed, 1)
