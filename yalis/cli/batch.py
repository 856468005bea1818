"""Answer every line of a JSONL file. After a crash, Ctrl-C or a scheduler's SIGTERM the same command goes on where it
stopped. A result is known by its prompt, sampling, --dtype and model, and the model by its path: a file or folder that
changed in place is taken for the same model.

In float32 the finished file is then the same, to the token, as that of a run nobody disturbed. In bfloat16 and float16
an answer may differ from it where two tokens were almost equally likely, since the batches were made up of other lines.
Exit status 1 when there are lines and not one of them has an answer.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags, add_engine_flags, add_sampling_flags, engine_config, sampling_fields
from yalis.cli.terminal import ProgressLine, counted, duration, speed, tell

if TYPE_CHECKING:
    from yalis.config import EngineConfig
    from yalis.engine.llm import LLM
    from yalis.engine.offline import JobProgress


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN.jsonl", type=Path, help='OpenAI-batch lines, or lines such as {"prompt": "..."}'
    )
    parser.add_argument(
        "output", metavar="OUT.jsonl", type=Path, help="one result a line, in the order in which they finish"
    )
    parser.add_argument(
        "--retry-errors", action="store_true", help="take the errors out of OUT.jsonl and try those lines again"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)  # for lines that do not say it themselves
    add_common_flags(parser, json="print a summary object at the end")


def run(args: argparse.Namespace) -> int:
    with sigterm_as_ctrl_c() as terminated:
        try:
            return _answer_all(args, terminated)
        except KeyboardInterrupt:
            if terminated:
                return 143
            raise


def _answer_all(args: argparse.Namespace, terminated: list[int]) -> int:
    config, defaults = engine_config(args), sampling_fields(args)
    from yalis.engine.offline import OfflineJob

    def make_llm() -> LLM:
        from yalis.engine.llm import LLM

        line.show("loading the model")
        return LLM(**asdict(config))

    line, stopped = ProgressLine(), False
    with OfflineJob(args.input, args.output, _identify(config), defaults, args.retry_errors) as job:
        _warn(job.strangers, job.locked, args.output)
        try:
            job.run(make_llm, report=lambda progress: line.show(_status(progress)))
        except KeyboardInterrupt:
            stopped = True
        finally:
            line.clear()
    now = job.progress
    if stopped:
        tell(f"stopped: {args.output} holds {now.done} of {counted(now.total)}; run the same command again to continue")
        return 143 if terminated else 130
    _finish(now, args)
    return 1 if now.total and now.errors == now.total else 0


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM, a scheduler's notice, acts as Ctrl-C does, even where Ctrl-C is ignored; gives whether it came."""
    terminated: list[int] = []
    foreign = None in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))  # could not be put back
    if foreign or threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)  # which a step of the engine holds back until it is whole

    def interrupt(number: int, frame: FrameType | None) -> None:
        if terminated or ctrl_c is not signal.SIG_IGN:
            raise KeyboardInterrupt

    ctrl_c = signal.signal(signal.SIGINT, interrupt)
    term = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGINT, ctrl_c)


def _identify(config: EngineConfig) -> str:
    """The model as far as a result depends on it; a folder by its whole path, however it was spelt."""
    place = Path(config.model).expanduser()
    name = str(place.resolve()) if place.exists() else config.model
    return json.dumps([name, config.tokenizer, config.load, config.load_seed, config.dtype])


def _warn(strangers: list[str], locked: bool, output: Path) -> None:
    if strangers:
        count = f"{counted(len(strangers))} that the input does not ask for"
        tell(f"{output} also holds {count} (such as {strangers[0]!r}), kept as before")
    if not locked:
        tell(f"the file system of {output} has no locks; take care that only one job writes to it")


def _status(now: JobProgress) -> str:
    left = "" if now.seconds_left is None else f" · {duration(now.seconds_left)} left"
    share = 100 * now.done // max(now.total, 1)
    rates = f"{now.requests_per_s:.1f} requests/s · {now.tokens_per_s:.0f} tokens/s"
    return f"{now.done}/{now.total} ({share}%) · {rates}{left}"


def _finish(now: JobProgress, args: argparse.Namespace) -> None:
    fresh = now.done - now.resumed
    if args.json:
        summary = {
            "output": str(args.output),
            "results": now.done,
            "errors": now.errors,
            "resumed": now.resumed,
            "output_tokens": now.output_tokens,
            "seconds": now.seconds,
        }
        print(json.dumps(summary))
    if not now.total:
        tell(f"{args.input} has no lines")
        return
    if now.total == 1:
        told = f"{args.output} holds the one result" + (", an error" if now.errors else "")
    else:
        told = f"{args.output} holds all {now.done} results, {now.errors} of them errors"
    if now.errors:
        told += " (--retry-errors tries those again)"
    if now.resumed:
        told += f"; {now.resumed} {'was' if now.resumed == 1 else 'were'} there before"
    if fresh and now.output_tokens:
        told += f"; {speed(now.output_tokens, now.seconds)}"
    tell(told)
