"""The Python API as users of vLLM write it: forms of prompts, keywords, progress, signatures and messages."""

from __future__ import annotations

import dataclasses
import inspect
import io
import sys

import numpy
import pytest
import torch

import yalis
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams, YalisError
from yalis.config import EngineConfig
from yalis.engine.progress import Progress, format_progress

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(path), device="cpu", threads=1, kv_memory=0.05) as model:
        yield model


def test_forms_of_a_prompt(llm):
    ids = llm.tokenizer.encode("abc def")
    expected = llm.generate("abc def", SHORT)[0].token_ids
    forms = [
        ids,
        tuple(ids),
        numpy.array(ids),
        numpy.array(ids, dtype=numpy.int32),
        torch.tensor(ids),
        {"prompt": "abc def"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": torch.tensor(ids)},
        {"prompt": "shown only", "prompt_token_ids": ids},
    ]
    for form in forms:
        assert [output.token_ids for output in llm.generate(form, SHORT)] == [expected]
    outputs = llm.generate(forms, SHORT)
    assert [output.token_ids for output in outputs] == [expected] * len(forms)
    assert [output.prompt for output in outputs] == [None] * 5 + ["abc def", None, None, "shown only"]
    assert llm.generate(numpy.array([ids, ids]).tolist(), SHORT)[1].token_ids == expected
    assert llm.generate(list(torch.tensor([ids, ids])), SHORT)[1].token_ids == expected
    # The same forms in the other calls.
    assert [token for chunk in llm.stream(torch.tensor(ids), SHORT) for token in chunk.token_ids] == expected
    llm.submit({"prompt": "abc def"}, sampling_params=SHORT)
    assert [event.output.token_ids for event in llm.events() if event.output] == [expected]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([[1, 2]]), r"shape \(1, 2\); give 1-D arrays, one for each prompt"),
        (numpy.array([1.5]), "token id 1.5 is not in this model's vocabulary"),
        (numpy.array([True]), "not in this model's vocabulary"),
        (torch.tensor([], dtype=torch.long), "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({}, "empty dict"),
        ({"prompt": ["a"]}, "give a string"),
        ({"prompt_token_ids": "abc"}, "give a list of token ids"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data'; accepted: prompt, prompt_token_ids"),
    ],
)
def test_invalid_forms_of_a_prompt(llm, prompt, message):
    with pytest.raises(YalisError, match=message):
        llm.generate(prompt, SHORT)
    assert llm.num_unfinished == 0


def test_the_error_of_one_prompt_names_its_index(llm):
    with pytest.raises(YalisError, match=r"^prompt 2: token id -1 is not in"):
        llm.generate(["a", "b", [-1], "c"], SHORT)
    with pytest.raises(YalisError, match=r"^prompt 1: a prompt is of type NoneType"):
        next(llm.stream(["a", None], SHORT))
    with pytest.raises(YalisError, match=r"^token id -1"):
        llm.generate([[-1]], SHORT)
    assert llm.num_unfinished == 0


def test_vllm_names_of_arguments_and_results(llm):
    wanted = llm.generate("abc", SHORT)[0]
    (output,) = llm.generate("abc", sampling_params=SHORT, use_tqdm=False)
    assert output.outputs[0].text == wanted.text == output.text
    assert output.outputs is output.completions
    with pytest.raises(YalisError, match="sampling and sampling_params are the same argument"):
        llm.generate("abc", SHORT, sampling_params=SHORT)
    with pytest.raises(YalisError, match=r"give SamplingParams\(...\)"):
        llm.submit("abc", [SHORT])
    every = SamplingParams(top_k=-1)
    assert every == SamplingParams(top_k=0)
    with pytest.raises(YalisError, match="top_k is -2"):
        SamplingParams(top_k=-2)


def test_progress_counts_the_tokens_of_the_call(llm):
    for _ in range(2):
        seen: list[Progress] = []
        llm.generate(["a", "b"], SHORT, progress=seen.append)
        assert [(now.finished, now.total, now.output_tokens) for now in seen][-1] == (2, 2, 8)
        assert seen[0].output_tokens <= 2
    with pytest.raises(YalisError, match="progress is 3; give a function"):
        llm.generate("a", SHORT, progress=3)


def test_a_progress_line_on_a_terminal(llm, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stream: io.StringIO, **options) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate(["a", "b"], SHORT, **options)
        return stream.getvalue()

    assert "/2 prompts, " in shown(Screen())
    assert shown(Screen()).endswith("\r\x1b[K")
    assert shown(Screen(), progress=False) == shown(Screen(), use_tqdm=False) == shown(io.StringIO()) == ""
    assert shown(Screen(), progress=lambda now: None) == ""
    assert " 1/1 prompt, 1 token, " in format_progress(Progress(1, 1, 1), 2.0)
    line = format_progress(Progress(1, 4, 50), 2.0)
    assert line == "[######------------------] 1/4 prompts, 50 tokens, 25 tokens/s"


def test_names_and_signature_are_visible():
    assert {"LLM", "Progress", "SamplingParams", "YalisError", "YalisFailure"} <= set(dir(yalis))
    parameters = inspect.signature(LLM).parameters
    found = {name: p.default for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert found == {field.name: field.default for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor_parallel_size", "here it is called tp"),
        ("blok_size", "did you mean 'block_size'"),
        ("seed", r"give SamplingParams\(seed="),
        ("zzz", "accepted: allreduce, "),
    ],
)
def test_an_unknown_argument(name, message):
    with pytest.raises(YalisError, match=f"LLM has no argument '{name}'; {message}"):
        LLM(**{name: 2})


def test_forms_of_a_conversation(llm):
    def message(content: object) -> dict[str, object]:
        return {"role": "user", "content": content}

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    expected = llm.chat([message("hello")], SHORT)[0].token_ids
    assert llm.chat("hello", SHORT)[0].token_ids == expected
    assert llm.chat([message(parts)], sampling_params=SHORT)[0].token_ids == expected
    assert llm.generate([[message(parts)]], SHORT)[0].token_ids == expected
    assert [output.token_ids for output in llm.chat([[message("hello")], [message(parts)]], SHORT)] == [expected] * 2
    for wrong, sentence in [
        ([message([{"type": "image_url", "image_url": {}}])], "message 1 has a part that is not text; only text"),
        ([message(None)], "message 1 has no content"),
        (["hello"], "message 1 has no role"),
        ([[message("a")], [message(3)]], "prompt 1: message 1 has no content"),
        ([], "the conversation is empty"),
        (3, "the conversation is of type int; give a string, or a list of"),
    ]:
        with pytest.raises(YalisError, match=sentence):
            llm.chat(wrong, SHORT)
