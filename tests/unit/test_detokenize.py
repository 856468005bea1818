"""Incremental detokenization: exact text, never part of a character, cut at stop strings."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tokenizer_files import byte_fallback, byte_level
from yalis.checkpoint.tokenizer import Tokenizer
from yalis.engine.detokenize import Detokenizer, IncrementalDecoder, StopStringMatcher

TOKENIZERS = {"byte-level": Tokenizer(byte_level(), (), "a"), "byte-fallback": Tokenizer(byte_fallback(), (), "b")}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_parts_add_up_to_the_whole_text(name: str, data: st.DataObject) -> None:
    """Any ids, including bytes that are not text and special tokens in the middle."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    parts = [*(decoder.feed(token) for token in ids), decoder.finish()]
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    # Several tokens at a time, as a slow reader finds them.
    decoder, rest, parts = IncrementalDecoder(tokenizer, skip_special_tokens=skip), ids, []
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        parts.append(decoder.feed_all(rest[:count]))
        rest = rest[count:]
    assert "".join(parts) + decoder.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("keep", [["<|user|>"], ["<|end|>", "<|user|>", "no token"], []])
def test_special_tokens_that_are_kept(keep: list[str]) -> None:
    """The others are skipped, also between the bytes of a character."""
    tokenizer = TOKENIZERS["byte-level"]
    special = [tokenizer.hf.convert_tokens_to_ids(name) for name in ("<|start|>", "<|end|>", "<|user|>")]
    first, *rest = tokenizer.encode("é")[1:]
    ids = [special[0], *tokenizer.encode("a b")[1:], special[2], first, special[0], *rest, special[1]]
    detokenizer = Detokenizer(tokenizer.keeping(keep))
    parts = [*(detokenizer.feed([token]) for token in ids), detokenizer.finish()]
    user, end = ("<|user|>" if "<|user|>" in keep else ""), ("<|end|>" if "<|end|>" in keep else "")
    assert "".join(parts) == detokenizer.text == f"a b{user}é{end}"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
@example("héllo wörld 🎉 日本語")
def test_no_part_ends_inside_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode(text)
    parts = [decoder.feed(token) for token in ids]
    if "\ufffd" not in text:
        assert not any(
            "\ufffd" in part for part in [*parts, IncrementalDecoder(tokenizer).feed_all(ids[: len(ids) // 2])]
        )
    assert "".join(parts) + decoder.finish() == tokenizer.decode(ids)


def test_whole_words_are_emitted_at_once() -> None:
    decoder = IncrementalDecoder(TOKENIZERS["byte-level"])
    ids = TOKENIZERS["byte-level"].encode("hello there the world")[1:]
    assert all(decoder.feed(token) for token in ids)
    assert decoder.finish() == ""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(0, 4),
)
@example(["a", "ab"], ["aab", "ab"], 0)
def test_text_is_cut_at_the_first_stop_string(chunks: list[str], stop: list[str], free: int) -> None:
    """Stop strings count only after `free` chunks; emitted text is never taken back."""
    matcher = StopStringMatcher(stop)
    emitted, seen, cut = "", "", None
    for index, chunk in enumerate(chunks):
        emitted += matcher.feed(chunk, enabled=index >= free)
        seen += chunk
        floor = sum(map(len, chunks[:free]))
        ends = [found for found in (seen.find(text, floor) for text in stop) if found >= 0] if index >= free else []
        if ends:
            cut = min(ends)
            break
        assert seen.startswith(emitted)
    if cut is None:
        assert matcher.found is None
        assert emitted + matcher.finish() == seen
    else:
        assert matcher.found is not None
        assert emitted == seen[:cut]
        assert seen[cut:].startswith(matcher.found)
        assert matcher.feed("more") == ""


def _run(text: str, stop: tuple[str, ...], min_tokens: int = 0) -> tuple[Detokenizer, list[str]]:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    parts = []
    for token in tokenizer.encode(text)[1:]:
        parts.append(detokenizer.feed([token]))
        if detokenizer.stopped:
            break
    parts.append(detokenizer.finish())
    assert "".join(parts) == detokenizer.text
    return detokenizer, parts


def test_a_stop_string_over_several_tokens() -> None:
    detokenizer, _ = _run("hello there, the world is here", (" the world",))
    assert detokenizer.text == "hello there,"
    assert detokenizer.stopped == " the world"
    consumed = TOKENIZERS["byte-level"].encode("hello there, the world is here")[1:][: detokenizer.num_tokens]
    assert TOKENIZERS["byte-level"].decode(consumed).endswith(" the world")


def test_part_of_a_stop_string_is_emitted_at_the_end() -> None:
    detokenizer, parts = _run("hello wor", ("world",))
    assert detokenizer.text == "hello wor"
    assert parts[-1] == "wor"
    assert detokenizer.stopped is None


def test_a_stop_string_before_min_tokens_is_text() -> None:
    assert _run("hello hello hello", ("hello",))[0].text == ""
    some, _ = _run("hello hello hello", ("hello",), min_tokens=1)
    assert some.text.startswith("hello")
    assert some.stopped == "hello"
    everything, _ = _run("hello hello hello", ("hello",), min_tokens=100)
    assert everything.text == "hello hello hello"
    assert everything.stopped is None


def test_several_ids_at_once_end_where_one_at_a_time_would() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the end of the world is here")[1:]
    one = _run("the end of the world is here", ("world",))[0]
    all_at_once = Detokenizer(tokenizer, ("world",))
    assert all_at_once.feed(ids) == one.text == "the end of the "
    assert all_at_once.num_tokens == one.num_tokens < len(ids)
