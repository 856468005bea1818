"""response_format and structured_outputs of the server, driven by the openai client, and of batch files and the CLI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.server import RunningServer, events, running_server
from tests.structured import save_model
from yalis import LLM
from yalis.cli.main import main
from yalis.sampling import grammar as grammar_module
from yalis.sampling.grammar import Matcher

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDINGS = {'"': 4, "}": 4, "]": 4}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    role: Literal["cook", "pilot"]
    pets: list[bool] = Field(max_length=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with LLM(str(path), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    bias = {str(server.llm.get_tokenizer().convert_tokens_to_ids(token)): bias for token, bias in ENDINGS.items()}
    messages = [{"role": "user", "content": "the"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 300, "seed": 5, "logit_bias": bias, **fields}


def test_parse_returns_a_pydantic_model(server: RunningServer) -> None:
    answers = server.openai.chat.completions.parse(**ask(server, response_format=Person, n=3)).choices
    for answer in answers:
        assert isinstance(answer.message.parsed, Person)
        assert answer.finish_reason == "stop"
    with server.openai.chat.completions.stream(**ask(server, response_format=Person)) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answers[0].message.parsed


def test_responses_parse_returns_a_pydantic_model(server: RunningServer) -> None:
    response = server.openai.responses.parse(model="tiny", input="the", text_format=Person, max_output_tokens=300)
    assert isinstance(response.output_parsed, Person)


@pytest.mark.parametrize("strict", [True, False, None])
def test_every_json_schema_is_enforced(server: RunningServer, strict: bool | None) -> None:
    described = {"name": "person", "schema": Person.model_json_schema(), "strict": strict}
    wanted: Any = {"type": "json_schema", "json_schema": described}
    answer = server.openai.chat.completions.create(**ask(server, response_format=wanted))
    Person.model_validate_json(answer.choices[0].message.content or "")


def test_json_objects_and_text(server: RunningServer) -> None:
    create = server.openai.chat.completions.create
    wanted: Any = {"type": "json_object"}
    answer = create(**ask(server, response_format=wanted))
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    free: Any = {"type": "text"}
    found = create(**ask(server, response_format=free, max_tokens=9)).choices[0].message.content
    assert found == create(**ask(server, max_tokens=9)).choices[0].message.content


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
    ],
    ids=str,
)
def test_vllms_structured_outputs(server: RunningServer, wanted: dict[str, Any], pattern: str) -> None:
    extra = {"structured_outputs": wanted}
    chat = server.openai.chat.completions.create(**ask(server, extra_body=extra))
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = server.openai.completions.create(model="tiny", prompt="the", extra_body=extra)
    assert re.fullmatch(pattern, text.choices[0].text)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "give {\"type\": \"json_schema\", \"json_schema\""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "give"),
        ({"response_format": SCHEMA}, "response_format", "response_format cannot be used: Unimplemented keys"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools", "tools cannot be used: Unimplemented keys"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs.regex cannot be used: at"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "has no argument 'regx' (did you mean regex?)"),
        ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "response_format", "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, None, "ignore_eos must be false"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_a_400(
    server: RunningServer, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = server.post("/v1/chat/completions", ask(server, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert param is None or error["param"] == param


def test_too_complex_is_not_malformed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = ask(server, structured_outputs={"regex": ".*" * 2000})
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["code"] == "grammar_too_complex"
    assert error["message"].startswith("structured_outputs.regex exceeds a limit of the compilation")
    monkeypatch.setattr(grammar_module, "_MAX_WAIT", 0.05)
    with server.llm.grammars._compiling:  # as while another thread compiles
        response = server.post("/v1/chat/completions", ask(server, structured_outputs={"regex": "waits"}))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "grammar_queue_full")
    assert int(response.headers["retry-after"]) > 0
    assert server.get("/health").status_code == 200


def test_an_answer_that_its_grammar_cannot_continue_is_incomplete(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a limit of the library is exceeded. The API has no word for it but that of max_tokens."""
    real = Matcher.next_tokens
    monkeypatch.setattr(Matcher, "next_tokens", lambda self: None if self.num_tokens == 4 else real(self))
    fields = ask(server, structured_outputs={"regex": "[a-z]{9}"})
    whole = server.post("/v1/chat/completions", fields).json()
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 4)
    chunks = events(server.post("/v1/chat/completions", {**fields, "stream": True}))
    assert [one["choices"][0]["finish_reason"] for one in chunks][-1] == "length"
    text = {"prompt": "the", "seed": 5, "structured_outputs": {"regex": "[a-z]{9}"}}
    assert server.post("/v1/completions", text).json()["choices"][0]["finish_reason"] == "length"
    chunks = events(server.post("/v1/completions", {**text, "stream": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "string", "minLength": 9}}}
    response = server.openai.responses.create(model="tiny", input="the", text=form)
    assert response.status == "incomplete"


def test_batch_files_and_the_command_line(
    path: Path, tmp_path: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    strict = {**schema, "additionalProperties": False}
    lines = [
        {"prompt": "the", "response_format": {"type": "json_schema", "json_schema": {"schema": strict}}},
        {"prompt": "the", "structured_outputs": {"choice": ["left", "right"]}},
        {"prompt": "the", "response_format": {"type": "xml"}},
    ]
    source, out, wanted = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "wanted.json"
    source.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", str(path), "--device", "cpu", "--threads", "1", "--max-tokens", "99"]
    assert main(["batch", str(source), str(out), *options]) == 0
    results = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert set(json.loads(results["line-1"]["text"])) == {"a"}
    assert results["line-2"]["text"] in ("left", "right")
    assert "response_format is" in results["line-3"]["error"]["message"]
    wanted.write_text(json.dumps({"json": strict}))
    for given in (str(wanted), wanted.read_text()):
        capsys.readouterr()
        assert main(["generate", "the", *options, "--structured-outputs", given, "--json"]) == 0
        assert set(json.loads(json.loads(capsys.readouterr().out)["text"])) == {"a"}
    for given, message in (
        ("nowhere.json", "cannot read nowhere.json (No such file or directory); give JSON or a file of it"),
        ('{"json": ', "not valid JSON"),
        ('{"regx": "a"}', "has no argument 'regx' (did you mean regex?)"),
    ):
        assert main(["generate", "the", *options, "--structured-outputs", given]) == 2
        assert message in capsys.readouterr().err
