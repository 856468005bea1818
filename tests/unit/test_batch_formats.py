"""The formats of a batch job's results: flat, and that of the OpenAI batch API."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis.batch.formats import OpenAIFormat
from yalis.batch.input import RequestLine
from yalis.batch.job import BatchJob
from yalis.batch.output import ResultFile
from yalis.cli.main import main
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.types import Completion, Metrics, Prompt, RequestOutput, SamplingParams, TokenLogprobs

SAMPLING = {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], **SAMPLING, "n": 2, "logprobs": True, "top_logprobs": 3}
PLAIN = {"prompt": "abc", **SAMPLING, "logprobs": 2}
OPENAI = [
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "x", **CHAT}},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"model": "x", **PLAIN}},
    {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}},
]
FLAT = [{"custom_id": row["custom_id"], **row["body"]} for row in OPENAI]


class Letters:
    """A tokenizer whose token 0 is a part of a character."""

    def token_text(self, token: int) -> str:
        return "\ufffd" if token == 0 else "_abc"[token]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, max_num_seqs=4, kv_blocks=64, threads=1, prefix_reuse=False)  # equal runs: equal logprobs


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def run(source: Path, target: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    monkeypatch.setattr(llm, "close", lambda: None)  # the next job uses it again
    with BatchJob(source, target, "model", model_name="tiny", **options) as job:
        job.run(lambda: llm)
    return read(target)


def test_results_of_both_formats(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    openai, flat = save(tmp_path / "openai", OPENAI), save(tmp_path / "flat", FLAT)
    rows = run(openai, tmp_path / "1", llm, monkeypatch)  # as the input, if nothing is given
    plain = run(flat, tmp_path / "2", llm, monkeypatch)
    assert run(flat, tmp_path / "3", llm, monkeypatch, output_format="openai") == rows
    assert run(openai, tmp_path / "4", llm, monkeypatch, output_format="flat") == plain
    assert {name: row["digest"] for name, row in rows.items()} == {name: row["digest"] for name, row in plain.items()}
    assert len({row["id"] for row in rows.values()}) == 3

    chat, text = rows["chat"]["response"], rows["text"]["response"]
    assert (rows["chat"]["error"], rows["text"]["error"], chat["status_code"], text["status_code"]) == (
        None,
        None,
        200,
        200,
    )
    assert (chat["body"]["object"], text["body"]["object"]) == ("chat.completion", "text_completion")
    assert chat["body"]["model"] == "tiny"
    for name, response in (("chat", chat), ("text", text)):
        prompt, output = plain[name]["prompt_tokens"], plain[name]["output_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        assert response["body"]["usage"] == usage
    for index, choice in enumerate(chat["body"]["choices"]):
        expected = plain["chat"]["completions"][index]
        assert choice["index"] == index
        assert choice["message"] == {"role": "assistant", "content": expected["text"]}
        assert (choice["token_ids"], choice["finish_reason"]) == (expected["token_ids"], "length")
        tokens = choice["logprobs"]["content"]
        assert [one["logprob"] for one in tokens] == [one["logprob"] for one in expected["logprobs"]]
        assert [len(one["top_logprobs"]) for one in tokens] == [3] * 4
    assert len(chat["body"]["choices"]) == 2
    (choice,) = text["body"]["choices"]
    assert (choice["text"], choice["token_ids"]) == (plain["text"]["text"], plain["text"]["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == [one["logprob"] for one in plain["text"]["logprobs"]]

    bad, message = rows["bad"], plain["bad"]["error"]["message"]
    assert bad["error"] == {"code": "invalid_request_error", "message": message, "line": 3}
    assert (bad["response"]["status_code"], bad["response"]["body"]["error"]["message"]) == (400, message)


def without_logprobs(row: dict[str, Any]) -> dict[str, Any]:
    """Remove what may differ in the last bits if other requests share the step."""
    body = {name: value for name, value in row.get("body", row).items() if "logprobs" not in name}
    return {**row, "body": body} if "body" in row else body


@pytest.mark.parametrize(("format", "given"), [("flat", OPENAI), ("openai", FLAT)])
def test_a_file_keeps_its_format(
    format: str, given: list[dict[str, Any]], tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = save(tmp_path / "in", list(map(without_logprobs, given))), tmp_path / "out"
    whole = run(source, tmp_path / "whole", llm, monkeypatch, output_format=format)
    save(target, [whole["chat"], whole["bad"]])
    with target.open("ab") as file:
        file.write((tmp_path / "whole").read_bytes()[:40])  # an incomplete line
    other = "openai" if format == "flat" else "flat"
    with pytest.raises(
        YalisError, match=f"out has results in the {format} format, not {other}; omit --format, or give"
    ):
        BatchJob(source, target, "model", output_format=other)
    assert run(source, target, llm, monkeypatch) == whole  # resumed
    assert run(source, target, llm, monkeypatch, retry_errors=True) == whole
    file = ResultFile(target)
    assert (file.format, set(file.errors)) == (format, {"bad"})
    file.close()


def line(prompt: Prompt) -> RequestLine:
    return RequestLine(1, "a", prompt, SamplingParams(), "digest")


def test_log_probabilities_as_in_the_openai_api() -> None:
    tokens = [
        TokenLogprobs(1, -0.5, {2: -math.inf, 1: -0.5}),
        TokenLogprobs(0, math.nan, {}),
        TokenLogprobs(3, -2.0, {}),
    ]
    completion = Completion("a\ufffdc", [1, 0, 3], "stop", tokens, Metrics(0.1, 0.1, 0.2, 3, 0, 2))
    output = RequestOutput("p", [1, 2], [completion], [None, TokenLogprobs(2, -math.inf)])
    openai = OpenAIFormat("tiny")
    chat = openai.result(line([{"role": "user", "content": "x"}]), output, Letters())["response"]["body"]  # type: ignore[arg-type]
    best = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert chat["choices"][0]["logprobs"]["content"] == [
        {**best, "top_logprobs": [best, {"token": "b", "logprob": -9999.0, "bytes": [98]}]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
        {"token": "c", "logprob": -2.0, "bytes": [99], "top_logprobs": []},
    ]
    text = openai.result(line("x"), output, Letters())["response"]["body"]  # type: ignore[arg-type]
    assert text["choices"][0]["logprobs"] == {
        "tokens": ["a", "\ufffd", "c"],
        "token_logprobs": [-0.5, -9999.0, -2.0],
        "top_logprobs": [{"b": -9999.0, "a": -0.5}, {}, {}],
        "text_offset": [0, 1, 2],
    }
    without = OpenAIFormat("tiny").result(line([1, 2]), output, None)["response"]["body"]
    assert (without["object"], without["choices"][0]["logprobs"]["tokens"][0]) == ("text_completion", "token_id:1")
    for body in (chat, text, without):
        assert body["prompt_logprobs"] == [None, {"token_id": 2, "logprob": None, "top": {}}]
    json.dumps([chat, text, without], allow_nan=False)


def test_the_format_flag(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = save(tmp_path / "in", [{"prompt": "x", "max_tokens": 1}]), tmp_path / "out"
    command = ["batch", str(source), str(target), "--model", model, "--threads", "1", "--kv-memory", "0.1"]
    assert main([*command, "--format", "openai"]) == 0
    assert read(target)["line-1"]["response"]["body"]["model"] == model
    assert main(command) == 0  # done
    assert main([*command, "--format", "flat"]) == 2
    assert "omit --format, or give another file for the results" in capsys.readouterr().err
