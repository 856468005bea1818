"""Chat with a model: in a terminal (Ctrl-C stops an answer, Ctrl-D exits), with one message on the command line, or
with one message per line from a pipe. The conversation is kept until /reset; /exit exits."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import (
    add_common_flags,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    name_flags,
    sampling_fields,
)
from yalis.cli.generate import check_logprobs, describe_output, report_full_contexts
from yalis.cli.loading import load_llm
from yalis.cli.terminal import format_speed, print_status, report_model_defaults
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisError
from yalis.progress_line import ProgressLine
from yalis.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from yalis.engine.llm import LLM

_MAX_TOKENS = 512  # an answer is longer than a completion
_HELP = (
    "/reset clears the conversation, Ctrl-C stops an answer, /exit or Ctrl-D exits, /help prints this line; everything "
    "else is sent to the model"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", metavar="MESSAGE", nargs="*", help="answer this message and exit")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    add_engine_flags(parser)
    add_sampling_flags(parser, hidden=["n", "prompt_logprobs"], max_tokens=_MAX_TOKENS)
    add_common_flags(parser, json="print one JSON object per answer")


def run(args: argparse.Namespace) -> int:
    config, given = engine_config(args), sampling_fields(args)
    if (n := given.get("n", 1)) != 1:
        raise YalisError(f"n is {n}, but a chat has one answer at a time; leave --n out")
    if "prompt_logprobs" in given:
        raise YalisError(
            "a chat does not print log-probabilities of the prompt; use `yalis generate --prompt-logprobs`"
        )
    check_logprobs(given, args.json)
    message = " ".join(args.message)
    if args.message and not message.strip():
        raise YalisError("the message is empty; give at least one character, or no message to chat in a terminal")
    with ProgressLine() as progress:
        loaded = load_llm(config, progress)
    with loaded as llm:
        report_model_defaults(llm.sampling_defaults, given)
        sampling = SamplingParams(**{"max_tokens": _MAX_TOKENS, **llm.sampling_defaults, **given})
        conversation = Conversation(llm, sampling, args.system, args.json)
        if args.message:
            conversation.handle(message)
        elif sys.stdin.isatty():
            _interact(conversation)
        else:
            _answer_lines(conversation)
    return 0


class Conversation:
    """The messages so far. Answers are printed as they are generated, then added to the messages."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, as_json: bool) -> None:
        self._llm, self._sampling, self._as_json = llm, sampling, as_json
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def reset(self) -> None:
        self.messages = list(self._system)

    def handle(self, line: str, stoppable: bool = False) -> bool:
        """Run the command or answer the message in `line`; returns False if the command exits."""
        command = line.strip()
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self.reset()
            print_status("the conversation is empty")
        elif command == "/help":
            print_status(_HELP)
        elif line.startswith("/"):
            raise YalisError(
                f"unknown command {command.split()[0]!r}; accepted: /reset, /exit, /help; a space before the / sends "
                "the line to the model"
            )
        elif command:
            self.answer(line, stoppable)
        return True

    def answer(self, text: str, stoppable: bool = False) -> None:
        """Stream the answer to `text` and add both to the messages.

        With `stoppable`, Ctrl-C ends the answer but not the program, and the partial answer is added.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        start, answer, tokens = time.monotonic(), "", 0
        completion: Completion | None = None
        chunks = self._llm.stream([messages], self._sampling)
        try:
            for chunk in chunks:
                answer += chunk.text
                tokens += len(chunk.token_ids)
                completion = chunk.completion or completion
                if not self._as_json:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt as interrupt:
            if not stoppable:
                if answer:
                    print(json.dumps(_object(answer, completion)) if self._as_json else "", flush=True)
                limit = min(self._sampling.max_tokens, self._llm.max_model_len)
                raise Stopped(describe_output(tokens, limit)) from interrupt
            chunks.close()  # cancels the request
        except YalisError as error:
            self._check_history(messages, error)
            raise
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        print(json.dumps(_object(answer, completion)) if self._as_json else "", flush=True)
        report_full_contexts(self._llm, filter(None, [completion]), self._sampling)
        print_status(format_speed(tokens, time.monotonic() - start))

    def _check_history(self, messages: list[Message], error: YalisError) -> None:
        """Raise a more specific error if the last message would fit the context without the messages before it."""
        tokenizer, max_len = self._llm.tokenizer, self._llm.max_model_len
        if tokenizer is None or len(self.messages) == len(self._system):
            return
        length = len(tokenizer.encode_chat(messages))
        if length >= max_len > len(tokenizer.encode_chat([*self._system, messages[-1]])):
            raise YalisError(
                f"the conversation has grown to {length} tokens, but the context holds {max_len} including one "
                "generated token; /reset clears it, or raise --max-model-len or --kv-memory if the model allows it"
            ) from error


def _answer_lines(conversation: Conversation) -> None:
    """Handle each line of a pipe as one message."""
    count = 0
    for line in sys.stdin:
        if line.strip():
            count += 1
            if count == 2:
                print_status('each line is a message of its own; `yalis chat "$(cat FILE)"` sends a file as one')
        if not conversation.handle(line.rstrip("\n")):
            break
    if not count:
        raise YalisError('standard input ended without a message; give one, such as `yalis chat "Hello"`')


def _object(answer: str, completion: Completion | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    if completion is not None:
        from yalis.batch.output import completion_fields

        fields = completion_fields(completion)
        del fields["text"]  # it is in "content"
        message.update(fields, metrics=asdict(completion.metrics))
    return message


def _interact(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    print_status("type a message; /reset clears the conversation, Ctrl-C stops an answer, /exit or Ctrl-D exits")
    while True:
        try:
            text = input("> ").rstrip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        try:
            if not conversation.handle(text, stoppable=True):
                return
        except YalisError as error:
            print_status(name_flags(str(error)))
