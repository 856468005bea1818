"""The serving benchmark: its HTTP client, the reading of streams, loads, results and refusals."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.scripted_server import (
    END,
    HEAD,
    MODELS,
    Received,
    ScriptedServer,
    Step,
    answer,
    chunk,
    event,
    stream,
    token,
    usage,
)
from yalis.cli.main import main
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisError
from yalis.study import results
from yalis.study.serve import benchmark, ceiling
from yalis.study.serve.benchmark import ServePlan, measure
from yalis.study.serve.http import Answer, Client, Connection, HttpError, Target
from yalis.study.serve.stream import read_stream, split_events
from yalis.workloads import Workload


@pytest.fixture(autouse=True)
def no_ceiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ceiling" not in request.node.name:
        monkeypatch.setattr(benchmark, "measure_ceiling", lambda: 1e5)


def complete(request: Received, seconds: float = 0.0, first: float = 0.0) -> list[Step]:
    """Answer as a server does: the models, and a completion of max_tokens events."""
    if request.path == "/v1/models":
        return [answer(200, MODELS)]
    if request.path == "/version":
        return [answer(200, {"version": "1.2"})]
    count = request.body["max_tokens"]
    return stream([*[token()] * count, usage(len(request.body["prompt"]), count)], seconds, first)


def exchange(server: ScriptedServer, timeout: float = 5.0, times: int = 1) -> Answer:
    target = Target.parse(server.url)

    async def run() -> Answer:
        async with Client(target) as client:
            for _ in range(times):
                found = await client.send(target.encode("POST", "/x", {"max_tokens": 1, "prompt": []}), timeout)
            return found

    return asyncio.run(run())


# The client


def feed(pieces: Iterable[bytes]) -> tuple[Answer | None, Connection]:
    """Give bytes to a connection as the event loop does; None if the answer is not complete."""

    async def run() -> tuple[Answer | None, Connection]:
        connection = Connection()
        connection._transport = _NoTransport()  # type: ignore[assignment]
        waiting = asyncio.ensure_future(connection.exchange(b"", 5))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if waiting.done():
            return waiting.result(), connection
        waiting.cancel()
        return None, connection

    return asyncio.run(run())


class _NoTransport:
    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False


EVENTS = [
    token("a"),
    token("é\r\n\r\n0\r\n\r\n"),
    b": comment\r\n\r\n",
    token("end", "stop"),
    usage(3, 3),
    event(b"[DONE]"),
]


@pytest.mark.parametrize("end", [END, b"0;x=1\r\nTrailer: 1\r\n\r\n"], ids=["plain", "trailers"])
def test_an_answer_is_the_same_however_it_is_cut(end: bytes) -> None:
    whole = HEAD + b"".join(chunk(one) for one in EVENTS[:-1]) + b"E;name=value\r\ndata: [DONE]\n\n\r\n" + end
    expected = [json.loads(one[6:]) for one in EVENTS if one.startswith(b"data: {")]
    rng = random.Random(1)
    cuts = [[], *([at] for at in range(1, len(whole))), list(range(1, len(whole)))]
    cuts += [sorted(rng.sample(range(1, len(whole)), 9)) for _ in range(50)]
    for cut in cuts:
        pieces = [whole[a:b] for a, b in zip([0, *cut], [*cut, len(whole)], strict=True)]
        found, connection = feed(pieces)
        assert found is not None, cut
        data = [part for _, part in split_events(found)]
        assert [json.loads(one) for one in data[:-1]] == expected
        assert data[-1] == b"[DONE]"
        assert connection.reusable
        assert feed(pieces[:-1])[0] is None or not pieces[-1]


def test_bodies_with_a_length_and_without_one() -> None:
    with ScriptedServer(lambda _: [answer(200, {"a": 1})]) as server:
        assert json.loads(exchange(server, times=3).body) == {"a": 1}
        assert {one.connection for one in server.received} == {1}  # the connection is reused
    with ScriptedServer(lambda _: [b"HTTP/1.1 200 OK\r\n\r\nab", 0.05, b"c", None]) as server:
        assert exchange(server, times=2).body == b"abc"
        assert {one.connection for one in server.received} == {1, 2}


def test_a_connection_that_closed_while_it_was_idle_is_replaced() -> None:
    with ScriptedServer(lambda one: [answer(200, {}), *([None] if one.connection == 1 else [])]) as server:
        assert exchange(server, times=3).status == 200
        assert [one.connection for one in server.received] == [1, 2, 2]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([HEAD + chunk(token()), None], "disconnected"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", None], "disconnected"),
        ([None], "disconnected"),
        ([b"SSH-2.0-server\r\n"], "not HTTP"),
        ([HEAD + b"zz\r\n"], "not HTTP"),
        ([HEAD, 1.0], "timeout"),
    ],
)
def test_answers_that_never_complete(steps: list[Step], kind: str) -> None:
    with ScriptedServer(lambda _: steps) as server, pytest.raises(HttpError) as error:
        exchange(server, timeout=0.3)
    assert error.value.kind == kind


def test_urls() -> None:
    assert Target.parse("http://a:8000/v1/").origin == "http://a:8000"
    assert Target.parse("https://[::1]/x/v1").origin == "https://[::1]:443/x"
    head = Target.parse("http://[::1]:80", "key").encode("GET", "/v1/models")
    assert head == b"GET /v1/models HTTP/1.1\r\nHost: [::1]:80\r\nAccept: */*\r\nAuthorization: Bearer key\r\n\r\n"
    assert "key" not in repr(Target.parse("http://a", "key"))
    for bad in ("", "localhost:8000", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://u@a", "http://a?b"):
        with pytest.raises(YalisError, match="give one such as http:"):
            Target.parse(bad)


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([token(), token(), usage(1, 2), event(b"[DONE]")], "ok", ""),
        ([token(), usage(1, 1), event(b"[DONE]")], "short answer", "1 tokens instead of 2"),
        ([token(), token()], "incomplete", "without"),
        ([usage(1, 0), event(b"[DONE]")], "incomplete", "without output"),
        ([token(), event({"error": {"message": "a rank died."}})], "error event", "a rank died"),
    ],
)
def test_how_a_stream_ended(events: list[bytes], status: str, message: str) -> None:
    found = read_stream(Answer(200, [(float(time), one) for time, one in enumerate(events)]), 2)
    assert found.status == status
    assert message in found.message


def test_output_that_looks_like_the_last_event_counts() -> None:
    events = [token('"choices":[]'), token("[DONE]"), usage(1, 2, cached=1), event(b"[DONE]")]
    found = read_stream(Answer(200, [(1.0, events[0]), (2.0, events[1] + events[2] + events[3])]), 2)
    assert (found.status, found.tokens_at, found.cached_tokens) == ("ok", [1.0, 2.0], 1)


def test_the_ceiling_of_the_client_is_far_above_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "SECONDS", 0.1)
    assert ceiling.measure_ceiling() > ceiling.STREAMS * ceiling.EVENTS_PER_SECOND


# The benchmark


def run(server: ScriptedServer, *args: str) -> int:
    return main(["bench", "serve", "--url", server.url, "--workload", "4x5x3", "--vocab-size", "50", *args])


def test_latencies_errors_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted = iter(range(10**9))

    def script(request: Received) -> list[Step]:
        if request.path == "/v1/completions" and next(counted) in (5, 6):
            return [answer(429, {"error": {"message": "too many requests"}}, **{"Retry-After": "1"})]
        return complete(request, seconds=0.03, first=0.06)

    with ScriptedServer(script) as server:
        assert run(server, "--concurrency", "1,2", "--requests", "8", "--warmup", "2", "--out", str(tmp_path)) == 0
        printed = capsys.readouterr().out
        bodies = [one.body for one in server.received if one.body]
    (path,) = tmp_path.iterdir()
    result = results.read(path)
    first, second = result.rows
    assert (first["status"], first["completed"], first["errors"]) == ("ok", 6, {"429": 2})
    assert (first["prompt_tokens"], first["output_tokens"], first["events"]) == (30, 18, 18)
    assert (first["most_in_flight"], second["most_in_flight"], second["errors"]) == (1, 2, {})
    for row in result.rows:
        assert 60 <= row["first_token_ms"] <= row["first_token_ms_p99"]
        assert 30 <= row["token_ms"] <= row["token_ms_p90"] <= row["token_ms_p99"]
        assert 120 <= row["total_ms"] <= row["total_ms_p99"]
        assert 0.9 < row["tokens_per_s"] * row["seconds"] / row["output_tokens"] < 1.1
    assert second["seconds"] < first["seconds"]  # although it completed more requests
    assert result.notes == ["concurrency 1: 2 of 8 requests failed; most often 429: too many requests"]
    assert (result.parameters["model"], result.parameters["server"]) == ("tiny", "test 1.2")
    assert "Concurrency 1: 2 of 8 requests failed" in printed
    assert len(bodies) == 2 + 8 + 8
    assert len({json.dumps(body["prompt"]) for body in bodies}) == len(bodies)  # no prompt is in a prefix cache
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies)
    assert max(token for body in bodies for token in body["prompt"]) < 50
    assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "A running server, measured by a client over HTTP" in page
    assert "requests at a time" in page  # an axis of the plot
    assert main(["bench", "compare", str(path), str(path)]) == 0


def test_open_loop_requests_arrive_on_time_even_if_answers_are_late(tmp_path: Path) -> None:
    with ScriptedServer(lambda request: complete(request, first=0.5)) as server:
        assert run(server, "--rate", "40", "--requests", "12", "--warmup", "0", "--out", str(tmp_path)) == 0
    (row,) = results.read(next(tmp_path.iterdir())).rows
    assert (row["rate"], row["concurrency"], row["completed"]) == (40, None, 12)
    assert row["most_in_flight"] > 6  # all arrive within about 0.3 s, before the first answer
    assert 500 <= row["first_token_ms"] < 1000


def test_a_key_is_sent_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Received) -> list[Step]:
        if request.headers.get("authorization") != "Bearer s3cret":
            return [answer(401, {"error": {"message": "a key is needed"}})]
        return complete(request)

    key = tmp_path / "key"
    key.write_text("s3cret\nnotes\n")
    with ScriptedServer(script) as server:
        assert run(server, "--concurrency", "1") == 1
        assert "refused the request with 401 (a key is needed); give the key with --api-key-file" in _error(capsys)
        assert run(server, "--concurrency", "1", "--api-key-file", str(key), "--json") == 0
    assert "s3cret" not in capsys.readouterr().out
    for content, words in ((b"\n", "no key in its first line"), (b"\xff", "it is not text")):
        key.write_bytes(content)
        assert main(["bench", "serve", "--url", "http://a", "--rate", "1", "--api-key-file", str(key)]) == 2
        assert words in _error(capsys)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give either --rate, such as 1,2,4, or --concurrency"),
        (["--rate", "1", "--concurrency", "1"], "give either --rate"),
        (["--rate", "0"], "rate is 0"),
        (["--rate", "x"], "not a list of numbers, such as 0.5,2"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--rate", "1", "--requests", "0"], "requests is 0"),
        (["--rate", "1", "--timeout", "0"], "timeout is 0"),
        (["--rate", "1", "--trace", "a", "--workload", "1x1x1"], "exclude each other"),
        (["--rate", "1", "--trace", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_refused_commands(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", *args]) == 2
    assert words in _error(capsys)


def test_servers_that_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert main(["bench", "serve", "--url", f"http://127.0.0.1:{port}", "--rate", "1"]) == 1
    assert f"cannot get http://127.0.0.1:{port}/v1/models: connection refused; start a server" in _error(capsys)
    assert main(["bench", "serve", "--url", "http://no.such.host.invalid", "--rate", "1"]) == 1
    assert "cannot get http://no.such.host.invalid:80/v1/models" in _error(capsys)
    with ScriptedServer(lambda _: [answer(200, {"hello": 1})]) as server:
        assert run(server, "--rate", "1") == 1
        assert "returned 200 and no list of models" in _error(capsys)
    with ScriptedServer(complete) as server:
        assert run(server, "--rate", "1", "--model", "large") == 2
        assert "the server has no model 'large'; accepted: tiny" in _error(capsys)

    def refuse(request: Received) -> list[Step]:
        return [answer(400, {"error": {"message": "token id 49 is above 10."}})] if request.body else complete(request)

    with ScriptedServer(refuse) as server:
        assert run(server, "--rate", "1") == 1
        assert "refused a request with 400: token id 49 is above 10; prompts are token ids below --vocab" in _error(
            capsys
        )

    def overloaded(request: Received) -> list[Step]:
        return [answer(503, {"error": {"message": "draining"}})] if request.body else complete(request)

    with ScriptedServer(overloaded) as server:
        assert run(server, "--concurrency", "2") == 1
        out, err = capsys.readouterr()
    assert "no request succeeded; 503: draining" in out
    assert err.endswith("no point has a complete answer; the first: no request succeeded; 503: draining\n")


def test_ctrl_c_keeps_the_points_that_are_done() -> None:
    def report(text: str) -> None:
        if text.startswith("concurrency 2"):
            raise KeyboardInterrupt

    with ScriptedServer(complete) as server:
        plan = ServePlan(concurrency=(1, 2), workloads=(Workload(3, 2, 2),), warmup=0)
        with pytest.raises(Stopped, match="1 of 2 points done") as stop:
            measure(Target.parse(server.url), None, plan, "test", report)
        with pytest.raises(KeyboardInterrupt) as early:
            measure(Target.parse(server.url), None, ServePlan(concurrency=(2,), warmup=0), "test", report)
    result = stop.value.done
    assert [row["concurrency"] for row in result.rows] == [1]
    assert result.notes == ["stopped after 1 of 2 points"]
    assert not isinstance(early.value, Stopped)


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a command that failed: one line."""
    text = capsys.readouterr().err
    assert text.startswith("yalis: error: ")
    assert text.count("\n") == 1
    return text
