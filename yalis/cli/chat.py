"""Talk with a model: in a terminal (Ctrl-C stops an answer, Ctrl-D leaves), with one message on the command line, or
with one message a line from a pipe. The conversation is remembered: /reset forgets it, and /exit leaves."""

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
from yalis.cli.generate import so_far, tell_where_contexts_ended
from yalis.cli.terminal import format_speed, print_status
from yalis.engine.interrupts import Stopped
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
    message = " ".join(args.message)
    if args.message and not message.strip():
        raise YalisError("the message is empty; give at least one character, or none at all to talk in a terminal")
    from yalis.engine.llm import LLM

    with LLM(**asdict(config)) as llm:
        talk = Conversation(llm, sampling, args.system, args.json)
        if args.message:
            talk.answer(message)
        elif sys.stdin.isatty():
            _interact(talk)
        else:
            for line in sys.stdin:
                if not talk.take(line.rstrip("\n")):
                    break
    return 0


class Conversation:
    """The messages so far. An answer is streamed as it comes and then kept."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, as_json: bool) -> None:
        self._llm, self._sampling, self._as_json = llm, sampling, as_json
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def take(self, line: str, stoppable: bool = False) -> bool:
        """Do what a line says, a command or a message; False when it says to leave."""
        word = line.strip()
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.reset()
        elif word == "/help":
            print_status("/reset forgets the conversation, /exit leaves; everything else is said to the model")
        elif word.startswith("/"):
            raise YalisError(f"unknown command {word!r}; accepted: /reset, /exit, /help")
        elif word:
            self.answer(line, stoppable)
        return True

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
        except KeyboardInterrupt as interrupt:
            if not stoppable:
                if said:
                    print(json.dumps(_object(said, whole)) if self._as_json else "", flush=True)
                raise Stopped(so_far(tokens, self._sampling.max_tokens)) from interrupt
            if isinstance(chunks, Iterator) and hasattr(chunks, "close"):
                chunks.close()  # cancels the request
        except YalisError as error:
            self._blame_history(asked, error)
            raise
        self.messages = [*asked, {"role": "assistant", "content": said}]
        print(json.dumps(_object(said, whole)) if self._as_json else "", flush=True)
        tell_where_contexts_ended(self._llm, filter(None, [whole]), self._sampling)
        print_status(format_speed(tokens, time.monotonic() - start))

    def _blame_history(self, asked: list[Message], error: YalisError) -> None:
        """Say so where only the turns before made the conversation too long for the context."""
        tokenizer, most = self._llm.tokenizer, self._llm.max_model_len
        if tokenizer is None or len(self.messages) == len(self._opening):
            return
        length = len(tokenizer.encode_chat(asked))
        if length >= most > len(tokenizer.encode_chat([*self._opening, asked[-1]])):
            raise YalisError(
                f"the conversation has grown to {length} tokens, but the context holds {most} and one of them is to be "
                "generated; /reset forgets it, or raise --max-model-len or --kv-memory where the model allows"
            ) from error


def _object(said: str, whole: Completion | None) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": said}
    if whole is not None:
        from yalis.batch.output import completion_fields

        fields = completion_fields(whole)
        del fields["text"]  # a chat calls it content
        told.update(fields, metrics=asdict(whole.metrics))
    return told


def _interact(talk: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    print_status("type a message; /reset forgets the conversation, Ctrl-C stops an answer, /exit or Ctrl-D leaves")
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        try:
            if not talk.take(text, stoppable=True):
                return
        except YalisError as error:
            print_status(str(error))
