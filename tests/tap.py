"""Sees the logits a running engine samples from, without changing what it does."""

from __future__ import annotations

import torch

from yalis import LLM


class LogitTap:
    """Logits of every sampled token, by (engine request id, number of output tokens before it)."""

    def __init__(self, llm: LLM) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        runner = llm._engine.runner
        launch, sample = runner.launch, runner.sampler.sample
        steps: list = []

        def tapped_launch(plan):
            steps[:] = [step for step in plan.sequences if step.samples]
            return launch(plan)

        def tapped_sample(logits, batch):
            for step, row in zip(steps, logits, strict=True):
                self.seen[step.request_id, step.output_len] = row.detach().float().cpu().clone()
            return sample(logits, batch)

        runner.launch, runner.sampler.sample = tapped_launch, tapped_sample

    def of(self, request_id: int) -> torch.Tensor:
        """[steps, vocabulary] of one engine request."""
        count = sum(id == request_id for id, _ in self.seen)
        return torch.stack([self.seen[request_id, step] for step in range(count)])
