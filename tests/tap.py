"""Sees the logits a running engine samples from, without changing what it does."""

from __future__ import annotations

import torch

from tests.families import Reference
from yalis import LLM, SamplingParams


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


def check_near_ties(ref: Reference, llm: LLM) -> tuple[int, int]:
    """The near-tie rule for 16-bit floats, teacher-forced on the reference's fp32 tokens: (tokens, disagreements).

    The bound is twice the error that transformers' own bf16 logits have on these prompts: ours must lie within it, and
    a token may differ only where the reference's logits of the two tokens are closer than it.
    """
    bound = 2 * ref.bf16_noise()
    tap = LogitTap(llm)
    outputs = llm.generate(ref.forced(), SamplingParams(max_tokens=1, ignore_eos=True))
    disagreements = 0
    for place, (output, logits) in enumerate(zip(outputs, torch.cat(ref.logits), strict=True)):
        worst = (tap.of(place)[0] - logits).abs().max().item()
        assert worst < bound, f"{ref.case.name}: bf16 logits off by {worst:.3f}, bound {bound:.3f}"
        best, chosen = logits.argmax().item(), output.token_ids[0]
        disagreements += chosen != best
        gap = (logits[best] - logits[chosen]).item()
        assert gap < bound, f"{ref.case.name}: chose a token {gap:.3f} below the best, bound {bound:.3f}"
    return len(outputs), disagreements
