"""Records the logits that an engine samples from, and can replace the tokens that it sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tests.families import Reference
from yalis import LLM, SamplingParams


class LogitTap:
    """Records logits and token of every sampled position, by (engine request id, number of output tokens before it).

    With `forced`, the k-th request continues with the tokens of the k-th list instead of the sampled ones.
    """

    def __init__(self, llm: LLM, forced: Sequence[Sequence[int]] | None = None) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self.chosen: dict[tuple[int, int], int] = {}
        runner = llm._engine.runner
        runner.use_recorded_picks = False  # so that every row goes through the sampler
        launch, sample = runner.launch, runner.sampler.sample
        steps: list = []

        def tapped_launch(plan):
            steps[:] = [step for step in plan.sequences if step.samples]
            return launch(plan)

        def tapped_sample(logits, batch):
            sampled = sample(logits, batch)
            for step, row, token in zip(steps, logits, sampled.tokens.tolist(), strict=True):
                key = step.request_id, step.output_len
                self.seen[key], self.chosen[key] = row.detach().float().cpu().clone(), token
            if forced is None:
                return sampled
            tokens = [forced[step.request_id][step.output_len] for step in steps]
            return dataclasses.replace(sampled, tokens=torch.tensor(tokens, device=sampled.tokens.device))

        runner.launch, runner.sampler.sample = tapped_launch, tapped_sample

    def of(self, request_id: int) -> torch.Tensor:
        """Return the logits of one engine request, [steps, vocabulary]."""
        count = sum(id == request_id for id, _ in self.seen)
        return torch.stack([self.seen[request_id, step] for step in range(count)])


def check_near_ties(ref: Reference, llm: LLM) -> tuple[int, int]:
    """Check 16-bit logits with the near-tie rule, teacher-forced on the reference's fp32 tokens.

    The bound is twice the error of transformers' own bf16 logits on these prompts. Our error must be within it, and a
    token may differ only where the reference's logits of the two tokens are closer than the bound. The prompts are
    prefilled together and then decoded token by token. Returns (tokens, disagreements).
    """
    bound = 2 * ref.bf16_noise()
    tap = LogitTap(llm, forced=ref.tokens)
    steps = len(ref.tokens[0])
    outputs = llm.generate(ref.prompts, SamplingParams(max_tokens=steps, ignore_eos=True))
    assert [output.token_ids for output in outputs] == ref.tokens
    disagreements = 0
    for (place, step), ours in tap.seen.items():
        logits, chosen = ref.logits[place][step], tap.chosen[place, step]
        worst = (ours - logits).abs().max().item()
        assert worst < bound, f"{ref.case.name}: bf16 logits off by {worst:.3f}, bound {bound:.3f}"
        best = logits.argmax().item()
        disagreements += chosen != best
        gap = (logits[best] - logits[chosen]).item()
        assert gap < bound, f"{ref.case.name}: sampled a token {gap:.3f} below the best, bound {bound:.3f}"
    assert len(tap.seen) == len(ref.prompts) * steps
    return len(tap.seen), disagreements
