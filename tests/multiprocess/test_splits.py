"""Every split of a model generates the tokens of a single rank, which equal transformers'."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import CASES, Reference, make_prompts, make_reference
from tests.multiprocess.run_trials import generate, generate_long
from tests.multiprocess.splits import (
    EXPERT_TRIALS,
    LENGTHS,
    MEMORY_PRESSURE,
    RANDOM,
    SLICES,
    SPLITS,
    STEPS,
    WHOLE,
    WIDE,
    Trial,
)
from tests.tokenizer_files import characters
from yalis import LLM
from yalis.config import EngineConfig
from yalis.engine.expert_choice import split_of

ROOT = Path(__file__).parents[2]
SMALL = replace(CASES[0], name="small")


class Models:
    """The wide checkpoints with transformers' greedy outputs and a single rank's random ones, each computed once."""

    def __init__(self, folder: Path, fields: dict[str, Any] = MEMORY_PRESSURE) -> None:
        self.folder, self.fields = folder, fields
        self._made: dict[str, tuple[Reference, dict[str, Any]]] = {}

    def find(self, name: str) -> tuple[Reference, dict[str, Any]]:
        if name not in self._made:
            case = next(case for case in [*WIDE, SMALL] if case.name == name)
            reference = make_reference(case, self.folder, 3, make_prompts(3, LENGTHS, shared=16), STEPS)
            (reference.path / "prompts.json").write_text(json.dumps(reference.prompts))
            tokenizer = characters()
            tokenizer.save_pretrained(reference.path)
            with LLM(str(reference.path), **self.fields) as llm:
                alone = generate(llm, reference.prompts)
            random = [tokenizer.decode(tokens) for tokens in alone["tokens"][len(reference.prompts) :]]
            structured = [i for i, params in enumerate(RANDOM) if params.structured_outputs is not None]
            patterns = [r"\[[-\d, \n\t]{11}", r"([a-z]{2,5} )*[a-z]{0,5}"]
            for index, pattern in zip(structured, patterns, strict=True):
                assert re.fullmatch(pattern, random[index]), random[index]
            self._made[name] = reference, alone
        return self._made[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("wide"))


def launch(ranks: int, trials: list[Trial], out: Path, variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run all trials in one launch; returns what each rank wrote."""
    plan = out / "plan.json"
    plan.write_text(json.dumps([asdict(trial) for trial in trials]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(__file__).with_name("run_trials.py")), str(plan), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    said = [line for line in done.stderr.splitlines() if line.startswith("yalis:")]
    assert done.returncode == 0, "\n".join([*said, done.stderr[-3000:]])
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def check(trial: Trial, given: dict[str, Any], reference: Reference, alone: dict[str, Any]) -> None:
    count = len(reference.prompts)
    assert given["tokens"][:count] == reference.tokens, f"{trial.name}: greedy tokens differ from transformers"
    assert given["tokens"][count:] == alone["tokens"][count:], f"{trial.name}: random samples differ from a single rank"
    for logits, steps in zip(reference.logits, given["logprobs"], strict=True):
        found = torch.tensor([[value for _, value in step] for step in steps])
        worst = (found - logits.log_softmax(1)).abs().max().item()
        assert worst < 1e-4, f"{trial.name}: log-probabilities off by {worst:.2e}"
    for prompt, logprobs, scored in zip(
        reference.prompts, reference.prompt_logprobs(), given["prompt_logprobs"], strict=True
    ):
        assert scored[0] is None, trial.name
        expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0].tolist()
        assert scored[1:] == pytest.approx(expected, abs=1e-4), f"{trial.name}: log-probabilities of a prompt differ"
    load = given["stats"]["expert_load"]  # of the ranks of the first pipeline stages
    split = split_of(EngineConfig(**trial.split))
    assert len(load) == (split.per_stage * split.replicas if split.expert_parallel else 0), trial.name
    assert all(load), trial.name
    if trial.case == "phi3-longrope" and given["counters"] is not None:
        assert given["counters"]["rope_switches"] > 0, trial.name


def check_pressure(split: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """Check that chunking, preemption and prefix hits all occurred. Replicas report only preemptions."""
    counted = [given["counters"] for given in answers if given["counters"] is not None]
    names = ("chunked_prefills", "preemptions", "prefix_hit_tokens") if counted else ()
    for name in names:
        assert sum(counters[name] for counters in counted) > 0, f"no {name} under {split}"
    assert sum(given["stats"]["preemptions"] for given in answers) > 0, split


def check_ranks(trial: Trial, seen: list[dict[str, Any]]) -> None:
    """All ranks of a tensor-parallel group choose the same experts and tokens; those of one column have equal hidden
    states."""
    split = split_of(EngineConfig(**trial.split))
    for first in range(0, len(seen), split.per_stage):
        group = seen[first : first + split.per_stage]
        assert len({(found["tokens"], found["routing"]) for found in group}) == 1, trial.name
        for column in range(split.cols):
            assert len({found["hidden"] for found in group[column :: split.cols]}) == 1, trial.name


def run(models: Models, ranks: int, chosen: list[tuple[str, dict[str, Any]]], out: Path) -> None:
    # Each replica serves half of the requests, and needs half the blocks for the same pressure.
    fields = [{**MEMORY_PRESSURE, **({"kv_blocks": 15} if "dp" in split else {})} for _, split in chosen]
    trials = [
        Trial(name, str(models.find(name)[0].path), split, settings)
        for (name, split), settings in zip(chosen, fields, strict=True)
    ]
    results = launch(ranks, trials, out)
    for index, trial in enumerate(trials):
        check(trial, results[0]["answers"][index], *models.find(trial.case))
        check_ranks(trial, [rank["seen"][index] for rank in results])
    for position, trial in enumerate(trials):
        if trial.split not in [other.split for other in trials[:position]]:
            alike = [index for index, other in enumerate(trials) if other.split == trial.split]
            check_pressure(trial.split, [results[0]["answers"][index] for index in alike])


def cover(ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """Return every split with one to three dense models, and some with experts.

    Over all numbers of ranks, every dense model has at least two splits. Gemma 2 is added for its norms of attention
    and MLP outputs on a split hidden size.
    """
    stride = 10 if ranks == 8 else 6
    more = [("gemma2", {"tp": "2x2"})] if ranks == 4 else []
    dense = [case for case in WIDE if "num_experts_per_tok" not in case.options]
    more += EXPERT_TRIALS.get(ranks, [])
    return more + [
        (case.name, split)
        for offset, split in enumerate(SPLITS[ranks])
        for number, case in enumerate(dense)
        if (number + offset + 4 * ranks) % stride == 0
    ]


@pytest.mark.parametrize("ranks", SPLITS)
def test_splits_generate_the_tokens_of_one_rank(models, ranks, tmp_path):
    run(models, ranks, cover(ranks), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("ranks", SPLITS)
def test_every_split_of_every_model(models, ranks, part, tmp_path):
    chosen = []
    for case in WIDE[part::3]:
        experts = [SLICES, WHOLE] if "num_experts_per_tok" in case.options else [{}]
        for split in SPLITS[ranks]:
            over_rows = str(split.get("tp", 1)).split("x")[0] != "1"
            chosen += [(case.name, {**split, **each}) for each in (experts if over_rows else [{}])]
    run(models, ranks, chosen, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "split"),
    [(2, {"tp": 2}), *(pytest.param(4, {"tp": grid}, marks=pytest.mark.full) for grid in (4, "2x2", "1x4"))],
    ids=str,
)
def test_ranks_agree_bit_for_bit_over_2000_steps(models, ranks, split, tmp_path):
    reference, _ = models.find(SMALL.name)
    trial = Trial(SMALL.name, str(reference.path), split, {"device": "cpu", "dtype": "float32"}, waves=10)
    results = launch(ranks, [trial], tmp_path)
    seen = [rank["seen"][0] for rank in results]
    assert min(found["steps"] for found in seen) >= 2000
    check_ranks(trial, seen)
    with LLM(trial.model, **trial.fields) as llm:
        assert results[0]["answers"][0] == generate_long(llm, reference.prompts, 10)
