"""CUDA graphs generate the same tokens as the same engine run eagerly, which are those of transformers.

fp32 must match exactly, bf16 by the near-tie rule. Counters prove that graphs were replayed, requests were preempted
and nothing was compiled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import CASES, Case, Reference, make_prompts, make_reference
from tests.mps import Mps
from tests.multiprocess.splits import MEMORY_PRESSURE, Trial
from tests.multiprocess.test_splits import Models, check, check_pressure, check_ranks, launch
from tests.tap import check_near_ties
from yalis import LLM, SamplingParams
from yalis.engine.packing import StepKind

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
STEPS = 16
SEED = 5
LENGTHS = (21, 1, 30, 37, 6, 26, 3, 44, 12)
FAMILIES = (
    "llama3-gqa4", "llama-bias-linear", "mistral-window", "qwen3-gqa4", "gemma2", "phi3", "phi3-longrope", "granite",
    "gemma3", "ministral3", "cohere2", "hunyuan", "nemotron", "stablelm-parallel-tied",
)  # fmt: skip
FEW = [case for case in CASES if case.name in FAMILIES]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("families"), {}

    def find(case: Case) -> Reference:
        if case.name not in made:
            made[case.name] = make_reference(case, folder, SEED, make_prompts(SEED, LENGTHS, shared=16), STEPS)
        return made[case.name]

    return find


def open_llm(ref: Reference, dtype: str, **fields: Any) -> LLM:
    size = 16 if dtype == "float32" else 32  # in 16 bits, attention loads whole KV blocks if they are large enough
    fields = {"block_size": size, "kv_blocks": 64, "max_model_len": 64, "max_num_seqs": 12, **fields}
    return LLM(str(ref.path), device="cuda", dtype=dtype, **fields)


def replays(llm: LLM) -> int:
    return llm._engine.runner.executor.replays


def plain(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **fields})


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Check that Triton and torch.compile compile nothing, and load nothing from their caches on disk."""
    import triton
    from torch._dynamo.utils import counters

    compiled: list[str] = []

    def count(*args: Any, **details: Any) -> bool:
        compiled.append(str(details.get("repr", args)))
        return False

    hooks = triton.knobs.runtime
    before, graphs = hooks.jit_cache_hook, counters["stats"]["unique_graphs"]
    hooks.jit_cache_hook = count
    try:
        yield
    finally:
        hooks.jit_cache_hook = before
    assert not compiled, f"compiled after the warm-up: {compiled}"
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_fp32_is_exact_with_and_without_padding(reference: Any, case: Case) -> None:
    """Nine sequences that finish one after the other use every bucket size, with and without padding."""
    ref = reference(case)
    lengths = [STEPS - 1 - place for place in range(len(ref.prompts))]
    with open_llm(ref, "float32") as llm:
        assert llm._engine.runner.executor.recorder.layouts[StepKind.DECODE].sizes == [1, 2, 4, 8, 12]
        outputs = llm.generate(ref.prompts, [plain(max_tokens=length) for length in lengths])
        assert replays(llm) >= 12
    for output, expected, length in zip(outputs, ref.tokens, lengths, strict=True):
        assert output.token_ids == expected[:length]


@pytest.mark.parametrize("case", [case for case in FEW if case.name in ("qwen3-gqa4", "gemma2")], ids=lambda c: c.name)
@pytest.mark.parametrize("max_batch_tokens", [17, 512])
def test_prompt_logprobs_equal_transformers(reference: Any, case: Case, max_batch_tokens: int) -> None:
    """Scored prompts run eagerly, whole and in chunks, and do not use the graph of single prompts."""
    ref = reference(case)
    with open_llm(ref, "float32", max_batch_tokens=max_batch_tokens) as llm:
        before = replays(llm)
        (alone,) = llm.generate(ref.prompts[:1], SamplingParams(max_tokens=0, prompt_logprobs=3))
        assert replays(llm) == before
        outputs = llm.generate(ref.prompts, plain(prompt_logprobs=3))
        assert replays(llm) > before
    assert [output.token_ids for output in outputs] == ref.tokens
    expected = ref.prompt_logprobs()
    for output, logprobs in zip([alone, *outputs], [expected[0], *expected], strict=True):
        prompt, scored = output.prompt_token_ids, output.prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        for position, found in enumerate(scored[1:], 1):
            row = logprobs[position - 1]
            assert found is not None
            assert found.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
            assert list(found.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_bf16_differs_only_at_near_ties(reference: Any) -> None:
    tokens = disagreements = 0
    for case in FEW:
        ref = reference(case)
        with open_llm(ref, "bfloat16") as llm:
            total, ties = check_near_ties(ref, llm)
            assert replays(llm) > 0
        tokens, disagreements = tokens + total, disagreements + ties
    print(f"\nbf16 from graphs: {disagreements} of {tokens} tokens differ, all at near-ties")


def mixed(count: int) -> list[SamplingParams]:
    rng = random.Random(SEED)
    kinds: list[dict[str, Any]] = [
        {}, {}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}, {"logprobs": 2},
        {"temperature": 1.2, "top_k": 9, "logprobs": 0}, {"min_tokens": 3, "ignore_eos": False},
    ]  # fmt: skip
    return [plain(max_tokens=rng.randint(2, 32), seed=i, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("name", ["llama3-gqa4", "gemma2"])
def test_a_mixed_workload_gives_the_tokens_of_eager_steps(reference: Any, name: str) -> None:
    """With preemptions, prefix caching, sampling, penalties and logprobs. Nothing is compiled meanwhile."""
    ref = reference(next(case for case in CASES if case.name == name))
    prompts = [ref.prompts[i % len(ref.prompts)] for i in range(30)]
    params = mixed(len(prompts))
    found = []
    for eager in (False, True):
        fields = {"block_size": 4, "kv_blocks": 36, "max_model_len": 80, "max_batch_tokens": 40}
        with open_llm(ref, "float32", eager=eager, **fields) as llm:
            llm.generate(ref.prompts[:3], [plain(max_tokens=2), *mixed(3)[1:]])  # warms up the sampler
            done: dict[int, Any] = {}
            if eager:
                found.append(arrive(llm, prompts, params, done))
                assert replays(llm) == 0
                continue
            with nothing_compiled():
                found.append(arrive(llm, prompts, params, done))
            counters = llm._engine.scheduler.counters
            assert replays(llm) > 10
            assert counters.preemptions > 0
            assert counters.prefix_hit_tokens > 0
            assert counters.fed_tokens > 0
    assert found[0] == found[1]


def arrive(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], done: dict[int, Any]) -> list[list[int]]:
    """Submit five requests at a time, some steps apart, and return their tokens."""
    ids = []
    for first in range(0, len(prompts), 5):
        for prompt, sampling in zip(prompts[first : first + 5], params[first : first + 5], strict=True):
            ids.append(llm.submit(prompt, sampling))
        for _ in range(4):
            done.update(llm.poll())
    while llm.num_unfinished:
        done.update(llm.poll())
    llm._engine.drain()
    llm._engine.scheduler.check()
    return [done[id].token_ids for id in ids]


def test_compiled_blocks_give_the_same_tokens(reference: Any) -> None:
    ref = reference(FEW[0])
    with open_llm(ref, "float32", compile=True, max_num_seqs=4) as llm:
        llm.generate(ref.prompts, plain())
        with nothing_compiled():
            outputs = llm.generate(ref.prompts, plain())
        assert replays(llm) > 0
    assert [output.token_ids for output in outputs] == ref.tokens


def test_memory_counts_the_graphs() -> None:
    """The KV cache uses all of memory_fraction that weights, activations and graphs leave."""
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    with LLM(str(SHAPES / "llama-3.2-1b.json"), load="random", device="cuda", memory_fraction=0.3) as llm:
        used = 1 - torch.cuda.mem_get_info()[0] / total
        assert 0.27 < used < 0.31 + (1 - before / total)
        prompts = [[7, place] * 500 for place in range(64)]
        assert all(len(output.token_ids) == 4 for output in llm.generate(prompts, plain(max_tokens=4)))
        assert replays(llm) > 0
        assert 1 - torch.cuda.mem_get_info()[0] / total < used + 0.02


def test_steps_of_split_models_are_graphs(mps: Mps, tmp_path_factory: pytest.TempPathFactory) -> None:
    """tp 2 on one GPU with nvrar's all-reduces in the graph, and pipeline stages with graphs of their own.

    With many requests and few KV blocks, and with one request at a time, whose prompt is replayed too.
    """
    from yalis.comm.nvrar import build

    if build.missing() is not None:
        pytest.skip(f"nvrar cannot be built here: {build.missing()}")
    fields = {**MEMORY_PRESSURE, "device": "cuda", "kv_blocks": 24}
    models = Models(tmp_path_factory.mktemp("wide"), fields)
    shared = {**fields, "ranks_per_gpu": 2, "allreduce": "nvrar"}
    alone = {**shared, "max_num_seqs": 1, "max_batch_tokens": 64}
    trials = [
        Trial(name, str(models.find(name)[0].path), split, settings)
        for name, split in (("llama3-gqa4", {"tp": 2}), ("qwen3-gqa4", {"tp": 2}), ("llama3-gqa4", {"pp": 2}))
        for settings in (shared, alone)
    ]
    everyone = launch(2, trials, tmp_path_factory.mktemp("out"), mps.environment)
    for index, trial in enumerate(trials):
        given = everyone[0]["answers"][index]
        check(trial, given, *models.find(trial.case))
        check_ranks(trial, [rank["seen"][index] for rank in everyone])
        if trial.fields == alone:
            assert given["replays"] == given["stats"]["steps"], trial.name
        else:
            check_pressure(trial.split, [given])
            assert given["replays"] > 0, trial.name


def test_single_short_prompts_are_replayed(reference: Any) -> None:
    """Each prompt is padded and replayed, and again with a cached prefix. No step runs eagerly."""
    ref = reference(CASES[0])
    with open_llm(ref, "float32", block_size=4, kv_blocks=256) as llm:
        steps = replays(llm)
        for _ in range(2):
            for prompt, expected in zip(ref.prompts, ref.tokens, strict=True):
                before = llm.stats.steps
                (output,) = llm.generate(prompt, plain())
                assert output.token_ids == expected
                steps += llm.stats.steps - before
        assert output.metrics.cached_tokens > 0
        assert replays(llm) == steps
