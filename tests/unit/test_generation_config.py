"""The sampling defaults of a model's generation_config.json, in Python, on the command line and in batch jobs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis.checkpoint.generation_config import find_sampling_defaults, sampling_defaults
from yalis.cli.main import main
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.types import RequestOutput, SamplingParams

ENGINE: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_blocks": 32}
FLAGS = ["--device", "cpu", "--threads", "1", "--kv-blocks", "32"]
#: Deterministic, and different from greedy decoding: a penalty below 1 favours repeated tokens.
PENALTY = {"repetition_penalty": 0.02, "max_new_tokens": 9}
NOTE = "yalis: from the model's generation_config.json: "


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def set_defaults(folder: Path, **values: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, **values}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 64},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_tokens": 64},
        ),
        # transformers' generate() samples only with do_sample
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6, "top_k": None, "max_length": 20, "num_beams": 1}, {}),
    ],
)
def test_fields_that_are_read(tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]) -> None:
    assert find_sampling_defaults(str(tmp_path)) == {}  # no file
    set_defaults(tmp_path, **content)
    assert find_sampling_defaults(str(tmp_path)) == expected
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert sampling_defaults(tmp_path / "config.json") == expected
    assert sampling_defaults(tmp_path / "model.gguf") == {}
    assert find_sampling_defaults("smollm2-135m") == {}  # a GGUF file


def test_invalid_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "does not contain a JSON object; fetch it again, or remove it"),
        ('{"do_sample": true, "top_p": 7}', r"cannot be used \(top_p is 7; .* with generation_config none"),
    ):
        path.write_text(content)
        with pytest.raises(YalisError, match=message) as error:
            sampling_defaults(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(YalisError, match="generation_config is 'other'; accepted: auto, none"):
        LLM(str(tmp_path), generation_config="other")


def test_requests_without_sampling_have_the_defaults_of_the_model(folder: Path) -> None:
    prompt, messages = [5, 6, 7], [{"role": "user", "content": "hello"}]

    def run_all(llm: LLM, *sampling: SamplingParams) -> list[list[int]]:
        request = llm.submit(prompt, *sampling)
        submitted: dict[int, RequestOutput] = {}
        while request not in submitted:
            submitted.update(llm.poll())
        streamed = [token for chunk in llm.stream([prompt], *sampling) for token in chunk.token_ids]
        outputs = [llm.generate([prompt], *sampling)[0], llm.chat(messages, *sampling)[0], submitted[request]]
        return [streamed, *(output.token_ids for output in outputs)]

    set_defaults(folder, **PENALTY)
    resolved = SamplingParams(max_tokens=9, repetition_penalty=0.02)
    with LLM(str(folder), **ENGINE) as llm:
        assert llm.default_sampling_params() == resolved
        assert llm.default_sampling_params(max_tokens=3) == SamplingParams(max_tokens=3, repetition_penalty=0.02)
        expected = run_all(llm, resolved)
        assert run_all(llm) == expected
        # Parameters that are given are complete: the model's defaults do not apply to any of their fields.
        given = run_all(llm, SamplingParams(max_tokens=9))
        assert given != expected
    with LLM(str(folder), generation_config="none", **ENGINE) as llm:
        assert llm.default_sampling_params() == SamplingParams()
        assert run_all(llm, SamplingParams(max_tokens=9)) == given
    set_defaults(folder, do_sample=True, temperature=2.0)
    with LLM(str(folder), **ENGINE) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=2.0)
        first, second = llm.generate([prompt, prompt])
        assert first.token_ids != second.token_ids  # each has its own random seed


def test_flags_replace_single_defaults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_defaults(folder, **PENALTY)

    def run(*args: str) -> tuple[list[int], str]:
        assert main([*args, "--model", str(folder), "--ignore-eos", "--json", *FLAGS]) == 0
        out, err = capsys.readouterr()
        return json.loads(out)["token_ids"], err

    tokens, note = run("generate", "abc")
    assert len(tokens) == 9
    both = f"{NOTE}max_tokens 9, repetition_penalty 0.02 (--generation-config none ignores it)\n"
    assert note.startswith(both)
    shorter, note = run("generate", "abc", "--max-tokens", "5")
    assert shorter == tokens[:5]
    assert note.startswith(f"{NOTE}repetition_penalty 0.02 (")
    greedy, note = run("generate", "abc", "--max-tokens", "5", "--repetition-penalty", "1")
    assert greedy != shorter
    assert NOTE not in note
    assert run("generate", "abc", "--max-tokens", "5", "--generation-config", "none")[0] == greedy
    answer, note = run("chat", "hello")
    assert len(answer) == 9  # not chat's own default of 512
    assert note.startswith(both)


def test_a_batch_job_is_resumed_only_with_the_same_defaults(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, greedy = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "greedy.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "abc"}, {"prompt": "abc", "repetition_penalty": 1.0, "max_tokens": 4}]
    source.write_text("".join(json.dumps({"ignore_eos": True, **row}) + "\n" for row in rows))

    def run(output: Path, *args: str) -> int:
        return main(["batch", str(source), str(output), "--model", str(folder), *FLAGS, *args])

    set_defaults(folder, **PENALTY)
    assert run(target) == 0
    assert NOTE in capsys.readouterr().err
    content = target.read_text()
    assert run(target) == 0
    assert target.read_text() == content
    assert run(greedy, "--generation-config", "none", "--max-tokens", "9") == 0

    def results(path: Path) -> dict[str, str]:
        return {row["custom_id"]: row["digest"] for row in map(json.loads, path.read_text().splitlines())}

    assert results(target)["line-1"] != results(greedy)["line-1"]
    assert results(target)["line-2"] == results(greedy)["line-2"]  # sets both fields itself
    capsys.readouterr()
    set_defaults(folder, repetition_penalty=2.0)
    assert run(target) == 2
    assert "with another sampling than line 1" in capsys.readouterr().err
    assert run(greedy, "--generation-config", "none", "--max-tokens", "9") == 0
