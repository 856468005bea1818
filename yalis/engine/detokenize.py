"""Token ids to text as they come: only what is sure, and only up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNSURE = "�"  # what a decoder puts where bytes are not (yet) a character


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def is_byte(self, token: int) -> bool: ...


class IncrementalDecoder:
    """Feed ids, get text; the pieces together are decode(all ids), and none ends inside a character.

    A token's text can depend on the tokens before it (a leading space) and after it (the rest of a character), so each
    piece is the difference between two decodings of a short window that begins at text already given out.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder, self._skip = decoder, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # the window
        self._known = 0  # ids whose text was given out
        self._length = 0  # characters given out
        self._in_bytes = False

    def feed(self, token: int) -> str:
        self._ids.append(token)
        # A later byte may change what this one spells, and a token that is left out does not come between them.
        self._in_bytes = self._decoder.is_byte(token) or (self._in_bytes and not self._decode([token]))
        if self._in_bytes:
            return ""
        text = self._decode(self._ids[self._start :])
        if text.endswith(_UNSURE):
            return ""
        new = text[len(self._decode(self._ids[self._start : self._known])) :]
        if new:
            self._start, self._known = self._known, len(self._ids)
            self._length += len(new)
        return new

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        rest = self._decode(self._ids)[self._length :] if self._known < len(self._ids) else ""
        self._known = len(self._ids)
        self._length += len(rest)
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip) if ids else ""


class StopWatcher:
    """Cuts text before the first stop string. Holds back an end that may turn out to be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, allowed: bool = True) -> str:
        """The text that is sure to stay. While not `allowed`, stop strings are ordinary text."""
        if self.found is not None:
            return ""
        if not allowed:
            text, self._held = self._held + text, ""
            return text
        held = self._held + text
        hits = [(held.find(stop), -len(stop), stop) for stop in self._stop if stop in held]
        if hits:
            at, _, self.found = min(hits)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


class Detokenizer:
    """One completion's text while it is generated. `min_tokens` tokens come before any stop string counts."""

    def __init__(
        self, decoder: Decoder, stop: Sequence[str] = (), min_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self.text = ""  # all that was given out
        self.count = 0  # ids taken, up to and with the one that completed a stop string
        self._decoder = IncrementalDecoder(decoder, skip_special_tokens)
        self._watcher = StopWatcher(stop)
        self._min_tokens = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that was met."""
        return self._watcher.found

    def feed(self, ids: Sequence[int]) -> str:
        """Take ids, up to the one that completes a stop string; gives the text that became sure."""
        new = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.count += 1
            new += self._watcher.feed(self._decoder.feed(token), allowed=self.count > self._min_tokens)
        self.text += new
        return new

    def finish(self) -> str:
        """No more ids: gives what was held back."""
        if self.stopped is not None:
            return ""
        rest = self._watcher.feed(self._decoder.finish(), allowed=self.count > self._min_tokens)
        rest += self._watcher.finish()
        self.text += rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """The longest beginning of `stop`, short of the whole, that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
