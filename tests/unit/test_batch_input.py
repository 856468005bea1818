"""Reading the lines of a batch job."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.batch.input import (
    InvalidLine,
    RequestLine,
    differing_parts,
    index_lines,
    is_earlier_error_digest,
    line_seed,
    parse,
    read_raw,
    request_digest,
    same_request,
)
from yalis.errors import YalisError
from yalis.types import SamplingParams


def lines(*rows: Any) -> io.BytesIO:
    return io.BytesIO(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))


def parse_one(row: Any, **defaults: Any) -> RequestLine | InvalidLine:
    (raw,) = read_raw(lines(row))
    return parse(raw, "model", defaults)


def good(row: Any, **defaults: Any) -> RequestLine:
    line = parse_one(row, **defaults)
    assert isinstance(line, RequestLine), line
    return line


def bad(row: Any, **defaults: Any) -> str:
    line = parse_one(row, **defaults)
    assert isinstance(line, InvalidLine), line
    return line.message


def test_openai_line() -> None:
    line = good(
        {
            "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "x", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 7,
                     "temperature": 1, "top_p": 0.5, "stop": "END", "logprobs": True, "top_logprobs": 2,
                     "seed": 3, "n": 2, "user": "me", "stream": False, "frequency_penalty": None},
        }
    )  # fmt: skip
    assert (line.custom_id, line.prompt) == ("a", [{"role": "user", "content": "Hi"}])
    s = line.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.stop, s.logprobs, s.seed, s.n) == (7, 1, 0.5, ("END",), 2, 3, 2)


def test_plain_line_and_defaults() -> None:
    line = good({"prompt": "Hi", "max_tokens": 5}, max_tokens=9, temperature=0.5)
    assert (line.custom_id, line.prompt) == ("line-1", "Hi")
    assert (line.sampling.max_tokens, line.sampling.temperature) == (5, 0.5)
    assert good({"prompt": [1, 2, 3]}).prompt == [1, 2, 3]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert good({"messages": [{"role": "user", "content": parts}]}).prompt == [{"role": "user", "content": "ab"}]


def test_logit_bias_has_strings_as_keys() -> None:
    line = good({"prompt": "Hi", "logit_bias": {"42": -100, "7": 2.5}})
    assert line.sampling.logit_bias == {42: -100.0, 7: 2.5}
    assert good({"prompt": "Hi", "logit_bias": {}}).sampling.logit_bias is None


def test_digests_are_those_of_earlier_versions() -> None:
    """Otherwise a job that an earlier version began could not be resumed."""
    line = good({"custom_id": "a", "prompt": "Hi", "max_tokens": 5, "temperature": 0.5})
    assert line.digest.startswith("fda7ef06ec134d4a-")
    assert same_request(line.digest, "fda7ef06ec134d4a")
    assert not same_request(line.digest, None)


def test_digests_have_the_parts_that_differ() -> None:
    def digest(model: str = "model", prompt: str = "x", **fields: Any) -> str:
        return request_digest(model, prompt, SamplingParams(**fields))

    assert differing_parts(digest(), digest(prompt="y")) == "prompt"
    assert differing_parts(digest(), digest("other", seed=3)) == "model/dtype or sampling"
    assert differing_parts(digest(), digest("other", "y", seed=3)) == "model/dtype, prompt or sampling"
    assert differing_parts(digest(), "fda7ef06ec134d4a") == "model/dtype, prompt or sampling"


def test_the_digest_of_an_invalid_line_is_that_of_its_bytes() -> None:
    def digest(row: Any, model: str = "model") -> str:
        (raw,) = read_raw(lines(row))
        return parse(raw, model, {}).digest

    assert digest(b'{"prompt": 3}\n') == digest(b'{"prompt": 3}\r\n', "other") != digest(b'{"prompt": 4}\n')
    assert is_earlier_error_digest(
        "3d675782a5af5d8d", "model", "prompt is neither a text nor a list of token ids; give one prompt a line"
    )


def test_logprobs_of_a_completion_request_are_a_count() -> None:
    assert good({"prompt": "x", "logprobs": 4}).sampling.logprobs == 4
    assert good({"prompt": "x", "logprobs": False}).sampling.logprobs is None
    assert good({"prompt": "x", "logprobs": True}).sampling.logprobs == 0


def test_every_line_has_its_own_reproducible_seed() -> None:
    first, again = good({"custom_id": "a", "prompt": "x"}), good({"custom_id": "a", "prompt": "x"})
    other, shifted = good({"custom_id": "b", "prompt": "x"}), good({"custom_id": "a", "prompt": "x"}, seed=1)
    assert first.sampling.seed == again.sampling.seed == line_seed("a", None) == 5690829181965289459
    assert len({first.sampling.seed, other.sampling.seed, shifted.sampling.seed}) == 3
    assert good({"custom_id": "a", "prompt": "x", "seed": 5}, seed=1).sampling.seed == 5


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (b"{not json\n", "column 2: Expecting property name enclosed in double quotes; each line must be one"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "/v1/embeddings is not supported; accepted: /v1/chat/"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        ([1], "list"),
        ({"max_tokens": 3}, "no prompt"),
        ({"body": 3}, "body is a JSON number"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "both"),
        ({"prompt": ["a", "b"]}, "neither a text nor"),
        ({"prompt": [True]}, "neither a text nor"),
        ({"messages": []}, "messages is not a list"),
        ({"messages": ["hi"]}, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "x", "top_p": 2}, "top_p is 2"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "stop": 3}, "stop is 3"),
        ({"prompt": "x", "logit_bias": [3]}, "logit_bias is [3]; give a dictionary from token ids to numbers"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "a token id of logit_bias is 'a'; give a whole number"),
        ({"prompt": "x", "logit_bias": {"3": float("nan")}}, "the logit_bias of token 3 is nan; give a finite number"),
        ({"prompt": "x", "tools": []}, "the field 'tools' is not supported; accepted: prompt, messages, "),
        ({"prompt": "x", "max_token": 3}, "the field 'max_token' is not supported (did you mean max_tokens?)"),
        ({"foo": "x"}, "the line has no prompt or messages, and the field 'foo' is not supported"),
        ({"prompt": "x", "temperature": float("inf")}, "temperature is inf; give a finite number of at least 0"),
        ({"prompt": "x", "max_tokens": 3, "max_completion_tokens": 4}, "give one of them"),
        ({"prompt": "x", "top_logprobs": 4}, "without logprobs"),
        ({"custom_id": 7, "prompt": "x"}, "custom_id is 7"),
        ({"custom_id": "a", "body": {"prompt": "x"}, "temperature": 1}, "next to its body"),
    ],
)
def test_an_invalid_line_has_a_one_line_message(row: Any, expected: str) -> None:
    message = bad(row)
    assert expected in message
    assert "\n" not in message


def test_every_field_listed_in_the_message_is_accepted() -> None:
    accepted, ignored = bad({"prompt": "x", "tools": []}).split("accepted: ", 1)[1].split("; accepted and ignored: ")
    assert {"max_completion_tokens", "top_logprobs", "seed"} <= set(accepted.split(", "))
    assert {"model", "user", "metadata", "stream"} <= set(ignored.split(", "))
    for name in ignored.split(", "):
        good({"prompt": "x", name: "anything"})
    for name in accepted.split(", "):  # a wrong value gets a message of its own
        assert "is not supported; accepted" not in str(parse_one({"prompt": "x", name: "anything"}))


def test_line_numbers_count_blank_lines_and_skip_a_byte_order_mark() -> None:
    file = lines(b"\xef\xbb\xbf" + b'{"prompt": "a"}\n', b"\n", b"  \r\n", b'{"prompt": "b"}')  # no newline at the end
    assert [(line.line_number, line.custom_id) for line in read_raw(file)] == [(1, "line-1"), (4, "line-4")]


def test_duplicate_ids_name_both_lines() -> None:
    with pytest.raises(YalisError, match=r"lines 1 and 3 of in.jsonl both have custom_id 'a'"):
        index_lines(lines({"custom_id": "a"}, {"custom_id": "b"}, {"custom_id": "a"}), "in.jsonl", "model", {})
    with pytest.raises(
        YalisError, match=r"lines 1 and 2 .*'line-2'"
    ):  # the default id of line 2 is the custom_id of line 1
        index_lines(lines({"custom_id": "line-2"}, {"prompt": "x"}), "in.jsonl", "model", {})


def test_the_digest_covers_everything_a_result_depends_on() -> None:
    def digest(row: dict[str, Any], model: str = "model", **defaults: Any) -> str:
        (raw,) = read_raw(lines({"custom_id": "a", **row}))
        return parse(raw, model, defaults).digest

    plain = digest({"prompt": "x"})
    assert plain.startswith("2b2e2ed3042576c9-")  # as in files of earlier versions, which can still be resumed
    same = [{"body": {"prompt": "x", "model": "any"}}, {"prompt": "x", "max_tokens": 128}, {"prompt": "x", "n": None}]
    assert {digest(row) for row in same} == {plain}
    assert digest({"prompt": "x", "max_tokens": 9}) == digest({"prompt": "x"}, max_tokens=9) != plain
    messages = [{"role": "user", "content": "x"}]
    others = [{"prompt": "y"}, {"prompt": [1]}, {"messages": messages}, {"prompt": "\ud800"}, {"odd": 1}, {"odder": 1}]
    others += [{"prompt": "x", "seed": 3}, {"prompt": "x", "stop": "END"}, {"prompt": "x", "logit_bias": {"3": 1}}]
    found = [plain, digest({"prompt": "x"}, "other"), digest({"prompt": "x"}, seed=1), *map(digest, others)]
    assert len(set(found)) == len(found)


_NAMES = ["custom_id", "prompt", "messages", "body", "role", "content", "stop", "n", "seed", "logprobs", "odd"]
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(_NAMES),
        inner, max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(row=_json | st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"") + b"\n"))
def test_no_line_raises(row: Any) -> None:
    for raw in read_raw(lines(row)):
        assert isinstance(parse(raw, "model", {}), (RequestLine, InvalidLine))
