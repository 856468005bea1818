"""The tokens of one step and their log-probabilities, on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.errors import YalisFailure
from yalis.sampling.batch import Report
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
