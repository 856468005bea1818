"""Every family has transformers' logits and greedy tokens in every scheduling situation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.families import CASES, Case, Reference, make_prompts, make_reference
from tests.tap import LogitTap, check_near_ties
from yalis import LLM, SamplingParams

STEPS = 12
SEEDS = (1, 2)
LENGTHS = (21, 1, 30, 37, 6, 26)
EVERY = tuple(range(len(LENGTHS)))
#: chunked prefill, prefix caching, forced preemption: each off and on
SCENARIOS = list(itertools.product((False, True), repeat=3))
ALL_ON = (True, True, True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """transformers' outputs, computed once per case and seed."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def find(case: Case, seed: int) -> Reference:
        if (case.name, seed) not in made:
            prompts = make_prompts(seed, LENGTHS, shared=16)
            made[case.name, seed] = make_reference(case, folder, seed, prompts, STEPS)
        return made[case.name, seed]

    return find


def open_llm(ref: Reference, backend: str, chunked: bool, reuse: bool, preempt: bool, tight: int = 17) -> LLM:
    return LLM(
        str(ref.path),
        device="cpu",
        attention=backend,
        block_size=4,
        max_batch_tokens=11 if chunked else 512,
        prefix_reuse=reuse,
        kv_blocks=tight if preempt else 128,  # the longest sequence needs 13 blocks
        max_model_len=50,
    )


def check(ref: Reference, llm: LLM, mixed: bool, chosen: Sequence[int] = EVERY, steps: int = STEPS) -> None:
    """Run the prompts, batched or one by one; tokens must equal the reference, logits within 1e-4."""
    tap = LogitTap(llm)
    prompts = [ref.prompts[index] for index in chosen]
    groups = [prompts] if mixed else [[prompt] for prompt in prompts]
    greedy = SamplingParams(max_tokens=steps, ignore_eos=True)
    outputs = [output for group in groups for output in llm.generate(group, greedy)]
    for request_id, (index, output) in enumerate(zip(chosen, outputs, strict=True)):
        assert output.token_ids == ref.tokens[index][:steps], f"prompt {index} of {ref.case.name}"
        assert output.finish_reason == "length"
        worst = (tap.of(request_id) - ref.logits[index][:steps]).abs().max().item()
        assert worst < 1e-4, f"prompt {index} of {ref.case.name}: logits off by {worst:.2e}"
    llm._engine.scheduler.blocks.check()


def check_scenario(
    ref: Reference,
    backend: str,
    scenario: tuple[bool, bool, bool],
    chosen: Sequence[int] = EVERY,
    steps: int = STEPS,
    tight: int = 17,
) -> None:
    chunked, reuse, preempt = scenario
    with open_llm(ref, backend, *scenario, tight) as llm:
        check(ref, llm, True, chosen, steps)
        counted = llm._engine.scheduler.counters
        assert (counted.chunked_prefills > 0) == chunked
        assert (counted.preemptions > 0) == preempt
        # Preempted requests reuse their own cached blocks, so there are hits in any case if caching is on.
        assert (counted.prefix_hit_tokens > 0) == reuse
        assert (llm._engine.runner.executor.replays > 0) == (backend == "native" and ref.case.replayed_on_cpu)
        if ref.case.name == "phi3-longrope":
            assert counted.rope_switches > 0


def name_scenario(flags: tuple[bool, bool, bool]) -> str:
    return "".join("cpr"[index] if on else "-" for index, on in enumerate(flags))


@pytest.mark.parametrize(
    ("case", "scenario"),
    [
        pytest.param(case, flags, id=f"{case.name}-{name_scenario(flags)}", marks=[pytest.mark.full] * left_out)
        for case in CASES
        for flags in SCENARIOS
        for left_out in [case.brief and flags not in (SCENARIOS[0], ALL_ON)]
    ],
)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_every_scenario(reference, backend, case, scenario):
    check_scenario(reference(case, SEEDS[0]), backend, scenario)


@pytest.mark.parametrize(
    "scenario",
    [ALL_ON, *(pytest.param(flags, marks=pytest.mark.full) for flags in SCENARIOS if flags != ALL_ON)],
    ids=name_scenario,
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_another_seed(reference, backend, case, scenario):
    check_scenario(reference(case, SEEDS[1]), backend, scenario)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_alone(reference, backend, case):
    ref = reference(case, SEEDS[0])
    with open_llm(ref, backend, False, False, False) as llm:
        check(ref, llm, mixed=False)


# Triton's interpreter takes milliseconds per program. One model for each feature of the kernels (MHA and GQA, wide
# heads, sliding windows, softcap, QK norm, longrope, sinks), and just enough work for every counter.
INTERPRETED = {
    "llama-mha-tied", "llama3-gqa4", "llama-wide-heads", "mistral-window", "qwen3-gqa4", "gemma2", "phi3-longrope",
    "gpt-oss",
}  # fmt: skip
OTHERS = [("flex", case) for case in CASES] + [("triton", case) for case in CASES if case.name in INTERPRETED]


@pytest.mark.parametrize(("backend", "case"), OTHERS, ids=lambda given: getattr(given, "name", given))
def test_other_backends(reference, backend, case):
    check_scenario(reference(case, SEEDS[0]), backend, ALL_ON, chosen=(1, 4, 5, 0), steps=8, tight=13)


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_scenario)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["flex", "triton"])
def test_other_backends_full(reference, backend, case, seed, scenario):
    check_scenario(reference(case, seed), backend, scenario)


def test_seeded_request_same_alone_and_in_any_batch(reference):
    ref = reference(CASES[0], SEEDS[0])
    sampling = [
        SamplingParams(
            max_tokens=STEPS, ignore_eos=True, temperature=0.9, seed=100 + index, top_p=0.95 if index % 2 else 1.0
        )
        for index in range(len(ref.prompts))
    ]
    with open_llm(ref, "sdpa", False, True, False) as llm:
        alone = [llm.generate([p], s)[0].token_ids for p, s in zip(ref.prompts, sampling, strict=True)]
        together = [output.token_ids for output in llm.generate(ref.prompts, sampling)]
        backwards = [output.token_ids for output in llm.generate(ref.prompts[::-1], sampling[::-1])][::-1]
    with open_llm(ref, "sdpa", True, True, True) as llm:
        pressed = [output.token_ids for output in llm.generate(ref.prompts, sampling)]
    assert alone == together == backwards == pressed
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_bf16_differs_only_at_near_ties(reference, case):
    ref = reference(case, SEEDS[0])
    with LLM(str(ref.path), device="cpu", dtype="bfloat16", max_model_len=64, kv_blocks=64) as llm:
        total_tokens, wrong = check_near_ties(ref, llm)
    print(f"{case.name}: {wrong} near-ties of {total_tokens} tokens resolved differently")
