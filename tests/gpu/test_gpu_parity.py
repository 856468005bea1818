"""The engine on a GPU against transformers: fp32 exactly, bf16 up to near-ties, no synchronisation in a decode step."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.families import CASES, Case, Reference, make_prompts, make_reference
from tests.tap import LogitTap, check_near_ties
from yalis import LLM, SamplingParams
from yalis.errors import YalisError

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

STEPS = 12
SEED = 1
LENGTHS = (21, 1, 30, 37, 6, 26)
#: One case per family, because flex compiles for each.
FEW = [
    case
    for case in CASES
    if case.name
    in ("llama3-gqa4", "mistral-window", "qwen2-tied", "qwen3-gqa4", "gemma2", "phi3", "granite", "gpt-oss")
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("families"), {}

    def find(case: Case) -> Reference:
        if case.name not in made:
            made[case.name] = make_reference(case, folder, SEED, make_prompts(SEED, LENGTHS, shared=16), STEPS)
        return made[case.name]

    return find


def open_llm(ref: Reference, backend: str, dtype: str, **fields) -> LLM:
    # With 16-bit types the kernels load whole KV blocks by TMA if they are large enough.
    fields = {"block_size": 16 if dtype == "float32" else 64, "kv_blocks": 64, "max_model_len": 64, **fields}
    return LLM(str(ref.path), device="cuda", dtype=dtype, attention=backend, **fields)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Reset the compiler, because many models run in one process here."""
    torch.compiler.reset()


FP32 = [(backend, case, False) for backend in ("sdpa", "triton") for case in CASES]
FP32 += [("flex", case, False) for case in FEW]
FP32 += [(backend, case, True) for backend in ("sdpa", "triton") for case in FEW] + [("flex", FEW[0], True)]


@pytest.mark.parametrize(
    ("backend", "case", "pressed"), FP32, ids=[f"{b}-{c.name}{'-pressed' if p else ''}" for b, c, p in FP32]
)
def test_fp32_is_exact(reference, backend, case, pressed):
    ref = reference(case)
    tight = {"block_size": 16, "kv_blocks": 6, "max_batch_tokens": 11} if pressed else {}
    with open_llm(ref, backend, "float32", **tight) as llm:
        tap = LogitTap(llm)
        outputs = llm.generate(ref.prompts, SamplingParams(max_tokens=STEPS, ignore_eos=True))
        counters = llm._engine.scheduler.counters
        assert counters.fed_tokens > 0, "no token was read on the device"
        assert not pressed or (counters.chunked_prefills > 0 and counters.preemptions > 0)
    for index, output in enumerate(outputs):
        assert output.token_ids == ref.tokens[index]
        assert (tap.of(index) - ref.logits[index]).abs().max().item() < 1e-4


@pytest.mark.parametrize("backend", ["sdpa", "flex", "triton", "flash"])
def test_bf16_differs_only_at_near_ties(reference, backend):
    served = total_tokens = wrong = 0
    for case in CASES if backend != "flex" else FEW:
        ref = reference(case)
        unsupported = case.name.startswith(("gemma2", "gpt-oss"))  # softcap, sinks
        if backend == "flash" and (unsupported or case.options.get("head_dim", 16) % 8):
            with pytest.raises(YalisError, match="'flash' cannot be used here"):
                open_llm(ref, backend, "bfloat16")
            continue
        with open_llm(ref, backend, "bfloat16") as llm:
            total, ties = check_near_ties(ref, llm)
        served, total_tokens, wrong = served + 1, total_tokens + total, wrong + ties
    print(f"\nbf16 {backend}: {wrong} near-ties differ among {total_tokens} tokens of {served} models")
    assert served >= 6


@pytest.mark.parametrize("pressed", [False, True])
def test_bf16_over_several_blocks_of_triton(tmp_path, pressed):
    """KV blocks of 64 tokens loaded by TMA descriptor, with chunked prefill and preemption."""
    ref = make_reference(CASES[0], tmp_path, SEED, make_prompts(SEED, (120, 62, 125, 127), shared=64), STEPS)
    tight = {"kv_blocks": 6, "max_batch_tokens": 90} if pressed else {}
    with open_llm(ref, "triton", "bfloat16", max_model_len=256, **tight) as llm:
        total, ties = check_near_ties(ref, llm)
        counters = llm._engine.scheduler.counters
        assert not pressed or (counters.chunked_prefills > 0 and counters.preemptions > 0)
    print(f"\nbf16 over several blocks: {ties} near-ties of {total} tokens resolved differently")


@pytest.mark.parametrize("backend", ["sdpa", "flex", "triton", "flash"])
def test_a_decode_step_does_not_synchronise(reference, backend):
    """Launching a decode step for many sequences does not synchronise with the host."""
    ref = reference(CASES[0])
    with open_llm(ref, backend, "bfloat16", kv_blocks=256) as llm:
        runner = llm._engine.runner
        launch, checked = runner.launch, []

        def watched(plan):
            if any(step.num_tokens > 1 for step in plan.sequences) or plan.step_id < 4:
                return launch(plan)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                checked.append(len(plan.sequences))

        runner.launch = watched
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prompts = [[3 + index, 5, 7] for index in range(24)]
            llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1))
        assert sum(checked) >= 24 * 8


def test_feed_on_device_drops_tokens_after_a_stop(reference):
    """The host sees a stop one step late. Tokens after it are dropped, and all blocks are freed."""
    ref = reference(CASES[0])
    with open_llm(ref, "auto", "float32") as llm:
        stops = [
            SamplingParams(max_tokens=STEPS, stop_token_ids=(tokens[4],), ignore_eos=True) for tokens in ref.tokens
        ]
        outputs = llm.generate(ref.prompts, stops)
        for output, tokens in zip(outputs, ref.tokens, strict=True):
            assert output.token_ids == tokens[: tokens.index(tokens[4]) + 1]
            assert output.finish_reason == "stop"
        while llm._engine.has_work:
            llm.poll()
        llm._engine.scheduler.check()


def test_random_weights_equal_those_on_the_cpu(reference):
    ref = reference(CASES[0])
    with LLM(str(ref.path), load="random", device="cpu", dtype="float32", max_model_len=64) as llm:
        expected = {name: value.clone() for name, value in llm._engine.runner.model.state_dict().items()}
    with LLM(str(ref.path), load="random", device="cuda", dtype="float32", max_model_len=64, kv_blocks=8) as llm:
        for name, value in llm._engine.runner.model.state_dict().items():
            torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-6, atol=1e-7)


def test_auto_backend_supports_every_family(reference):
    for case in CASES:
        ref = reference(case)
        with open_llm(ref, "auto", "bfloat16") as llm:
            assert len(llm.generate(ref.prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_free_memory_becomes_kv_blocks(reference):
    ref = reference(CASES[0])
    with LLM(str(ref.path), device="cuda", memory_fraction=0.5, max_num_seqs=4) as llm:
        assert llm._engine.runner.num_blocks == 4 * 256 // 64  # no more than four full contexts can use
