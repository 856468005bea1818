"""Run by every rank of a launch: one engine after the other, all answers into a file by rank 0.

Each rank folds what must be the same on several ranks into digests: hidden states after every layer, and tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.multiprocess.splits import DRAWN, GREEDY, STEPS, WAVE, Trial
from yalis import LLM, SamplingParams
from yalis.launch.launchers import detect_launcher
from yalis.models.decoder import Block
from yalis.sampling.sampler import Sampler


class Digests:
    """What this rank has seen of each engine, as hashes."""

    def __init__(self) -> None:
        self.hidden, self.tokens = hashlib.sha256(), hashlib.sha256()
        self.steps = 0
        torch.nn.modules.module.register_module_forward_hook(self._see)
        sample = Sampler.sample

        def watched(sampler: Sampler, logits: torch.Tensor, batch: Any) -> Any:
            sampled = sample(sampler, logits, batch)
            self.tokens.update(sampled.tokens.cpu().numpy().tobytes())
            self.steps += 1
            return sampled

        Sampler.sample = watched  # type: ignore[method-assign]

    def _see(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Block) and not (output[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            for part in output:
                self.hidden.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())

    def take(self) -> dict[str, Any]:
        found = {"hidden": self.hidden.hexdigest(), "tokens": self.tokens.hexdigest(), "steps": self.steps}
        self.hidden, self.tokens, self.steps = hashlib.sha256(), hashlib.sha256(), 0
        return found


def main(plan: Path, out: Path) -> None:
    rank, digests = detect_launcher().rank, Digests()
    answers, seen = [], []
    for fields in json.loads(plan.read_text()):
        trial = Trial(**fields)
        with LLM(trial.model, **trial.split, **trial.fields) as llm:
            if rank == 0:
                prompts = json.loads(Path(trial.forced or Path(trial.model) / "prompts.json").read_text())
                if trial.waves:
                    answers.append(go_on(llm, prompts, trial.waves))
                else:
                    answers.append(force(llm, prompts) if trial.forced else answer(llm, prompts))
        seen.append(digests.take())
    (out / f"rank{rank}.json").write_text(json.dumps({"answers": answers, "seen": seen}))


def answer(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Every prompt greedily and drawn, in one batch; the log-probabilities of the greedy ones in full."""
    outputs = llm.generate([*prompts, *prompts], [GREEDY] * len(prompts) + DRAWN[: len(prompts)])
    greedy = outputs[: len(prompts)]
    counters = getattr(llm._engine, "scheduler", None)
    return {
        "tokens": [output.token_ids for output in outputs],
        "logprobs": [[sorted(step.top.items()) for step in output.logprobs or ()] for output in greedy],
        "counters": None if counters is None else asdict(counters.counters),
        "stats": asdict(llm.stats),
        "replays": replays(llm),
        "cached": [output.metrics.cached_tokens for output in outputs],
    }


def force(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """The next two tokens of every prompt that is given with its answer so far: the second is a decode step's.

    With all log-probabilities of both.
    """
    texts = [prompt["prompt"] + prompt["answer"][:step] for prompt in prompts for step in range(STEPS)]
    outputs = llm.generate(texts, replace(GREEDY, max_tokens=2))
    return {
        "tokens": [output.token_ids for output in outputs],
        "logprobs": [[sorted(step.top.items()) for step in output.logprobs or ()] for output in outputs],
        "replays": replays(llm),
    }


def replays(llm: LLM) -> int | None:
    """How often this rank replayed a recorded step; unknown where replicas have an engine each."""
    runner = getattr(llm._engine, "runner", None)
    return runner.executor.replays if runner else None


def go_on(llm: LLM, prompts: list[list[int]], waves: int) -> dict[str, Any]:
    """Long answers to the beginnings of the prompts, drawn anew in each wave."""
    tokens = []
    for seed in range(waves):
        drawn = SamplingParams(max_tokens=WAVE, ignore_eos=True, temperature=0.9, seed=seed)
        outputs = llm.generate([prompt[:20] for prompt in prompts], drawn)
        tokens += [output.token_ids for output in outputs]
    return {"tokens": tokens}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
