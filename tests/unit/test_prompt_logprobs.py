"""Log-probabilities of prompt tokens equal transformers', however the prompt is scheduled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from tests.families import CASES, VOCAB, Reference, make_prompts, make_reference
from tests.ranks import Memory, run_ranks
from tests.unit.test_engine_executor import open_llm
from yalis import LLM, RequestOutput, SamplingParams, YalisError
from yalis.comm.base import SingleRank
from yalis.errors import YalisFailure
from yalis.parallel.plan import shard
from yalis.sampling import prompt_logprobs
from yalis.sampling.prompt_logprobs import LOGIT_ROWS, PromptScorer

LENGTHS = (21, 1, 30, 37, 6, 26)
STEPS = 12
TOP = 4
NAMES = ("llama-mha-tied", "gemma2", "phi3-longrope")  # plain, soft-capped logits, two sets of RoPE factors


@pytest.fixture(scope="module", params=NAMES)
def ref(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    case = next(case for case in CASES if case.name == request.param)
    return make_reference(case, tmp_path_factory.mktemp("scored"), 1, make_prompts(1, LENGTHS, shared=16), STEPS)


def check(output: RequestOutput, expected: Tensor) -> None:
    """Compare with transformers' log-probabilities [prompt tokens, vocabulary]."""
    prompt, scored = output.prompt_token_ids, output.prompt_logprobs
    assert scored is not None
    assert len(scored) == len(prompt)
    assert scored[0] is None
    for position, found in enumerate(scored[1:], 1):
        row = expected[position - 1]
        assert found is not None
        assert found.token_id == prompt[position]
        assert found.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
        best = row.topk(TOP)
        assert list(found.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
        assert list(found.top) == best.indices.tolist()


@pytest.mark.parametrize(("chunked", "preempt"), [(False, False), (True, False), (True, True)])
def test_equal_to_transformers(ref: Reference, chunked: bool, preempt: bool) -> None:
    """Scored requests run next to others of the same prompts, which reuse prefixes, with and without an output."""
    expected = ref.prompt_logprobs()
    settings: dict[str, Any] = {"max_batch_tokens": 11 if chunked else 512, "kv_blocks": 17 if preempt else 128}
    plain = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    scored = SamplingParams(max_tokens=STEPS, ignore_eos=True, prompt_logprobs=TOP)
    only = SamplingParams(max_tokens=0, prompt_logprobs=TOP)
    with LLM(str(ref.path), device="cpu", block_size=4, max_model_len=50, **settings) as llm:
        prompts, count = ref.prompts, len(ref.prompts)
        outputs = llm.generate(prompts * 3, [plain] * count + [scored] * count + [only] * count)
        counters = llm._engine.scheduler.counters  # type: ignore[union-attr]
        llm._engine.scheduler.check()  # type: ignore[union-attr]
        assert (counters.chunked_prefills > 0) == chunked
        assert (counters.preemptions > 0) == preempt
        assert counters.prefix_hit_tokens > 0
    for index, output in enumerate(outputs):
        generated = index < 2 * count
        assert output.token_ids == (ref.tokens[index % count] if generated else [])
        assert output.finish_reason == "length"
        if index < count:
            assert output.prompt_logprobs is None
            continue
        assert output.metrics.cached_tokens == 0
        assert output.metrics.total > 0
        check(output, expected[index % count])


def test_replayed_steps_and_chunks_of_logits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. No more than LOGIT_ROWS rows of logits are computed at a time, and decode steps are replayed."""
    ref = make_reference(CASES[0], tmp_path_factory.mktemp("replayed"), 2, make_prompts(2, (21, 9), shared=6), 3)
    monkeypatch.setattr(prompt_logprobs, "LOGIT_ROWS", 8)
    with torch.inference_mode(), open_llm(ref.path, monkeypatch) as llm:
        runner = llm._engine.runner  # type: ignore[union-attr]
        sizes: list[int] = []
        compute: Callable[[Tensor], Tensor] = runner.model.compute_logits
        monkeypatch.setattr(runner.model, "compute_logits", lambda x: sizes.append(len(x)) or compute(x))
        outputs = llm.generate(ref.prompts, SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=TOP))
        assert runner.executor.replays > 0
        assert runner.recorded_picks > 0
    assert max(sizes) == 8
    assert sum(sizes) >= 28
    for output, tokens, expected in zip(outputs, ref.tokens, ref.prompt_logprobs(), strict=True):
        assert output.token_ids == tokens
        check(output, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shards_of_the_vocabulary(ranks: int) -> None:
    rows, vocab = 2 * LOGIT_ROWS + 3, 101
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1)).tolist()
    counts = [i % 4 for i in range(rows)]

    def score(rank: int, group: Any) -> list[Any]:
        held = shard(vocab, ranks, rank)
        scorer = PromptScorer(held, vocab, group, torch.device("cpu"))
        return scorer.score(logits, lambda x: x[:, held.start : held.stop], tokens, counts).to_host()

    def score_in_memory(rank: int, group: Memory) -> list[Any]:
        found = score(rank, group)
        assert [name for name, _ in group.calls] == ["all_gather"]  # one message, however long the prompt is
        return found

    results = [score(0, SingleRank())] if ranks == 1 else run_ranks(ranks, score_in_memory)
    expected = logits.double().log_softmax(1)
    for found in results:
        assert found == results[0]
        for row, (one, token, count) in enumerate(zip(found, tokens, counts, strict=True)):
            assert one.token_id == token
            assert one.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
            assert list(one.top) == expected[row].topk(count).indices.tolist()
            assert list(one.top.values()) == pytest.approx(expected[row].topk(count).values.tolist(), abs=1e-5)


def test_nan_logits_raise_a_message() -> None:
    scorer = PromptScorer(range(5), 5, SingleRank(), torch.device("cpu"))
    scored = scorer.score(torch.full((2, 5), float("nan")), lambda x: x, [1, 2], [0, 0])
    with pytest.raises(YalisFailure, match="logits are NaN"):
        scored.to_host()


def test_limits_and_several_completions(tmp_path_factory: pytest.TempPathFactory) -> None:
    ref = make_reference(CASES[0], tmp_path_factory.mktemp("limits"), 1, make_prompts(1, (16,), shared=0), 1)
    only = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with LLM(str(ref.path), device="cpu", max_model_len=16, kv_blocks=8) as llm:
        (output,) = llm.generate(ref.prompts, only)  # fills the context, which leaves no position to generate at
        assert output.completions[0].token_ids == []
        assert [one is None for one in output.prompt_logprobs or ()] == [True] + [False] * 15
        assert all(not one.top for one in (output.prompt_logprobs or ())[1:] if one is not None)
        with pytest.raises(YalisError, match="the prompt has 17 tokens, but the context holds 16; shorten it"):
            llm.generate([[1] * 17], only)
        (several,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, n=3, temperature=1.0, prompt_logprobs=1))
        assert len(several.completions) == 3
        assert several.prompt_logprobs is not None
        events = [*llm.stream([[5, 6, 7]], only)]
        assert [(event.token_ids, event.finish_reason) for event in events] == [([], "length")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; give a whole number of at least 1, or prompt_logprobs"),
        ({"max_tokens": False, "prompt_logprobs": 0}, "max_tokens is False"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n is 2 and max_tokens is 0"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; give a whole number from 0 to 20"),
        ({"prompt_logprobs": VOCAB}, "from 0 to 20"),
    ],
)
def test_invalid_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(YalisError, match=message):
        SamplingParams(**fields)
