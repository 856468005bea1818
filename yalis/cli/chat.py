"""Talk with a model: in a terminal with history (/reset forgets it, /exit or Ctrl-D leaves, Ctrl-C stops an answer),
with one message on the command line, or with one message a line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, add_engine_flags, add_sampling_flags, engine_config, sampling_fields
from yalis.cli.terminal import speed, tell
from yalis.errors import YalisError
from yalis.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from yalis.engine.llm import LLM

_MAX_TOKENS = 512  # an answer is longer than a completion


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", metavar="MESSAGE", nargs="*", help="answer this and end")
    parser.add_argument("--system", metavar="TEXT", help="the system message at the start")
    add_engine_flags(parser)
    add_sampling_flags(parser, max_tokens=_MAX_TOKENS)
    add_common_flags(parser, json="print one object per answer")


def run(args: argparse.Namespace) -> int:
    config, sampling = engine_config(args), SamplingParams(**{"max_tokens": _MAX_TOKENS, **sampling_fields(args)})
    if sampling.n != 1:
        raise YalisError(f"n is {sampling.n}; a chat has one answer at a time, so leave --n out")
    from yalis.engine.llm import LLM

    with LLM(**asdict(config)) as llm:
        talk = Conversation(llm, sampling, args.system, args.json)
        if args.message:
            talk.answer(" ".join(args.message))
        elif sys.stdin.isatty():
            _interact(talk)
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.answer(line.rstrip("\n"))
    return 0


class Conversation:
    """The messages so far. An answer is streamed as it comes and then kept."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, as_json: bool) -> None:
        self._llm, self._sampling, self._as_json = llm, sampling, as_json
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def answer(self, text: str, stoppable: bool = False) -> None:
        """`stoppable`: Ctrl-C ends the answer, not the program; what was said until then stays in the history."""
        asked = [*self.messages, {"role": "user", "content": text}]
        start, said, tokens = time.monotonic(), "", 0
        whole: Completion | None = None
        chunks = self._llm.stream([asked], self._sampling)
        try:
            for chunk in chunks:
                said += chunk.text
                tokens += len(chunk.token_ids)
                whole = chunk.completion or whole
                if not self._as_json:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            if not stoppable:
                raise
            if isinstance(chunks, Iterator) and hasattr(chunks, "close"):
                chunks.close()  # cancels the request
        self.messages = [*asked, {"role": "assistant", "content": said}]
        print(json.dumps(_object(said, whole)) if self._as_json else "", flush=True)
        tell(speed(tokens, time.monotonic() - start))


def _object(said: str, whole: Completion | None) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": said}
    if whole is not None:
        from yalis.engine.offline_output import completion_fields

        fields = completion_fields(whole)
        del fields["text"]  # a chat calls it content
        told.update(fields, metrics=asdict(whole.metrics))
    return told


def _interact(talk: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    tell("type a message; /reset forgets the conversation, Ctrl-C stops an answer, /exit or Ctrl-D leaves")
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            talk.reset()
        elif text.startswith("/"):
            tell(f"unknown command {text!r}; accepted: /reset, /exit")
        elif text:
            try:
                talk.answer(text, stoppable=True)
            except YalisError as error:
                tell(f"{error}; /reset forgets the conversation so far")
