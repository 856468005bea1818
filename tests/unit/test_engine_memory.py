"""A finished request leaves nothing behind: no reference cycle that keeps its prompt and output in memory."""

from __future__ import annotations

import gc

import pytest

from tests.families import CASES, VOCAB
from yalis import LLM, SamplingParams

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    CASES[0].build(1).save_pretrained(path)
    with LLM(str(path), device="cpu", kv_blocks=64, max_num_seqs=4) as model:
        yield model


def generate(llm):
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, n=2, logprobs=1, prompt_logprobs=1, seed=1))


def stream(llm):
    assert len(list(llm.stream(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True)))) == 8


def leave_stream(llm):
    for _ in llm.stream(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True)):
        break


def poll(llm):
    unfinished = {llm.submit([3, VOCAB - 1], SamplingParams(max_tokens=4)) for _ in range(3)}
    while unfinished:
        unfinished -= {id for id, _ in llm.poll()}


def cancel(llm):
    unfinished = {llm.submit(prompt, SamplingParams(max_tokens=40, ignore_eos=True)) for prompt in PROMPTS}
    llm.poll()
    for id in unfinished:
        llm.cancel(id)
    while unfinished:
        unfinished -= {id for id, _ in llm.poll()}


def read_events(llm):
    id = llm.submit(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [event.request_id for event in llm.events()] == [id] * 4


@pytest.mark.parametrize("use", [generate, stream, leave_stream, poll, cancel, read_events])
def test_finished_requests_are_freed_at_once(llm, use):
    use(llm)  # what exists once per process
    gc.collect()
    gc.disable()
    try:
        use(llm)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [found for found in gc.garbage if type(found).__module__.startswith("yalis")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
