"""The Python API as users of vLLM write it: forms of prompts, keywords, progress, signatures and messages."""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import subprocess
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
    assert [output.token_ids for output in llm.generate((form for form in forms), SHORT)] == [expected] * len(forms)
    with pytest.raises(YalisError, match=r"a prompt is a list of strings; give submit.. one string, or the whole list"):
        llm.submit(["abc", "def"], SHORT)


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


def test_fields_of_a_result(llm):
    ids = llm.generate("abc", SHORT)[0].token_ids
    text = llm.get_tokenizer().decode([ids[1]])
    by_id, by_text, by_length = (
        dataclasses.replace(SHORT, **fields, n=2, logprobs=0)
        for fields in ({"stop_token_ids": [ids[1]]}, {"stop": [text]}, {})
    )
    first, second, third = llm.generate(["abc"] * 3, [by_id, by_text, by_length])
    assert [one.index for one in first.outputs] == [0, 1]
    reasons = [output.outputs[1].stop_reason for output in (first, second, third)]
    assert reasons == [ids[1], text, None]
    completion = third.outputs[0]
    assert completion.cumulative_logprob == sum(token.logprob for token in completion.logprobs)
    assert llm.generate("abc", SHORT)[0].outputs[0].cumulative_logprob is None
    assert first.finished
    assert first.request_id < second.request_id < third.request_id
    number = llm.submit("abc", SHORT)
    assert [event.output.request_id for event in llm.events() if event.output] == [number]


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
    ("arguments", "message"),
    [
        ({"blok_size": 2}, r"LLM has no argument 'blok_size' \(did you mean block_size\?\)$"),
        ({"seed": 2}, r"^seed=2 is not supported; give SamplingParams\(seed="),
        ({"tensor_paralel_size": 2}, r"'tensor_paralel_size' \(did you mean tensor_parallel_size\?\)$"),
        ({"load_format": "dummy"}, r"^load_format='dummy' is not supported; give load='random' for random weights$"),
        ({"distributed_executor_backend": "ray"}, "^distributed_executor_backend='ray' is not supported; YALIS starts"),
        ({"compilation_config": 3}, "^compilation_config=3 is not supported; give compile=True"),
        ({"temperature": 0.5}, r"LLM has no argument 'temperature' \(give SamplingParams\(temperature=0.5\)\)$"),
        ({"zzz": 2, "max_num": 3}, r"'zzz' and 'max_num' \(did you mean max_num_seqs\?\); accepted: allreduce, "),
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported; code in a model's folder is n"),
        ({"tensor_parallel_size": 2, "tp": 2}, "tp and tensor_parallel_size are the same argument; give one of them"),
        ({"tensor_parallel_size": 0, "enable_prefix_caching": None, "seed": 0}, "tp is 0; give a number of ranks"),
        ({"model": None}, "model is None; give a non-empty string"),
    ],
)
def test_an_invalid_argument_of_llm(arguments, message):
    with pytest.raises(YalisError, match=message):
        LLM(**arguments)


def test_arguments_of_vllm_without_an_effect(llm, tmp_path):
    assert SamplingParams(skip_special_tokens=True, detokenize=True, best_of=None, n=2) == SamplingParams(n=2)
    with pytest.raises(
        YalisError, match=r"^skip_.*=False is not supported; remove it. Samp.* 'max_token' .did.* and 'foo'"
    ):
        SamplingParams(max_token=3, foo=4, skip_special_tokens=False)
    with pytest.raises(YalisError, match=r"^best_of=4 is not supported; remove it$"):
        llm.default_sampling_params(best_of=4)
    wanted = llm.chat("abc", SHORT)[0].text
    assert llm.chat("abc", SHORT, add_generation_prompt=True, lora_request=None, tools=None)[0].text == wanted
    for call, arguments, message in [
        (llm.generate, {"lora_request": 1}, "^lora_request=1 is not supported; remove it$"),
        (llm.chat, {"tools": [{}]}, r"^tools=\[{}\] is not supported; give generate\(\) the text of llm.tokenizer.hf"),
        (llm.stream, {"samplin": SHORT}, r"stream\(\) has no argument 'samplin' .did you mean sampling or "),
        (
            llm.submit,
            {"max_tokens": 3},
            r"submit\(\) has no argument 'max_tokens' .give SamplingParams\(max_tokens=3\).$",
        ),
        (llm.generate, {"max_tokens": 4}, r"'max_tokens' .give SamplingParams\(max_tokens=4\)\)$"),
    ]:
        with pytest.raises(YalisError, match=message):
            call("abc", **arguments)
    path = save_tiny_chat(tmp_path)
    with LLM(
        path, enforce_eager=True, gpu_memory_utilization=0.5, seed=None, dtype=torch.float32, kv_memory=0.05,
        swap_space=4, distributed_executor_backend="mp", max_seq_len_to_capture=8192, limit_mm_per_prompt={},
        guided_decoding_backend="auto", max_logprobs=20, revision="main", compilation_config=None, load_format="auto",
        generation_config="vllm",
    ) as one:  # fmt: skip
        assert (one.config.eager, one.config.memory_fraction, one.config.dtype) == (True, 0.5, "float32")
        assert one.config.generation_config == "none"


def test_logprobs_are_the_mapping_of_vllm(llm):
    params = dataclasses.replace(SHORT, temperature=1.0, seed=1, logprobs=2, prompt_logprobs=1)
    output = llm.generate("abc", params)[0]
    for token, found in zip(output.token_ids, output.outputs[0].logprobs, strict=True):
        assert list(found) == [token, *(one for one in found.top if one != token)]
        assert (len(found), token in found, -1 in found) == (len(found.keys()), True, False)
        assert found[token].logprob == found.logprob
        for id, entry in found.items():
            assert entry.decoded_token == llm.tokenizer.token_text(id)
            assert entry.rank == (list(found.top).index(id) + 1 if id in found.top else None)
            assert id == token or entry.logprob == found.top[id]
        copied = pickle.loads(pickle.dumps(found))
        assert (copied, copied[token].decoded_token) == (found, None)
        assert dataclasses.asdict(found)["top"] == found.top
    assert output.prompt_logprobs[0] is None
    assert next(iter(output.prompt_logprobs[1].values())).decoded_token == "b"
    with pytest.raises(KeyError):
        found[-1]


def test_max_tokens_none_fills_the_context(llm):
    output = llm.generate("abc", SamplingParams(max_tokens=None, min_tokens=2, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) + len(output.token_ids) == llm.max_model_len
    assert output.finish_reason == "length"


def test_variables_of_the_chat_template(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer.hf, "chat_template", "{{ messages[0].content }}{% if think %}!{% endif %}")
    for variables, expected in [(None, "abc"), ({}, "abc"), ({"think": True}, "abc!"), ({"think": False}, "abc")]:
        output = llm.chat("abc", SHORT, chat_template_kwargs=variables)[0]
        assert llm.tokenizer.decode(output.prompt_token_ids) == expected
    for wrong, message in [
        ({"tokenize": True}, "chat_template_kwargs has 'tokenize', which is not a variable"),
        ({"chat_template": "x"}, "chat_template_kwargs has 'chat_template', which is not a variable"),
        ({"messages": []}, "chat_template_kwargs has 'messages', which is not a variable"),
        ([], "chat_template_kwargs is .*; give a dict"),
    ]:
        with pytest.raises(YalisError, match=message):
            llm.chat("abc", SHORT, chat_template_kwargs=wrong)


def test_names_of_vllm_that_do_not_exist(llm):
    assert llm.get_default_sampling_params() == llm.default_sampling_params()
    output = llm.generate("abc", SHORT)[0]
    assert output.num_cached_tokens == output.metrics.cached_tokens
    with pytest.raises(AttributeError, match="LLM has no 'beam_search': beam search is not supported; give"):
        llm.beam_search(["abc"], None)
    with pytest.raises(AttributeError, match=r"LLM has no 'llm_engine': .* the LLM itself has max_model_len"):
        _ = llm.llm_engine.model_config
    assert not hasattr(llm, "encode")
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'foo'"):
        _ = llm.foo
    with pytest.raises(ImportError, match=r'yalis has no TokensPrompt; give {"prompt_token_ids": ids}'):
        from yalis import TokensPrompt  # noqa: F401
    with pytest.raises(ImportError, match="yalis has no sampling_params; type `from yalis import SamplingParams`"):
        _ = yalis.sampling_params


@pytest.mark.parametrize("name", ["bf16", "half", "fp16", "float", "fp32", "torch.bfloat16"])
def test_short_names_of_dtypes(name):
    wanted = {"b": "bfloat16", "h": "float16", "f": "float32"}[name.removeprefix("torch.")[0]]
    assert EngineConfig(dtype=name).dtype == ("float16" if name == "fp16" else wanted)


def test_the_help_explains_every_sampling_field():
    for field in dataclasses.fields(SamplingParams):
        assert f"\n    {field.name}: " in SamplingParams.__doc__


def test_a_missing_torch_is_named():
    code = "import sys; sys.modules['torch'] = None\ntry: from yalis import LLM\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "yalis.LLM needs torch, which is not installed; type `pip install torch`\n"


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
        ([{"role": "usr", "content": "a"}], "message 1 has the role 'usr', .*; accepted: user, assistant, system, dev"),
        (3, "the conversation is of type int; give a string, or a list of"),
    ]:
        with pytest.raises(YalisError, match=sentence):
            llm.chat(wrong, SHORT)
