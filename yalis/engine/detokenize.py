"""Incremental detokenization: token ids to text as they are generated, cut at the first stop string.

Text is emitted only once it is final: no part of it changes when more tokens follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "�"  # decoders emit it for bytes that are not (yet) a character


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def is_byte(self, token: int) -> bool: ...


class IncrementalDecoder:
    """Decodes one token at a time. The emitted parts add up to decode(all ids), and none ends inside a character.

    The text of a token can depend on the tokens before it (a leading space) and after it (the rest of a character). So
    each part is the difference between two decodings of a short window that begins in text that was emitted already.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens
        self._ids: list[int] = []
        self._window_start = 0
        self._num_decoded = 0  # ids whose text was emitted
        self._num_chars = 0  # characters emitted
        self._in_bytes = False

    def feed(self, token: int) -> str:
        """Add a token and return the text that is now final."""
        self._ids.append(token)
        # A byte token may become part of a character with the bytes after it. A skipped special token between two
        # bytes does not separate them.
        self._in_bytes = self._decoder.is_byte(token) or (self._in_bytes and not self._decode([token]))
        if self._in_bytes:
            return ""
        text = self._decode(self._ids[self._window_start :])
        if text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._decode(self._ids[self._window_start : self._num_decoded])) :]
        if new:
            self._window_start, self._num_decoded = self._num_decoded, len(self._ids)
            self._num_chars += len(new)
        return new

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now final: the same as from feeding them one by one, much faster."""
        if len(tokens) < 2:
            return "".join(map(self.feed, tokens))
        if not self._decoder.is_byte(tokens[-1]) and self._decode([tokens[-1]]):
            self._ids += tokens
            text = self._decode(self._ids[self._window_start :])
            if not text.endswith(_REPLACEMENT):
                new = text[len(self._decode(self._ids[self._window_start : self._num_decoded])) :]
                self._in_bytes = False
                if new:
                    self._window_start, self._num_decoded = self._num_decoded, len(self._ids)
                    self._num_chars += len(new)
                return new
            del self._ids[-len(tokens) :]
        return "".join(map(self.feed, tokens))  # the last tokens are part of a character, or have no text

    def finish(self) -> str:
        """Return the text that was held back; no token may follow."""
        rest = self._decode(self._ids)[self._num_chars :] if self._num_decoded < len(self._ids) else ""
        self._num_decoded = len(self._ids)
        self._num_chars += len(rest)
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopStringMatcher:
    """Cuts text before the first stop string. The end of the text is held back while it may begin a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, enabled: bool = True) -> str:
        """Add text and return what is now final. While not `enabled`, stop strings are ordinary text."""
        if self.found is not None:
            return ""
        if not enabled:
            text, self._held = self._held + text, ""
            return text
        held = self._held + text
        # The earliest match wins, and the longest of those that begin at the same position.
        matches = [(held.find(stop), -len(stop), stop) for stop in self._stop if stop in held]
        if matches:
            position, _, self.found = min(matches)
            self._held = ""
            return held[:position]
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back; no text may follow."""
        rest, self._held = self._held, ""
        return rest


class Detokenizer:
    """The text of one completion while it is generated. Stop strings count only after `min_tokens` tokens."""

    def __init__(
        self, decoder: Decoder, stop: Sequence[str] = (), min_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self.text = ""  # everything emitted
        self.num_tokens = 0  # tokens consumed, including the one that completed a stop string
        self._decoder = IncrementalDecoder(decoder, skip_special_tokens)
        self._matcher = StopStringMatcher(stop)
        self._min_tokens = min_tokens
        self.may_stop = bool(stop)  # whether there are stop strings, so that each token must be decoded at once

    @property
    def stopped(self) -> str | None:
        """The stop string that was found, if any."""
        return self._matcher.found

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids up to the one that completes a stop string; returns the text that is now final."""
        if not self.may_stop:
            new = self._decoder.feed_all(ids)
            self.num_tokens += len(ids)
            self.text += new
            return new
        new = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            new += self._matcher.feed(self._decoder.feed(token), enabled=self.num_tokens > self._min_tokens)
        self.text += new
        return new

    def finish(self) -> str:
        """Return the text that was held back; no ids may follow."""
        if self.stopped is not None:
            return ""
        rest = self._matcher.feed(self._decoder.finish(), enabled=self.num_tokens > self._min_tokens)
        rest += self._matcher.finish()
        self.text += rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
