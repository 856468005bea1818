"""Tensor-, pipeline- and data-parallel ranks that share one GPU under MPS give the tokens of transformers."""

from __future__ import annotations

import json

import pytest
import torch

from tests.multiprocess.splits import MEMORY_PRESSURE, SPLITS, STEPS, Trial
from tests.multiprocess.test_splits import Models, check, check_pressure, check_ranks, launch
from yalis.comm.nvrar.build import missing

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CASES = ("llama3-gqa4", "llama-bias-linear", "qwen3-gqa4", "gemma2", "phi3")
ON_GPU = {**MEMORY_PRESSURE, "device": "cuda", "kv_blocks": 24}
# All prompts fit into one step, so that the next step is a decode step of all of them, which a CUDA graph can replay.
ONE_STEP = {"kv_blocks": 1100, "max_num_seqs": 80, "max_batch_tokens": 4096}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("wide"), ON_GPU)


@pytest.mark.parametrize("ranks", [2, 4])
def test_splits_on_one_gpu(models, mps, ranks, tmp_path):
    splits = [split for split in SPLITS[ranks] if ("dp" not in split and split.get("pp") != ranks) or ranks == 2]
    compare(models, mps, tmp_path, [(case, {}) for case in (CASES if ranks == 2 else CASES[::2])], ranks, splits)


@pytest.mark.skipif(missing() is not None, reason=f"nvrar cannot be built here: {missing()}")
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "splits"), [(2, 1, [2, "1x2"]), (4, 2, [4, "2x2"]), (8, 2, [8]), (8, 1, [8])]
)
def test_tokens_with_nvrar(models, mps, ranks, ranks_per_node, splits, tmp_path):
    """Eager and with CUDA graphs, which must have been replayed."""
    fields = {"allreduce": "nvrar", "ranks_per_node": ranks_per_node}
    trials = [(case, fields) for case in CASES[:3]] + [(case, {**fields, "eager": True}) for case in CASES[:2]]
    results = compare(models, mps, tmp_path, trials, ranks, [{"tp": tp} for tp in splits])
    for trial, answer in results:
        assert (answer["replays"] > 0) == (not trial.fields.get("eager")), trial


def compare(models, mps, tmp_path, trials, ranks, splits):
    """Require equal tokens in fp32. In bf16, log-probabilities may differ by twice transformers' own bf16 error, and
    tokens only at near-ties.

    `trials` are (case, additional engine options). Returns (trial, answer) pairs.
    """
    exact, close = [], []
    for case_index, (case, options) in enumerate(trials):
        reference, _ = models.find(case)
        forced = tmp_path / f"{case}.json"
        pairs = zip(reference.prompts, reference.tokens, strict=True)
        forced.write_text(json.dumps([{"prompt": prompt, "answer": answer} for prompt, answer in pairs]))
        model = str(reference.path)
        for split_index, split in enumerate(splits):
            fields = {**ON_GPU, **options, "ranks_per_gpu": ranks, **({"kv_blocks": 15} if "dp" in split else {})}
            if (case_index + split_index) % 2 == 0:
                exact.append(Trial(case, model, split, fields))
            else:
                one_step = {**fields, **ONE_STEP, "dtype": "bfloat16"}
                close.append(Trial(case, model, split, one_step, str(forced)))
    per_rank = launch(ranks, exact + close, tmp_path, mps.environment)
    answers = per_rank[0]["answers"]
    for index, trial in enumerate(exact + close):
        check_ranks(trial, [rank["seen"][index] for rank in per_rank])
    for trial, answer in zip(exact, answers[: len(exact)], strict=True):
        check(trial, answer, *models.find(trial.case))
        check_pressure(trial.split, [answer])
    different = compared = 0
    for trial, answer in zip(close, answers[len(exact) :], strict=True):
        reference, _ = models.find(trial.case)
        bound = 2 * reference.bf16_noise()
        logits = torch.cat(reference.logits)
        expected = [token for tokens in reference.tokens for token in tokens]
        rows, chosen, found = [], [], []
        for row, (tokens, steps) in enumerate(zip(answer["tokens"], answer["logprobs"], strict=True)):
            # The second token can be compared only if the first one equals the reference.
            follows = tokens[0] == expected[row] and (row + 1) % STEPS != 0
            for offset in range(2 if follows else 1):
                rows.append(row + offset)
                chosen.append(tokens[offset])
                found.append([value for _, value in steps[offset]])
        worst = (torch.tensor(found) - logits[rows].log_softmax(1)).abs().max().item()
        assert worst < 2 * bound, f"{trial.name}: bf16 log-probabilities off by {worst:.3f}, bound {2 * bound:.3f}"
        best = logits[rows].argmax(1)
        gap = (logits[rows, best] - logits[rows, torch.tensor(chosen)]).max().item()
        assert gap < bound, f"{trial.name}: chose a token {gap:.3f} below the best, bound {bound:.3f}"
        assert len(rows) > len(expected), f"{trial.name}: no decode step was compared"
        different += int((best != torch.tensor(chosen)).sum())
        compared += len(rows)
    print(f"\nbf16 over {ranks} ranks: {different} of {compared} tokens in {len(close)} trials differ, at near-ties")
    return list(zip(exact + close, answers, strict=True))
