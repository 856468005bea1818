"""The asynchronous loop of a GPU, on the CPU: plans overlap, the next step reads sampled tokens on the device."""

from __future__ import annotations

import pytest

from tests.families import CASES, make_prompts, make_reference
from yalis import LLM, SamplingParams
from yalis.scheduling import settings
from yalis.scheduling.scheduler import SchedulerConfig

STEPS = 12


@pytest.fixture(autouse=True)
def overlapped(monkeypatch):
    def ahead(**fields):
        return SchedulerConfig(**{**fields, "max_in_flight": 2, "feed_on_device": True})

    monkeypatch.setattr(settings, "SchedulerConfig", ahead)


@pytest.fixture(scope="module", params=["llama-mha-tied", "gemma2", "phi3-longrope"])
def ref(request, tmp_path_factory):
    case = next(case for case in CASES if case.name == request.param)
    prompts = make_prompts(1, (21, 1, 30, 37, 6, 26), shared=16)
    return make_reference(case, tmp_path_factory.mktemp("overlap"), 1, prompts, STEPS)


def plain(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **fields})


def drain(llm: LLM) -> None:
    """Commit the steps in flight, and check that no request holds KV blocks or slots."""
    while llm._engine.has_work:
        llm.poll()
    llm._engine.scheduler.check()


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
@pytest.mark.parametrize("pressed", [False, True])
def test_tokens_match_the_reference(ref, attention, pressed):
    tight = {"block_size": 4, "kv_blocks": 17, "max_batch_tokens": 11, "max_model_len": 50} if pressed else {}
    with LLM(str(ref.path), device="cpu", attention=attention, **{"kv_blocks": 64, **tight}) as llm:
        outputs = llm.generate(ref.prompts, plain())
        assert [output.token_ids for output in outputs] == ref.tokens
        counters = llm._engine.scheduler.counters
        assert counters.fed_tokens > 0
        assert not pressed or (counters.preemptions > 0 and counters.chunked_prefills > 0)
        drain(llm)


def test_late_stops_and_cancels_release_everything(ref):
    with LLM(str(ref.path), device="cpu", kv_blocks=64) as llm:
        stops = [plain(stop_token_ids=(tokens[4],)) for tokens in ref.tokens]
        for output, tokens in zip(llm.generate(ref.prompts, stops), ref.tokens, strict=True):
            assert output.token_ids == tokens[: tokens.index(tokens[4]) + 1]
            assert output.finish_reason == "stop"
        assert llm._engine.scheduler.counters.dropped_tokens > 0, "no stop was late"
        drain(llm)
        ids = [llm.submit(prompt, plain()) for prompt in ref.prompts]
        for _ in range(4):
            llm.poll()
        for id in ids[::2]:
            llm.cancel(id)
        done = {}
        while llm.num_unfinished:
            done.update(llm.poll())
        for index, id in enumerate(ids):
            expected = "cancelled" if index % 2 == 0 else "length"
            assert done[id].finish_reason == expected
            assert done[id].token_ids == ref.tokens[index][: len(done[id].token_ids)]
        drain(llm)


def test_penalties_wait_for_their_history(ref):
    penalised = plain(repetition_penalty=1.5, frequency_penalty=0.5)
    with LLM(str(ref.path), device="cpu", kv_blocks=64) as llm:
        together = [output.token_ids for output in llm.generate(ref.prompts, penalised)]
        alone = [llm.generate(prompt, penalised)[0].token_ids for prompt in ref.prompts]
        assert llm._engine.scheduler.counters.fed_tokens == 0
    assert together == alone
    assert together != ref.tokens
