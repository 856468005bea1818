"""The lines of an offline job: JSONL in, prompts with their sampling out, one at a time.

A line is an OpenAI batch request, {"custom_id": ..., "body": {"messages" or "prompt": ..., sampling fields}}, or the
same fields without the wrapping, {"prompt": ..., "max_tokens": 64}. A line that cannot be used is a BadLine, never an
exception, so the other lines go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO

from yalis.errors import YalisError
from yalis.types import Message, Prompt, SamplingParams

_SAMPLING = {f.name for f in fields(SamplingParams)}
_OTHER_NAMES = {"max_completion_tokens", "top_logprobs"}
_MEANT = _SAMPLING | _OTHER_NAMES | {"prompt", "messages"}
#: Fields that other engines take and that change nothing about the tokens here.
_HARMLESS = {"model", "user", "metadata", "stream", "stream_options", "store", "service_tier", "method", "url"}


@dataclass(frozen=True)
class GoodLine:
    number: int
    custom_id: str
    prompt: Prompt
    sampling: SamplingParams
    digest: str  # of everything its answer depends on


@dataclass(frozen=True)
class BadLine:
    number: int
    custom_id: str
    message: str
    digest: str


@dataclass(frozen=True)
class RawLine:
    """A line with its id and its object, or the reason why it has none."""

    number: int
    custom_id: str
    content: dict[str, Any] | None
    problem: str | None = None


def read_raw(file: BinaryIO) -> Iterator[RawLine]:
    """Every line that is not blank, from the start of `file`. Lines without a custom_id are called line-N."""
    file.seek(0)
    for number, raw in enumerate(file, 1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark some editors write
        if raw.strip():
            yield _open_line(number, raw)


def _open_line(number: int, raw: bytes) -> RawLine:
    fallback = f"line-{number}"
    try:
        content = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawLine(number, fallback, None, f"the line is not UTF-8 (byte {error.start + 1})")
    except (ValueError, RecursionError) as error:
        return RawLine(number, fallback, None, f"the line is not JSON: {error}")
    if not isinstance(content, dict):
        return RawLine(number, fallback, None, f"the line is a JSON {_kind(content)}; give an object with a prompt")
    custom_id = content.get("custom_id")
    if custom_id is None:
        return RawLine(number, fallback, content)
    if not isinstance(custom_id, str) or not custom_id:
        return RawLine(number, fallback, None, f"custom_id is {custom_id!r}; give a non-empty string")
    return RawLine(number, custom_id, content)


@dataclass(frozen=True)
class Wanted:
    """All that is kept of a line between the first reading and the second."""

    number: int
    digest: str


def survey(file: BinaryIO, label: str, model: str, defaults: dict[str, Any]) -> dict[str, Wanted]:
    """What every id asks for; a sentence when two lines share one."""
    wanted: dict[str, Wanted] = {}
    for raw in read_raw(file):
        line = parse(raw, model, defaults)
        first = wanted.setdefault(line.custom_id, Wanted(line.number, line.digest))
        if first.number != line.number:
            raise YalisError(
                f"lines {first.number} and {line.number} of {label} both have custom_id {line.custom_id!r}; "
                "give every line its own (a line without one is called line-N)"
            )
    return wanted


def parse(line: RawLine, model: str, defaults: dict[str, Any]) -> GoodLine | BadLine:
    """The request in a line; `defaults` are the sampling fields it does not say itself."""
    try:
        if line.content is None:
            raise YalisError(line.problem or "the line is empty")
        request = _request_fields(line.content)
        prompt = _prompt(request)
        chosen = {**defaults, **_sampling_fields(request)}
        # A seed of its own for every line, the same in every run, so that a resumed file equals an undisturbed one;
        # the job's --seed shifts them all, or equal prompts would get equal answers.
        if request.get("seed") is None:
            chosen["seed"] = line_seed(line.custom_id, chosen.get("seed"))
        sampling = SamplingParams(**chosen)
        return GoodLine(line.number, line.custom_id, prompt, sampling, _digest(model, prompt, asdict(sampling)))
    except YalisError as error:
        return BadLine(line.number, line.custom_id, str(error), _digest(model, str(error)))


def line_seed(custom_id: str, job_seed: int | None) -> int:
    text = f"{0 if job_seed is None else job_seed}:{custom_id}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _digest(*asked: Any) -> str:
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _request_fields(content: dict[str, Any]) -> dict[str, Any]:
    outer = {name: value for name, value in content.items() if name != "custom_id"}
    if "body" not in outer:
        request = outer
    else:
        request = outer.pop("body")
        if not isinstance(request, dict):
            raise YalisError(f"body is a JSON {_kind(request)}; give an object with a prompt or messages")
        for name in outer:
            if name not in _HARMLESS:
                raise YalisError(f"the line has a field {name!r} beside its body; put it inside, or take it out")
    for name, value in request.items():
        if name not in _MEANT | _HARMLESS and value is not None:
            lacks = "" if request.keys() & {"prompt", "messages"} else "the line has no prompt or messages, and "
            accepted = ", ".join(("prompt", "messages", *sorted(_SAMPLING | _OTHER_NAMES)))
            ignored = ", ".join(sorted(_HARMLESS))
            raise YalisError(
                f"{lacks}the field {name!r} is not supported; accepted: {accepted}; accepted and ignored: {ignored}"
            )
    return request


def _sampling_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The sampling fields a line gives; a null counts as not given, as in the OpenAI API."""
    given = {name: value for name, value in request.items() if name in _SAMPLING and value is not None}
    most = request.get("max_completion_tokens")
    if most is not None and given.setdefault("max_tokens", most) != most:
        raise YalisError(f"max_tokens is {given['max_tokens']!r} and max_completion_tokens {most!r}; give one of them")
    # Chat requests say `logprobs: true, top_logprobs: 5`; completion requests say `logprobs: 5`.
    beside = request.get("top_logprobs")
    if isinstance(given.get("logprobs"), bool):
        given["logprobs"] = (0 if beside is None else beside) if given["logprobs"] else None
    elif beside is not None:
        raise YalisError(f"top_logprobs is {beside!r} without logprobs; give logprobs as true beside it")
    return given


def _prompt(request: dict[str, Any]) -> Prompt:
    prompt, messages = request.get("prompt"), request.get("messages")
    if prompt is not None and messages is not None:
        raise YalisError("the line has both a prompt and messages; give one of them")
    if messages is not None:
        return _messages(messages)
    if prompt is None:
        raise YalisError('the line has no prompt; give "prompt" (a text or token ids) or "messages"')
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise YalisError("prompt is neither a text nor a list of token ids; give one prompt a line")


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise YalisError('messages is not a list with something in it; give [{"role": "user", "content": "..."}]')
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise YalisError(f'message {number} has no role; give {{"role": "user", "content": "..."}}')
    content = message.get("content")
    if isinstance(content, list):  # the API's way of mixing texts and pictures
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise YalisError(f"message {number} has a part that is not text; only text is supported")
        content = "".join(texts)
    if not isinstance(content, str):
        raise YalisError(f"message {number} has no content; give it a text")
    return {**message, "content": content}


def _kind(value: Any) -> str:
    names = {list: "list", str: "text", bool: "boolean", int: "number", float: "number", dict: "object"}
    return names.get(type(value), "null")
