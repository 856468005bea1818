"""What load generators and API testers from PyPI send to the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import RunningServer, events, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "prompt", "prompt_tokens"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, 3),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, 19),
    ],
)
def test_every_chunk_can_have_the_usage_so_far(
    server: RunningServer, path: str, prompt: dict[str, Any], prompt_tokens: int
) -> None:
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": options, "seed": 1}
    chunks = events(server.post(path, {**body, "return_token_ids": True}))
    tokens = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens += len(choice.get("token_ids", ()))
        expected = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        assert chunk["usage"].items() >= expected.items()
    assert tokens == 12
    plain = events(server.post(path, {**body, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)


def test_schemathesis_finds_no_error_of_the_server(server: RunningServer, tmp_path: Path) -> None:
    """Requests made from the OpenAPI description: every status is documented, and none is 500.

    It cannot know which values this model accepts, so it may not expect that all of them are.
    """
    description = server.get("/openapi.json").json()
    for schema in description["components"]["schemas"].values():
        if model := schema.get("properties", {}).get("model"):  # any other name would be a 404
            schema["properties"]["model"] = {"enum": ["tiny", *([None] if "anyOf" in model else [])]}
    (tmp_path / "openapi.json").write_text(json.dumps(description))
    options = ["--max-examples", "3", "--seed", "1", "--exclude-checks", "positive_data_acceptance", "--no-color"]
    options += [
        "--continue-on-failure",
        "--request-timeout",
        "20",
        "--generation-database",
        "none",
        "--warnings",
        "off",
    ]
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", server.url, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) > 300


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_other_content_types_are_refused(server: RunningServer, path: str) -> None:
    json_body = b'{"prompt": "a", "messages": [], "tokens": [1]}'
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a/b; é=1"):
        for body in (json_body, b"", b"\xff\x00", b"a=1&b=2", b"--x\r\n\r\n--x--"):
            response = server.post(path, body, **{"content-type": kind.encode("latin-1")})
            assert response.status_code in (400, 415), (kind, body)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for body in (b"", b"\xff", b"[", b"nan", b'{"a":' * 5000, b"1" * 10000):
        response = server.post(path, body)
        assert response.status_code == 400, body[:10]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
