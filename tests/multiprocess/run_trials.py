"""The script of every rank of a launch: runs one engine after the other and writes its outputs to a file.

Each rank also hashes the hidden states after every layer, the experts chosen there and the sampled tokens, which must
be equal on several ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tests.multiprocess.splits import GREEDY, RANDOM, SCORED, STEPS, WAVE, Trial
from yalis import LLM, SamplingParams
from yalis.launch.launchers import detect_launcher
from yalis.layers.mlp import MoE
from yalis.models.decoder import Block
from yalis.sampling.sampler import Sampler


class Digests:
    """Hashes of the hidden states, chosen experts and tokens of the current engine on this rank."""

    def __init__(self) -> None:
        self.hidden, self.routing, self.tokens = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.steps = 0
        torch.nn.modules.module.register_module_forward_hook(self._hash_hidden)
        sample = Sampler.sample

        def hashing_sample(sampler: Sampler, logits: torch.Tensor, batch: Any) -> Any:
            sampled = sample(sampler, logits, batch)
            self.tokens.update(sampled.tokens.cpu().numpy().tobytes())
            self.steps += 1
            return sampled

        Sampler.sample = hashing_sample  # type: ignore[method-assign]

    def _hash_hidden(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Block) and not (output[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            # An output whose sum over the ranks is left to the next norm is in the residual of the next block.
            for part in output[1:] if module.partial else output:
                self.hidden.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())

        if isinstance(module, MoE) and module.counts is not None:
            self.routing.update(module.counts.cpu().numpy().tobytes())

    def pop(self) -> dict[str, Any]:
        """Return the hashes and start new ones."""
        hashes = {"hidden": self.hidden, "routing": self.routing, "tokens": self.tokens}
        found = {**{name: one.hexdigest() for name, one in hashes.items()}, "steps": self.steps}
        self.hidden, self.routing, self.tokens = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.steps = 0
        return found


def main(plan: Path, out: Path) -> None:
    rank, digests = detect_launcher().rank, Digests()
    answers, hashes = [], []
    for fields in json.loads(plan.read_text()):
        trial = Trial(**fields)
        with LLM(trial.model, **trial.split, **trial.fields) as llm:
            if rank == 0:
                prompts = json.loads(Path(trial.forced or Path(trial.model) / "prompts.json").read_text())
                if trial.waves:
                    answers.append(generate_long(llm, prompts, trial.waves))
                else:
                    answers.append(continue_answers(llm, prompts) if trial.forced else generate(llm, prompts))
        hashes.append(digests.pop())
    (out / f"rank{rank}.json").write_text(json.dumps({"answers": answers, "seen": hashes}))


def generate(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Generate for every prompt greedily and by sampling, in one batch. Returns all logprobs of the greedy ones."""
    outputs = llm.generate([*prompts, *prompts], [GREEDY] * len(prompts) + RANDOM[: len(prompts)])
    greedy = outputs[: len(prompts)]
    scored = llm.generate(prompts, SCORED)
    counters = getattr(llm._engine, "scheduler", None)
    return {
        "tokens": [output.token_ids for output in outputs],
        "logprobs": [[sorted(step.top.items()) for step in output.logprobs or ()] for output in greedy],
        "prompt_logprobs": [[one and one.logprob for one in output.prompt_logprobs or ()] for output in scored],
        "counters": None if counters is None else asdict(counters.counters),
        "stats": asdict(llm.stats),
        "replays": replays(llm),
        "cached": [output.metrics.cached_tokens for output in outputs],
    }


def continue_answers(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Generate two tokens after every prefix of the given answers. The second one comes from a decode step.

    Returns all logprobs of both."""
    texts = [prompt["prompt"] + prompt["answer"][:step] for prompt in prompts for step in range(STEPS)]
    outputs = llm.generate(texts, replace(GREEDY, max_tokens=2))
    return {
        "tokens": [output.token_ids for output in outputs],
        "logprobs": [[sorted(step.top.items()) for step in output.logprobs or ()] for output in outputs],
        "replays": replays(llm),
    }


def replays(llm: LLM) -> int | None:
    """Return how often this rank replayed a recorded step; None with several replicas."""
    runner = getattr(llm._engine, "runner", None)
    return runner.executor.replays if runner else None


def generate_long(llm: LLM, prompts: list[list[int]], waves: int) -> dict[str, Any]:
    """Generate long answers to the beginnings of the prompts, with another seed in each wave."""
    tokens = []
    for seed in range(waves):
        drawn = SamplingParams(max_tokens=WAVE, ignore_eos=True, temperature=0.9, seed=seed)
        outputs = llm.generate([prompt[:20] for prompt in prompts], drawn)
        tokens += [output.token_ids for output in outputs]
    return {"tokens": tokens}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
