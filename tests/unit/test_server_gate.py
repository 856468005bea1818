"""Who may use a server: API keys, host and origin headers, sizes, request ids, and what is logged."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import RunningServer, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, YalisError
from yalis.server import lifecycle
from yalis.server.config import ServeConfig
from yalis.server.connection import MAX_HEADERS, MAX_PIPELINED
from yalis.server.keys import ApiKeys, read_keys

KEY = "0123456789abcdef-secret"
BODY = {"prompt": "hello", "max_tokens": 2}
AUTHORIZATION = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=2048)
    with LLM(str(folder), threads=1, kv_memory=0.05, max_num_seqs=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"# mine\n{KEY}\n\n{'x' * 40}\n")
    settings: dict[str, Any] = {"api_key_file": str(keys), "cors_origin": ("https://page.example",)}
    with running_server(llm, **settings, max_body=0.001, max_queue=1, timeout=1.0) as running:
        yield running


@pytest.mark.parametrize("value", ["", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \xff"])
def test_a_wrong_key_is_refused(server: RunningServer, value: str) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
        response = httpx.get(server.url + path, headers={"authorization": value.encode("latin-1")} if value else {})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
    assert server.get("/health", authorization="").status_code == 200


def test_each_key_is_accepted(server: RunningServer) -> None:
    for key in (KEY, "x" * 40):
        assert server.get("/v1/models", authorization=f"bearer {key}").status_code == 200


def test_without_keys_everybody_is_accepted() -> None:
    assert ApiKeys([]).accept(None)


def test_a_key_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    file.chmod(0o644)
    with pytest.raises(YalisError, match="can be read by other users; give a file of your own with mode 0600"):
        read_keys(str(file))
    file.chmod(0o602)
    with pytest.raises(YalisError, match="can be written by other users"):
        read_keys(str(file))
    file.chmod(0o600)
    assert read_keys(str(file)).accept(f"Bearer {KEY}".encode())
    for text, message in (("", "has no API key"), ("short", "is not usable"), ("a" * 20 + " b", "is not usable")):
        file.write_text(text)
        with pytest.raises(YalisError, match=message) as raised:
            read_keys(str(file))
        assert not text or text not in str(raised.value)
    with pytest.raises(YalisError, match="cannot read"):
        read_keys(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "[::2]", ""]
)
def test_names_that_a_page_could_point_here_are_refused(server: RunningServer, host: str) -> None:
    response = server.get("/health", host=host)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:80", "LOCALHOST"])
def test_names_of_this_host_are_accepted(server: RunningServer, host: str) -> None:
    assert server.get("/health", host=host).status_code == 200


def test_pages_of_other_sites_are_refused(server: RunningServer) -> None:
    assert server.get("/health", origin="https://evil.example").json()["error"]["code"] == "wrong_origin"
    assert server.get("/health", origin="null").status_code == 403
    assert server.get("/health", origin=server.url).status_code == 200  # the chat page
    allowed = server.get("/health", origin="https://page.example")
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    preflight = httpx.options(
        f"{server.url}/v1/completions",
        headers={
            "origin": "https://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert "access-control-allow-origin" not in server.get("/health", origin="https://evil.example").headers


def test_idle_connections_make_room_for_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones that have waited longest are closed; those with a request are not."""
    monkeypatch.setattr(lifecycle, "_connection_limit", lambda: 20)
    with running_server(llm) as plain, contextlib.ExitStack() as opened:
        long = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        stream = opened.enter_context(httpx.stream("POST", f"{plain.url}/v1/completions", json=long, timeout=60))
        lines = stream.iter_lines()
        next(lines)
        idle = [opened.enter_context(connect(plain)) for _ in range(60)]
        assert all(plain.get("/health").status_code == 200 for _ in range(3))
        assert idle[0].recv(1) == b""
        assert len(plain.state.async_llm._open) == 1
        assert list(lines)[-2] == "data: [DONE]"


def test_without_cors_no_page_of_another_site_is_allowed(llm: LLM) -> None:
    with running_server(llm) as plain:
        response = plain.get("/health", origin="https://page.example")
        assert response.status_code == 403
        assert not any(name.startswith("access-control") for name in response.headers)


def test_a_body_that_is_too_large_is_refused(server: RunningServer) -> None:
    large = b'{"prompt": "' + b"x" * 2000 + b'"}'
    response = server.post("/v1/completions", large, **AUTHORIZATION)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    chunked = httpx.post(  # does not announce its length
        f"{server.url}/v1/completions",
        content=iter([large[:500], large[500:]]),
        headers={"content-type": "application/json", **AUTHORIZATION},
    )
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large")


def test_request_ids_and_logs(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="yalis"):
        logging.getLogger("yalis").propagate = True
        body = {"prompt": "a secret prompt", "max_tokens": 1}
        given = server.post("/v1/completions", body, **AUTHORIZATION, **{"x-request-id": "job-17/a"})
        made = server.post("/v1/completions", body, **AUTHORIZATION, **{"x-request-id": "two words"})
        wait_until(lambda: made.headers["x-request-id"] in caplog.text)  # written after the answer is sent
    assert given.headers["x-request-id"] == "job-17/a"
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])
    text = caplog.text
    assert "job-17/a POST /v1/completions 200" in text
    assert "secret" not in text
    assert "two words" not in text


def test_a_full_queue_is_429(server: RunningServer) -> None:
    """Two completions run and one waits."""
    long = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.Client(headers={"content-type": "application/json", **AUTHORIZATION}, timeout=30) as client:
        streams = [client.stream("POST", f"{server.url}/v1/completions", json=long) for _ in range(3)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = server.post("/v1/completions", BODY, **AUTHORIZATION)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for stream in streams:
            stream.__exit__(None, None, None)
    wait_until(lambda: server.state.async_llm.num_open == 0)
    assert server.post("/v1/completions", BODY, **AUTHORIZATION).status_code == 200
    wait_until(lambda: server.blocks_in_use() == 0)


def wait_until(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(server: RunningServer) -> socket.socket:
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port or 0))
    connection.settimeout(60)
    return connection


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        HEAD,
        HEAD + f"Authorization: Bearer {KEY}\r\n".encode() + b"Content-Length: 500\r\n\r\n" + b'{"prompt":',
    ],
    ids=["nothing", "line", "headers", "body"],
)
def test_a_slow_client_is_disconnected(server: RunningServer, sent: bytes) -> None:
    """The time limit of this server is one second."""
    with connect(server) as connection:
        connection.sendall(sent)
        begin = time.monotonic()
        with pytest.raises(ConnectionResetError):
            raise ConnectionResetError if connection.recv(1) == b"" else AssertionError
        assert time.monotonic() - begin > 0.9  # at most `settimeout` above


def test_a_client_that_stops_reading_is_disconnected(server: RunningServer) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1900, "ignore_eos": true, "stream": true, "logprobs": 20}'
    request = HEAD + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    url = httpx.URL(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.host, url.port))
        connection.sendall(request)
        wait_until(lambda: server.state.async_llm.num_open == 1)
        wait_until(lambda: server.state.async_llm.num_open == 0)
        wait_until(lambda: server.blocks_in_use() == 0)
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
        assert b"[DONE]" not in received


def exchange(server: RunningServer, content: bytes, answers: int = 1) -> bytes:
    """Send bytes as they are, and return what comes back: until so many heads of answers, or the end."""
    received = b""
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(content)
        while received.count(b"HTTP/1.1 ") < answers or not received.endswith((b"}", b"0\r\n\r\n", b"received.")):
            chunk = connection.recv(1 << 16)
            if not chunk:
                break
            received += chunk
    return received


KEY_HEADER = f"Authorization: Bearer {KEY}\r\n".encode()


@pytest.mark.parametrize("extra", [b"Host: evil.example", b"Origin: http://localhost", b"Authorization: Bearer x"])
def test_a_header_that_is_checked_may_be_there_once(server: RunningServer, extra: bytes) -> None:
    """A proxy might check the first one, and this server the other."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n" + KEY_HEADER
    assert exchange(server, head + b"\r\n").startswith(b"HTTP/1.1 200")
    for content in (head + extra + b"\r\n\r\n", head.replace(b"Host", extra + b"\r\nHost") + b"\r\n"):
        answer = exchange(server, content)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"wrong_header" in answer


def test_a_malformed_origin_is_refused(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    for origin in ("http://[::1", "", "://", "http://", "\xff"):
        response = httpx.get(f"{server.url}/health", headers={"origin": origin.encode("latin-1")})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "wrong_origin")
    assert "internal error" not in caplog.text


@pytest.mark.parametrize("cut", [None, 40, -20])
def test_a_client_that_would_rather_speak_http2_is_answered(server: RunningServer, cut: int | None) -> None:
    """As that of Java asks for it, and curl --http2."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "ignore_eos": True}).encode()
    content = HEAD + KEY_HEADER + upgrade + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(server) as connection:
        for _ in range(2):  # and the connection stays open
            connection.sendall(content[:cut])
            if cut is not None:
                time.sleep(0.05)
                connection.sendall(content[cut:])
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200"), received
            assert json.loads(received.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def test_trailers_are_no_headers(server: RunningServer) -> None:
    """They come after the body, and would replace what a proxy has checked."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n"
    body = b"1f\r\n" + b'{"prompt": "a", "max_tokens": 1}'[:31] + b"\r\n1\r\n}\r\n0\r\n"
    assert exchange(server, chunked + KEY_HEADER + b"\r\n" + body + b"\r\n").startswith(b"HTTP/1.1 200")
    for trailer in (KEY_HEADER, KEY_HEADER + b"Host: localhost\r\n"):
        answer = exchange(server, chunked + b"\r\n" + body + trailer + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 401"), answer


@pytest.mark.parametrize(
    "content",
    [
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Content-Length: -3\r\n\r\nabcd",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X-A : b\r\n\r\n",
        HEAD + b"X-A: b\0c\r\n\r\n",
        HEAD + b" folded\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n\x16\x03\x01",
        b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=range(14),
)
def test_what_is_no_request_is_refused(server: RunningServer, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Also what two servers could read in two ways (request smuggling)."""
    answer = exchange(server, content)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "internal error" not in caplog.text


def test_pipelined_requests_are_answered_in_order_and_bounded(server: RunningServer) -> None:
    one = b"GET /v1/models/%d HTTP/1.1\r\nHost: localhost\r\n" + KEY_HEADER + b"\r\n"
    answer = exchange(server, b"".join(one % number for number in range(20)), answers=20)
    assert [int(found) for found in re.findall(rb"the model '(\d+)' is", answer)] == list(range(20))
    flood = exchange(server, one % 1 * 2000, answers=2000)
    assert flood.count(b"HTTP/1.1 ") < 2 * MAX_PIPELINED
    assert server.get("/health").status_code == 200


def test_headers_without_end_are_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"X-Long: " + b"x" * (MAX_HEADERS + 1000))
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_wrong_settings_are_explained() -> None:
    for settings, message in (
        ({"port": 99999}, "port is 99999"),
        ({"max_queue": -1}, "max_queue"),
        ({"timeout": 0.0}, "timeout"),
        ({"cors_origin": ("page",)}, "cors_origin"),
        ({"host": ""}, "host is empty"),
    ):
        with pytest.raises(YalisError, match=message):
            ServeConfig(**settings)  # type: ignore[arg-type]
