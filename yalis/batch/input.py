"""Read the input of a batch job: JSONL lines become prompts with sampling parameters, one at a time.

A line is an OpenAI batch request, {"custom_id": ..., "body": {"messages" or "prompt": ..., sampling fields}}, or the
same fields without the wrapper, {"prompt": ..., "max_tokens": 64}. A line that cannot be used becomes an InvalidLine,
never an exception, so that the other lines still run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from yalis.errors import YalisError
from yalis.keywords import join_words, suggest
from yalis.messages import check_messages
from yalis.openai_api import SAMPLING_ALIASES, sampling_fields
from yalis.types import SAMPLING_FIELDS, Prompt, SamplingParams

_USED = SAMPLING_FIELDS | SAMPLING_ALIASES | {"prompt", "messages"}
#: Fields of the OpenAI API that do not affect the generated tokens here.
_IGNORED = {"model", "user", "metadata", "stream", "stream_options", "store", "service_tier", "method", "url"}


@dataclass(frozen=True)
class RequestLine:
    line_number: int
    custom_id: str
    prompt: Prompt
    sampling: SamplingParams
    digest: str  # of everything that the result depends on, as request_digest() returns it


@dataclass(frozen=True)
class InvalidLine:
    line_number: int
    custom_id: str
    message: str
    digest: str  # of the line; that of a RequestLine if the model refused it


@dataclass(frozen=True)
class RawLine:
    """A line with its id and its JSON object, or the problem that it has instead of one."""

    line_number: int
    custom_id: str
    content: dict[str, Any] | None
    raw: bytes
    problem: str | None = None


def read_raw(file: BinaryIO) -> Iterator[RawLine]:
    """Yield every non-blank line from the start of `file`. A line without a custom_id gets the id line-N."""
    file.seek(0)
    for line_number, raw in enumerate(file, 1):
        if line_number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark some editors write
        if raw.strip():
            yield _decode_line(line_number, raw)


def _decode_line(line_number: int, raw: bytes) -> RawLine:
    fallback = f"line-{line_number}"
    try:
        content = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawLine(line_number, fallback, None, raw, f"the line is not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        expected = 'each line must be one JSON object, such as {"prompt": "..."}'
        return RawLine(line_number, fallback, None, raw, f"column {error.colno}: {error.msg}; {expected}")
    except (ValueError, RecursionError) as error:
        return RawLine(line_number, fallback, None, raw, f"the line is not JSON: {error}")
    if not isinstance(content, dict):
        return RawLine(
            line_number, fallback, None, raw, f"the line is a JSON {_json_type(content)}; give an object with a prompt"
        )
    custom_id = content.get("custom_id")
    if custom_id is None:
        return RawLine(line_number, fallback, content, raw)
    if not isinstance(custom_id, str) or not custom_id:
        return RawLine(line_number, fallback, None, raw, f"custom_id is {custom_id!r}; give a non-empty string")
    return RawLine(line_number, custom_id, content, raw)


def is_openai_input(file: BinaryIO) -> bool:
    """Return whether the first line that is a JSON object has a body, as in the OpenAI batch format."""
    first = next((raw.content for raw in read_raw(file) if raw.content is not None), {})
    return "body" in first


@dataclass(frozen=True)
class LineKey:
    """What is kept of a line between the first pass over the input and the second."""

    line_number: int
    digest: str
    valid: bool

    @classmethod
    def of(cls, line: RequestLine | InvalidLine) -> LineKey:
        return cls(line.line_number, line.digest, isinstance(line, RequestLine))


def index_lines(file: BinaryIO, label: str, model: str, defaults: dict[str, Any]) -> dict[str, LineKey]:
    """Return the key of every line by its id; raise YalisError if two lines have the same id."""
    lines: dict[str, LineKey] = {}
    for raw in read_raw(file):
        line = parse(raw, model, defaults)
        first = lines.setdefault(line.custom_id, LineKey.of(line))
        if first.line_number != line.line_number:
            raise YalisError(
                f"lines {first.line_number} and {line.line_number} of {label} both have custom_id {line.custom_id!r}; "
                "give every line its own (a line without one is called line-N)"
            )
    return lines


def parse(line: RawLine, model: str, defaults: dict[str, Any]) -> RequestLine | InvalidLine:
    """Return the request of a line; `defaults` are sampling fields for lines that do not set them."""
    try:
        if line.content is None:
            raise YalisError(line.problem or "the line is empty")
        request = _request_fields(line.content)
        prompt = _prompt(request)
        chosen = {**defaults, **sampling_fields(request)}
        # Each line has its own seed, derived from its id, so that equal prompts get different answers and a resumed
        # job gets the same answers as one that was not interrupted. --seed changes the seeds of all lines.
        if request.get("seed") is None:
            chosen["seed"] = line_seed(line.custom_id, chosen.get("seed"))
        sampling = SamplingParams(**chosen)
        digest = request_digest(model, prompt, sampling)
        return RequestLine(line.line_number, line.custom_id, prompt, sampling, digest)
    except YalisError as error:
        digest = hashlib.sha256(line.raw.strip()).hexdigest()[:16]
        return InvalidLine(line.line_number, line.custom_id, str(error), digest)


def line_seed(custom_id: str, job_seed: int | None) -> int:
    text = f"{0 if job_seed is None else job_seed}:{custom_id}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def request_digest(model: str, prompt: Prompt, sampling: SamplingParams) -> str:
    """Return a digest of the request, a dash, and four digits for each of its _PARTS."""
    parts = (model, prompt, sampling.identity())
    return f"{_digest(*parts)}-{''.join(_digest(part)[:4] for part in parts)}"


_PARTS = ("model/dtype", "prompt", "sampling")


def same_request(digest: str, other: str | None) -> bool:
    """Compare two digests. Those of earlier versions end before the dash."""
    return other is not None and digest.partition("-")[0] == other.partition("-")[0]


def differing_parts(digest: str, other: str | None) -> str:
    """Return which parts of two requests differ, such as "prompt or sampling"; all of them if a digest has no parts."""
    parts, others = digest.partition("-")[2], (other or "").partition("-")[2]
    pairs = [(parts[start : start + 4], others[start : start + 4]) for start in range(0, 4 * len(_PARTS), 4)]
    names = [name for name, (one, two) in zip(_PARTS, pairs, strict=True) if one != two or not one]
    return join_words(names or _PARTS, "or")


def is_earlier_error_digest(digest: str | None, model: str, message: str) -> bool:
    """Return whether this is the digest that earlier versions wrote for an invalid line with this error message."""
    return digest == _digest(model, message)


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _request_fields(content: dict[str, Any]) -> dict[str, Any]:
    outer = {name: value for name, value in content.items() if name != "custom_id"}
    if "body" not in outer:
        request = outer
    else:
        request = outer.pop("body")
        if outer.get("url") == "/v1/embeddings":
            raise YalisError("/v1/embeddings is not supported; accepted: /v1/chat/completions and /v1/completions")
        if not isinstance(request, dict):
            raise YalisError(f"body is a JSON {_json_type(request)}; give an object with a prompt or messages")
        for name in outer:
            if name not in _IGNORED:
                raise YalisError(f"the line has a field {name!r} next to its body; move it into the body, or remove it")
    for name, value in request.items():
        if name not in _USED | _IGNORED and value is not None:
            no_prompt = "" if request.keys() & {"prompt", "messages"} else "the line has no prompt or messages, and "
            accepted = ("prompt", "messages", *sorted(SAMPLING_FIELDS | SAMPLING_ALIASES))
            all_fields = f"; accepted: {', '.join(accepted)}; accepted and ignored: {', '.join(sorted(_IGNORED))}"
            raise YalisError(f"{no_prompt}the field {name!r} is not supported{suggest(name, accepted) or all_fields}")
    return request


def _prompt(request: dict[str, Any]) -> Prompt:
    prompt, messages = request.get("prompt"), request.get("messages")
    if prompt is not None and messages is not None:
        raise YalisError("the line has both a prompt and messages; give one of them")
    if messages is not None:
        return check_messages(messages)
    if prompt is None:
        raise YalisError('the line has no prompt; give "prompt" (a text or token ids) or "messages"')
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    raise YalisError("prompt is neither a text nor a list of token ids; give one prompt a line")


def _json_type(value: Any) -> str:
    names = {list: "list", str: "text", bool: "boolean", int: "number", float: "number", dict: "object"}
    return names.get(type(value), "null")
