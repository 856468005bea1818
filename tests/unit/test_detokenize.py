"""Text from tokens as they come: exact, never half a character, and cut at stop strings."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tokenizer_files import byte_fallback, byte_level
from yalis.checkpoint.tokenizer import Tokenizer
from yalis.engine.detokenize import Detokenizer, IncrementalDecoder, StopWatcher

KINDS = {"byte-level": Tokenizer(byte_level(), (), "a"), "byte-fallback": Tokenizer(byte_fallback(), (), "b")}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_make_the_whole(kind: str, data: st.DataObject) -> None:
    """Any ids at all, so also bytes that are no text and special tokens in the middle."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [*(decoder.feed(token) for token in ids), decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
@example("héllo wörld 🎉 日本語")
def test_no_piece_ends_inside_a_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode(text)
    pieces = [decoder.feed(token) for token in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)


def test_text_comes_at_once() -> None:
    """Plain words are not held back."""
    decoder = IncrementalDecoder(KINDS["byte-level"])
    ids = KINDS["byte-level"].encode("hello there the world")[1:]
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
    """`free` chunks come before stop strings count; what is given out never has to be taken back."""
    watcher = StopWatcher(stop)
    given_out, seen, cut = "", "", None
    for index, chunk in enumerate(chunks):
        given_out += watcher.feed(chunk, allowed=index >= free)
        seen += chunk
        floor = sum(map(len, chunks[:free]))
        ends = [at for at in (seen.find(text, floor) for text in stop) if at >= 0] if index >= free else []
        if ends:
            cut = min(ends)
            break
        assert seen.startswith(given_out)
    if cut is None:
        assert watcher.found is None
        assert given_out + watcher.finish() == seen
    else:
        assert watcher.found is not None
        assert given_out == seen[:cut]
        assert seen[cut:].startswith(watcher.found)
        assert watcher.feed("more") == ""


def _run(text: str, stop: tuple[str, ...], min_tokens: int = 0) -> tuple[Detokenizer, list[str]]:
    tokenizer = KINDS["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    pieces = []
    for token in tokenizer.encode(text)[1:]:
        pieces.append(detokenizer.feed([token]))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return detokenizer, pieces


def test_a_stop_string_over_several_tokens() -> None:
    detokenizer, _ = _run("hello there, the world is here", (" the world",))
    assert detokenizer.text == "hello there,"
    assert detokenizer.stopped == " the world"
    taken = KINDS["byte-level"].encode("hello there, the world is here")[1:][: detokenizer.count]
    assert KINDS["byte-level"].decode(taken).endswith(" the world")


def test_half_a_stop_string_is_given_out_in_the_end() -> None:
    detokenizer, pieces = _run("hello wor", ("world",))
    assert detokenizer.text == "hello wor"
    assert pieces[-1] == "wor"
    assert detokenizer.stopped is None


def test_a_stop_string_before_the_least_tokens_is_text() -> None:
    assert _run("hello hello hello", ("hello",))[0].text == ""
    some, _ = _run("hello hello hello", ("hello",), min_tokens=1)
    assert some.text.startswith("hello")
    assert some.stopped == "hello"
    everything, _ = _run("hello hello hello", ("hello",), min_tokens=100)
    assert everything.text == "hello hello hello"
    assert everything.stopped is None


def test_several_ids_at_once_end_where_one_at_a_time_would() -> None:
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("the end of the world is here")[1:]
    one = _run("the end of the world is here", ("world",))[0]
    all_at_once = Detokenizer(tokenizer, ("world",))
    assert all_at_once.feed(ids) == one.text == "the end of the "
    assert all_at_once.count == one.count < len(ids)
