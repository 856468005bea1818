"""`yalis generate` and `yalis chat` on a tiny model, in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.terminal import Terminal
from tests.tiny_chat import save_tiny_chat
from yalis.cli.main import main
from yalis.engine.llm import LLM
from yalis.engine.progress import Progress
from yalis.types import SamplingParams

SMALL = ["--threads", "1", "--kv-memory", "0.1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=32768))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """The outputs of LLM.chat and LLM.generate for the same prompts."""
    with LLM(model, threads=1, kv_memory=0.1) as llm:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        turns: list[dict[str, str]] = [{"role": "system", "content": "s"}]
        answers = []
        for text in ("Hello", "again"):
            turns.append({"role": "user", "content": text})
            answers.append(llm.chat(turns, sampling)[0].text)
            turns.append({"role": "assistant", "content": answers[-1]})
        first, second, ids = llm.generate(["abc", "x y", [5, 6, 7]], sampling)
        return {"abc": first, "x y": second, "ids": ids, "answers": answers}


def test_generate_prints_the_completion(
    model: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "abc", "--model", model, "--max-tokens", "6", "--ignore-eos", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out == expected["abc"].text + "\n"
    assert err.startswith("yalis: 6 tokens in ")
    assert err.endswith(" tokens/s\n")


def test_a_full_context_is_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model, "--ignore-eos", "--max-model-len", "8", *SMALL]
    assert main(["generate", "--prompt-ids", "5,6,7", "--prompt-ids", "7,6", "--max-tokens", "9", *words]) == 0
    assert "yalis: the context of 8 tokens ended 2 answers before --max-tokens 9\n" in capsys.readouterr().err
    with LLM(model, threads=1, kv_memory=0.1, max_model_len=8) as llm:
        seen: list[Progress] = []
        llm.generate([[5, 6, 7], [7, 6]], SamplingParams(max_tokens=9, n=2, ignore_eos=True), progress=seen.append)
        assert (seen[-1].output_tokens, {one.max_output_tokens for one in seen}) == (22, {22})
    assert main(["generate", "--prompt-ids", "5,6,7", "--max-tokens", "5", *words]) == 0  # exactly as many as fit
    assert "the context" not in capsys.readouterr().err


def test_a_context_that_the_kv_cache_reduces_is_reported_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--prompt-ids", "5,6,7", "--model", model, "--max-tokens", "2", "--threads", "1"]
    assert main([*words, "--kv-memory", "0.001"]) == 0
    notice, speed = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"yalis: the model supports 32768 tokens in a sequence, but the KV cache holds (\d+), so prompt and completion "
        r"end there; give a larger --kv-memory, or --max-model-len \1 to accept this",
        notice,
    )
    assert speed.startswith("yalis: 2 tokens in ")
    assert main([*words, "--kv-memory", "0.001", "--max-model-len", "64"]) == 0
    assert capsys.readouterr().err.startswith("yalis: 2 tokens in ")


def test_generate_with_several_prompts(
    model: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x y\n"))  # without the newline that ends the file
    words = [
        "generate",
        "abc",
        "-",
        "--prompt-ids",
        "5,6,7",
        "--model",
        model,
        "--max-tokens",
        "6",
        "--ignore-eos",
        *SMALL,
    ]
    assert main(words) == 0
    texts = {name: expected[name].text for name in ("abc", "x y", "ids")}
    output = f"[1] abc\n{texts['abc']}\n\n[2] x y\n{texts['x y']}\n\n[3] 5 6 7\n{texts['ids']}\n\n"
    assert capsys.readouterr().out == output
    monkeypatch.setattr(sys, "stdin", io.StringIO("x y"))
    assert main([*words, "--json", "--logprobs", "1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["abc", "x y", [5, 6, 7]]
    assert [row["token_ids"] for row in rows] == [expected[name].token_ids for name in ("abc", "x y", "ids")]
    assert all(len(row["logprobs"]) == row["output_tokens"] == 6 and row["metrics"]["total"] > 0 for row in rows)


def test_generate_scores_a_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "generate",
        "--prompt-ids",
        "5,6,7",
        "--model",
        model,
        "--prompt-logprobs",
        "0",
        "--max-tokens",
        "0",
        *SMALL,
    ]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["token_ids"], row["finish_reason"], row["output_tokens"]) == ([], "length", 0)
    first, *others = row["prompt_logprobs"]
    assert first is None
    assert [(one["token_id"], one["top"]) for one in others] == [(6, {}), (7, {})]
    assert all(one["logprob"] < 0 for one in others)
    assert main(words) == 2
    assert "add --json" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_log_probabilities_need_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "abc", "--model", "/no/such/folder", "--logprobs", "2"]) == 2
    assert capsys.readouterr().err == "yalis: error: --logprobs prints nothing without --json; add --json\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty"),
        (["--prompt-ids", "1,99999"], "token id 99999 is not in this model's vocabulary"),
        (["x" * 40_000], "40000 tokens"),
        (["a\udcff"], "the text contains \\udcff, half a character or a byte that is not UTF-8"),
        (["x", "--device", "cuda:77"], "device 'cuda:77' is not available"),
        (["x", "--attention", "magic"], "unknown attention backend 'magic'"),
        (["x", "--tokenizer", "/no/such"], "tokenizer: there is no '/no/such'"),
    ],
)
def test_generate_refuses_invalid_arguments(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments, "--model", model, *SMALL]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_chat_with_one_message_and_from_a_pipe(
    model: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--system", "s", "--model", model, "--max-tokens", "6", "--ignore-eos", *SMALL]
    assert main(["chat", "Hello", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == expected["answers"][0] + "\n"
    assert err.startswith("yalis: 6 tokens in ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nagain\n"))  # the second answer sees the first
    assert main(["chat", "--json", *flags]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert err.count('yalis: each line is a message of its own; `yalis chat "$(cat FILE)"` sends a file as one') == 1
    assert [row["content"] for row in rows] == expected["answers"]
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert main(["chat", "Hello", "--json", "--logprobs", "2", *flags]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["role"], row["content"]) == ("assistant", expected["answers"][0])
    assert [one["token_id"] for one in row["logprobs"]] == row["token_ids"]
    assert {len(one["top"]) for one in row["logprobs"]} == {2}


def test_a_model_without_a_tokenizer_prints_token_ids(
    model: str, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(model).iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    words = ["generate", "--prompt-ids", "5,6,7", "--model", str(tmp_path), "--max-tokens", "6", "--ignore-eos"]
    assert main([*words, *SMALL]) == 0
    ids = " ".join(map(str, expected["ids"].token_ids))
    assert capsys.readouterr().out == f"{ids}\n"
    terminal = Terminal([sys.executable, "-m", "yalis", *words, *SMALL])
    try:
        assert terminal.wait_for(b"\r\n").decode() == f"\r\x1b[Kloading the model\r\x1b[K{ids}\r\n"
    finally:
        terminal.process.wait(30)
        os.close(terminal.master)


def test_chat_commands_from_a_pipe(
    model: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--system", "s", "--model", model, "--max-tokens", "6", "--ignore-eos", *SMALL]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/reset\n/help\nHello\n /exit\nnever\n"))
    assert main(["chat", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{expected['answers'][0]}\n" * 2
    assert printed.err.count("yalis: /reset clears the conversation, Ctrl-C stops an answer, /exit or ") == 1
    assert printed.err.count("yalis: the conversation is empty\n") == 1
    assert main(["chat", "/help", *flags]) == 0  # not sent to the model as a message
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("/help prints this line")) == ("", 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert main(["chat", *flags]) == 2
    assert "error: standard input ended without a message; give one" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(" /dance\n/dance now\n"))
    assert main(["chat", *flags]) == 2
    assert "unknown command '/dance'; accepted: /reset, /exit, /help" in capsys.readouterr().err


def test_a_conversation_that_outgrows_the_context(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", model, "--max-tokens", "2", "--max-model-len", "128", *SMALL]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'a' * 50}\n{'b' * 50}\n"))
    assert main(["chat", *flags]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert "the conversation has grown to " in err
    assert "/reset clears it" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a\n{'b' * 500}\n"))  # too long even without the earlier messages
    assert main(["chat", *flags]) == 2
    assert "the prompt has " in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_missing_from_the_encoding_are_escaped(model: str, expected: dict[str, Any], encoding: str) -> None:
    flags = ["--system", "s", "--model", model, "--max-tokens", "6", "--ignore-eos", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "yalis", "chat", "Hello", *flags],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    text = expected["answers"][0]
    assert not text.isascii()
    assert done.stdout == text.encode(encoding, "backslashreplace") + b"\n"


@pytest.mark.parametrize("words", [["generate", "-"], ["chat"]])
def test_input_that_is_not_utf8_is_refused(model: str, words: list[str]) -> None:
    command = [sys.executable, "-m", "yalis", *words, "--model", model, *SMALL]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, input=b"a\xff\n", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert b"the text contains \\udcff, half a character or a byte that is not UTF-8" in done.stderr


def test_chat_on_a_terminal(model: str) -> None:
    command = [sys.executable, "-m", "yalis", "chat", "--model", model, "--max-tokens", "30000", "--ignore-eos", *SMALL]
    terminal = Terminal(command)
    try:
        assert terminal.wait_for(b"> ").startswith(b"\r\x1b[Kloading the model\r\x1b[Kyalis: type a message;")
        terminal.type(b"Hello\n")
        time.sleep(1.0)
        terminal.type(b"\x03")  # stops the answer long before 30000 tokens
        output = terminal.wait_for(b"tokens/s")
        assert int(output.rsplit(b"yalis: ", 1)[1].split()[0]) < 29_000
        terminal.wait_for(b"> ")
        terminal.type(b"Again\n")  # the next message is answered normally
        time.sleep(1.0)
        terminal.type(b"\x03")
        output = terminal.wait_for(b"tokens/s")
        assert 0 < int(output.rsplit(b"yalis: ", 1)[1].split()[0]) < 29_000
        terminal.wait_for(b"> ")
        time.sleep(0.5)  # input() misses a Ctrl-C that arrives with the prompt
        terminal.type(b"\x03")  # nothing to stop
        terminal.wait_for(b"> ")
        terminal.type(b"/dance\n")
        terminal.wait_for(b"unknown command '/dance'; accepted: /reset, /exit, /help")
        terminal.wait_for(b"> ")
        terminal.type(b"/reset\n")
        terminal.wait_for(b"> ")
        for _ in range(60):  # input() misses a Ctrl-D that arrives before it reads
            terminal.type(b"\x04")  # end of input exits
            with contextlib.suppress(subprocess.TimeoutExpired):
                terminal.process.wait(0.5)
                break
        assert terminal.process.returncode == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_progress_needs_a_terminal(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text('{"prompt": "abc", "max_tokens": 3, "ignore_eos": true}\n' * 5)
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", model, "--json", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "\r" not in err
    assert err.count("\n") == 1
    assert json.loads(out)["results"] == 5
    (tmp_path / "out").unlink()
    terminal = Terminal(
        [sys.executable, "-m", "yalis", "batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", model, *SMALL]
    )
    try:
        output = terminal.wait_for(b"holds all 5 results")
        assert b"0/5 (0%)" in output
    finally:
        terminal.process.wait(30)
        os.close(terminal.master)
