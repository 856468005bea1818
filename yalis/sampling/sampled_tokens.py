"""The tokens and log-probabilities that one step sampled, and their asynchronous copy to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.errors import YalisFailure
from yalis.sampling.batch import LogprobRows
from yalis.types import TokenLogprobs

#: Sampled from a row of logits that contains NaN.
NO_TOKEN = -1


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of L rows."""

    packed: Tensor  # [L, 1 + 2n] float64: of the sampled token, of the n most likely tokens, and their token ids
    requested: LogprobRows

    def to_host(self) -> dict[int, tuple[float, dict[int, float]]]:
        """Return by row: the sampled token's log-probability, and the requested alternatives, most likely first."""
        rows, counts = self.requested.rows, self.requested.counts
        by_row = {}
        for row, count, (sampled, *rest) in zip(rows, counts, self.packed.tolist(), strict=True):
            values, ids = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            by_row[row] = sampled, {int(token): value for token, value in zip(ids[:count], values[:count], strict=True)}
        return by_row


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of one step, on the device, or being copied to the host until the event `copied`."""

    tokens: Tensor  # int64 [R]
    logprobs: Logprobs | None
    copied: torch.cuda.Event | None = None

    def start_copy(self) -> SampledTokens:
        """Enqueue the copy to the host now, so that to_host() waits for this step and not for later ones."""
        if not self.tokens.is_cuda:
            return self
        tokens = self.tokens.to("cpu", non_blocking=True)
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = Logprobs(logprobs.packed.to("cpu", non_blocking=True), logprobs.requested)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return SampledTokens(tokens, logprobs, copied)

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the copy and return the token of each row, and its log-probabilities if they were requested."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        raise_for_nan(NO_TOKEN in tokens)
        by_row = self.logprobs.to_host() if self.logprobs is not None else {}
        return tokens, [TokenLogprobs(token, *by_row[i]) if i in by_row else None for i, token in enumerate(tokens)]


def raise_for_nan(found: bool) -> None:
    """Raise YalisFailure if NaN was found in the logits."""
    if found:
        raise YalisFailure(
            "the model's logits are NaN: its weights are damaged (fetch them again), or overflow in this dtype "
            "(give dtype='float32' or dtype='bfloat16')"
        )
