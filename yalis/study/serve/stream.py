"""Reads a streamed completion after its end: when each token arrived, how many there were, and how it ended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from yalis.study.serve.http import Answer

#: The last event of a stream with usage has an empty list of choices. Inside a text its quotes would be escaped.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


@dataclass
class Completion:
    """What happened to one request. Times are seconds of time.perf_counter()."""

    status: str  # "ok", the HTTP status, or the kind of failure
    arrival: float = 0.0  # when the request was due
    tokens_at: list[float] = field(default_factory=list)  # of each event that has output
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    message: str = ""  # of an error
    has_usage: bool = True

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def read_stream(answer: Answer, expected_tokens: int) -> Completion:
    """Return the times and token counts of an answer; a status other than "ok" says why it is not one."""
    if answer.status != 200:
        return Completion(str(answer.status), message=error_message(answer.body))
    times, usage, finished = [], None, False
    for time, data in split_events(answer):
        if data == b"[DONE]":
            finished = True
        elif b'"choices"' not in data:
            return Completion("error event", message=error_message(data))
        elif _NO_CHOICES.search(data):
            usage = _load(data).get("usage")
        else:
            times.append(time)
    if not finished or not times:
        return Completion("incomplete", message="the stream ended without output or without [DONE]")
    done = Completion("ok", tokens_at=times, ended=times[-1])
    if not isinstance(usage, dict):
        done.has_usage, done.output_tokens = False, len(times)
        return done
    details = usage.get("prompt_tokens_details") or {}
    done.prompt_tokens, done.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    done.cached_tokens = details.get("cached_tokens") or 0
    if done.output_tokens != expected_tokens:
        done.status = "short answer"
        done.message = f"it has {done.output_tokens} tokens instead of {expected_tokens}"
    return done


def split_events(answer: Answer) -> list[tuple[float, bytes]]:
    """Return the data of each server-sent event, with the time at which it was complete."""
    events, rest = [], b""
    for time, part in answer.parts:
        *complete, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in complete:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:  # others are comments that keep the connection alive
                events.append((time, b"\n".join(lines)))
    return events


def error_message(body: bytes) -> str:
    """Return the message of an error in the form of OpenAI's API, or the beginning of another text."""
    data = _load(body)
    error = data.get("error", data)
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else body.decode(errors="replace")
    return " ".join(text.split())[:300].rstrip(".")


def _load(data: bytes) -> dict[str, Any]:
    try:
        loaded = json.loads(data)
    except ValueError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
