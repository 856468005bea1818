"""Tool calls in generated text: what is found, and that it does not depend on how the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yalis.engine.detokenize import StopStringMatcher
from yalis.server.tools.deltas import ArgumentsDelta, CallStart, ContentDelta, ParsedDelta, join_deltas
from yalis.server.tools.formats import DESCRIBED, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, ToolFormat
from yalis.server.tools.json_scanner import JsonError, JsonScanner

NAMES = ("get_weather", "add", "search.web")
FORMATS = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS)
WORDS = [
    "Sure.", "Let me check", "<tool", "<tool_", "</tool_call>", "a < b", "[TOOL", "[1, 2]", "{", '{"name"', "naïve 🎉",
    "日本語", "👩‍👩‍👧‍👦", "<|python", "line\nbreak", "`[TOOL_CALL]`", '"quoted"', "<<tool_call", "}}", "x" * 30,
]  # fmt: skip
TEXTS = [
    "Paris", "", "São Paulo", "東京 🎉", 'say "hi"', "back\\slash", "a\nb\tc", "{nested} [brackets]", "</tool_call>",
    "<tool_call>", "; ", "[TOOL_CALLS]", "[ARGS]{", "\u2028", "𝒳 astral", "\\u00e9", "END of it",
]  # fmt: skip
NUMBERS = [0, -1, 42, 3.25, -1e-7, 6.02e23, 2**63]


@dataclass(frozen=True)
class Recorded:
    """A generated text, and what the answer made from it must be."""

    format: ToolFormat
    text: str
    content: str
    calls: tuple[tuple[str, str], ...]  # (name, arguments)
    stop: tuple[str, ...] = ()


def parse(answer: Recorded, chunks: Iterable[str], max_calls: int | None = None) -> list[ParsedDelta]:
    """Return the deltas that the server finds when the text is generated in these chunks."""
    numbers = count()
    parser = answer.format.parser_class(NAMES, lambda: f"call_{next(numbers)}", max_calls)
    stop = StopStringMatcher(answer.stop)
    deltas = [delta for chunk in chunks for delta in parser.feed(stop.feed(chunk))]
    return [*deltas, *parser.feed(stop.finish()), *parser.finish()]


def cut(text: str, positions: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(positions), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def draw_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice([True, False, None])
    if kind == 4:
        return [draw_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(TEXTS): draw_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def draw_arguments(rng: random.Random) -> str:
    value = {rng.choice(["city", "query", "ü", "a b"]): draw_value(rng) for _ in range(rng.randrange(3))}
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    return text.replace("/", "\\/") if rng.random() < 0.1 else text


def write_calls(rng: random.Random, tool_format: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Return the text of the calls, in one of the ways in which models of this format write it."""
    space = rng.choice(["", " ", "\n"])
    key = "parameters" if tool_format is LLAMA else "arguments"
    objects = [f'{{{space}"name": "{name}",{space}"{key}":{space}{arguments}{space}}}' for name, arguments in calls]
    if rng.random() < 0.15:
        objects = [f'{{"{key}": {arguments}, "name": "{name}"}}' for name, arguments in calls]
    if tool_format is HERMES:
        if rng.random() < 0.2:
            return f"<tool_call>{space}[{f',{space}'.join(objects)}]{space}</tool_call>"
        return space.join(f"<tool_call>{space}{one}{space}</tool_call>" for one in objects)
    if tool_format is LLAMA:
        return rng.choice(["", "<|python_tag|>"]) + rng.choice(["; ", ";", " ;\n"]).join(objects)
    if tool_format is MISTRAL:
        return f"[TOOL_CALLS]{space}[{f',{space}'.join(objects)}]"
    marks = [rng.choice(["[ARGS]", "", "[CALL_ID]a1B2c3D4e[ARGS]"]) for _ in calls]
    return "".join(f"[TOOL_CALLS]{name}{mark}{text}" for (name, text), mark in zip(calls, marks, strict=True))


def draw_malformed(rng: random.Random, tool_format: ToolFormat) -> str:
    """Return a text that looks like a call and is none."""
    broken = rng.choice(
        [
            '{"name": "unknown", "arguments": {}}', '{"name": "add" "arguments": {}}', '{"name": add}', "{}",
            '{"name": "add", "arguments": 3}', '{"name": "add", "arguments": "no JSON"}', '{"nam', '{"name": "add"',
            "{'name': 'add', 'arguments': {}}", '{"name": "add", "other": 1}', "call add", "",
        ]
    )  # fmt: skip
    if tool_format is HERMES:
        return f"<tool_call>{broken}</tool_call>"
    if tool_format is LLAMA:
        return f"<|python_tag|>{broken} end" if broken != '{"name": "add"' else "<|python_tag|>print(1)"
    return rng.choice([f"[TOOL_CALLS][{broken}", "[TOOL_CALLS]add x", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]add["])


def record(seed: int) -> Recorded:
    rng = random.Random(seed)
    tool_format = FORMATS[seed % len(FORMATS)]
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(4)))
    if tool_format is LLAMA:
        words = words.lstrip("{") and f"I say {words}"  # an answer that begins with a bracket may be a call
    if seed % 5 == 0:  # no call
        text = words + draw_malformed(rng, tool_format) if seed % 2 else f" {words} \n"
        return Recorded(tool_format, text, text, ())
    calls = [(rng.choice(NAMES), draw_arguments(rng)) for _ in range(rng.randint(1, 3))]
    written = write_calls(rng, tool_format, calls)
    if words and tool_format is LLAMA and not written.startswith("<|python_tag|>"):
        written = f"<|python_tag|>{written}"
    text = f"{words}\n{written}" if words else written
    if seed % 7 == 0 and tool_format is not LLAMA:
        return Recorded(tool_format, f"{text}\n\nEND of the text", words, tuple(calls), stop=("\nEND of",))
    if seed % 11 == 0:
        return Recorded(tool_format, f"{text}\nDone, 🎉!", f"{words}\nDone, 🎉!", tuple(calls))
    return Recorded(tool_format, text, words, tuple(calls))


RECORDED = [record(seed) for seed in range(200)]


def test_the_recorded_answers_have_every_kind_of_text() -> None:
    assert {answer.format for answer in RECORDED} == set(FORMATS)
    assert sum(len(answer.calls) > 1 for answer in RECORDED) > 50
    assert sum(not answer.calls for answer in RECORDED) == 40
    assert sum(bool(answer.stop) for answer in RECORDED) > 10
    assert any("\U0001f389" in arguments for answer in RECORDED for _, arguments in answer.calls)
    assert any("\\ud83c" in arguments for answer in RECORDED for _, arguments in answer.calls)


def test_calls_and_content_are_found() -> None:
    for answer in RECORDED:
        found = join_deltas(parse(answer, [answer.text]))
        assert (found.content, [(call.name, call.arguments) for call in found.calls]) == (
            answer.content,
            list(answer.calls),
        ), answer
        assert all(isinstance(json.loads(call.arguments), dict) for call in found.calls)


@pytest.mark.parametrize("part", range(4))
def test_the_answer_is_the_same_for_every_way_to_cut_the_text(part: int) -> None:
    """At every single position, after every character, and at 100 random sets of positions."""
    for number, answer in enumerate(RECORDED[part::4]):
        whole = join_deltas(parse(answer, [answer.text]))
        size, rng = len(answer.text), random.Random(number)
        assert join_deltas(parse(answer, answer.text)) == whole
        sets: Iterator[Iterable[int]] = ((position,) for position in range(size + 1))
        for positions in (*sets, *(rng.sample(range(size), rng.randint(0, min(size, 12))) for _ in range(100))):
            assert join_deltas(parse(answer, cut(answer.text, positions))) == whole, (answer, positions)


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    text = 'Hi <b>!\n<tool_call>{"name": "add", "arguments": {"a": 12, "b": "x\\ny"}}</tool_call>'
    parser = HERMES.parser(NAMES)
    arrived = [(position, delta) for position, char in enumerate(text) for delta in parser.feed(char)]
    assert parser.finish() == []
    for position, delta in arrived:
        if isinstance(delta, ContentDelta):
            assert text[: position + 1].endswith(delta.text), "content waits only for the end of a possible marker"
        elif isinstance(delta, CallStart):
            assert (delta.name, text[position]) == ("add", "{")
        else:
            assert text[: position + 1].endswith(delta.text)
    assert [delta.text for _, delta in arrived if isinstance(delta, ContentDelta)][:3] == ["H", "i", " <b"]
    fragments = [delta.text for _, delta in arrived if isinstance(delta, ArgumentsDelta)]
    assert len(fragments) == len("".join(fragments)) - 2, "all but the digits of the number come alone"
    assert "".join(fragments) == '{"a": 12, "b": "x\\ny"}'
    assert "12," in fragments, "a number may continue until the character after it"


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        # Text that is cut off inside of arguments: a call with their beginning, as in OpenAI's API.
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 12', "", [("add", '{"a": 12')]),
        (MISTRAL_ARGS, '[TOOL_CALLS]add[ARGS]{"a": "x\\', "", [("add", '{"a": "x\\')]),
        (LLAMA, '{"name": "add", "parameters": {"a": tr', "", [("add", '{"a": tr')]),
        # Text that is cut off before them is content.
        (HERMES, '<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', []),
        # Arguments that turn out to be malformed: their beginning was delivered, the rest is content.
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ]}', "]}", [("add", '{"a": ')]),
        # Missing ends.
        (HERMES, '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {}\n</tool_call>', "", [("add", "{}")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {}]', "", [("add", "{}")]),
        # No arguments, null, and arguments as a string.
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        (LLAMA, '{"name": "add", "parameters": null}', "", [("add", "{}")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        # Control characters in strings, which JSON does not allow, become escapes.
        (MISTRAL, '[TOOL_CALLS][{"name":"add","arguments":{"a":"1\n2"}}]', "", [("add", '{"a":"1\\n2"}')]),
        # Several objects in one pair of marks; the type and id of the API.
        (HERMES, '<tool_call>{"name": "add"}\n{"name": "add"}</tool_call>', "", [("add", "{}"), ("add", "{}")]),
        (LLAMA, '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        # JSON that is an answer, not a call.
        (LLAMA, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (LLAMA, '{"name": "add", "age": 36}', '{"name": "add", "age": 36}', []),
        (LLAMA, 'It is {"name": "add"}', 'It is {"name": "add"}', []),
        # A malformed call does not hide the next one.
        (HERMES, '<tool_call>{"name": "x\n<tool_call>{"name": "add"}', '<tool_call>{"name": "x', [("add", "{}")]),
        # Half a surrogate pair is no text.
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83c\\"}"}',
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83c\\"}"}',
            [],
        ),
    ],
)
def test_unusual_text(tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    answer = Recorded(tool_format, text, content, tuple(calls))
    found = join_deltas(parse(answer, [text]))
    assert (found.content, [(call.name, call.arguments) for call in found.calls]) == (content, calls)
    for position in range(len(text)):
        assert join_deltas(parse(answer, cut(text, [position]))) == found


def test_later_calls_are_dropped_if_one_is_allowed() -> None:
    for answer in RECORDED:
        found = join_deltas(parse(answer, [answer.text], max_calls=1))
        assert found.content == answer.content
        assert [(call.name, call.arguments) for call in found.calls] == list(answer.calls[:1])


@pytest.mark.parametrize("tool_format", FORMATS)
@given(text=st.text(st.sampled_from('<tool_call>[TOOL_CALLS]{}":,;ARGS \n\\aé🎉0-name\ud83c'), max_size=60))
def test_any_text_is_accepted(tool_format: ToolFormat, text: str) -> None:
    answer = Recorded(tool_format, text, text, ())
    found = join_deltas(parse(answer, [text]))
    if not found.calls:
        assert found.content == text
    assert join_deltas(parse(answer, text)) == found


@pytest.mark.parametrize("make_id", [one.new_id for one in (HERMES, DESCRIBED, MISTRAL)])
def test_ids_are_unique(make_id: Callable[[], str]) -> None:
    ids = {make_id() for _ in range(100)}
    assert len(ids) == 100


def test_ids_of_mistral_are_what_its_templates_accept() -> None:
    assert all(len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum() for _ in range(20))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ),
    st.booleans(),
)
def test_the_scanner_accepts_json_and_nothing_else(value: object, ascii_only: bool) -> None:
    text = json.dumps([value], ensure_ascii=ascii_only)
    scanner = JsonScanner()
    assert "".join(scanner.feed(char) for char in text) == text
    assert scanner.done
    for position in range(1, len(text)):  # without one character
        broken = text[:position] + text[position + 1 :]
        scanner = JsonScanner()
        try:
            for char in broken:
                scanner.feed(char)  # raises JsonError after the end
            accepted = scanner.done
        except JsonError:
            accepted = False
        try:
            json.loads(broken)
            expected = True
        except ValueError:
            expected = False
        assert accepted == expected, broken
