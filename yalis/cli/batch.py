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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags, add_engine_flags, add_sampling_flags, engine_config, sampling_fields
from yalis.cli.signals import INTERRUPTED
from yalis.cli.terminal import ProgressLine, count_results, format_duration, format_speed, print_status
from yalis.errors import YalisError, YalisFailure

if TYPE_CHECKING:
    from yalis.batch.job import BatchJob
    from yalis.batch.progress import JobProgress
    from yalis.config import EngineConfig
    from yalis.engine.llm import LLM


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN.jsonl", type=_source, help='OpenAI-batch lines, or lines such as {"prompt": "..."}'
    )
    parser.add_argument(
        "output", metavar="OUT.jsonl", type=_target, help="one result a line, in the order in which they finish"
    )
    parser.add_argument(
        "--retry-errors", action="store_true", help="take the errors out of OUT.jsonl and try those lines again"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)  # for lines that do not say it themselves
    add_common_flags(parser, json="print a summary object at the end")


def _source(text: str) -> Path:
    if text == "-":
        raise YalisError(
            "standard input can be read only once, and a job reads its input twice; save it to a file first"
        )
    return Path(text)


def _target(text: str) -> Path:
    if text == "-":
        raise YalisError("results on standard output could not be resumed; give a file")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    config, defaults = engine_config(args), sampling_fields(args)
    from yalis.batch.job import BatchJob, ModelFailed

    def make_llm() -> LLM:
        from yalis.engine.llm import LLM

        line.show("loading the model")
        return LLM(**asdict(config))

    line, stopped = ProgressLine(), False
    with BatchJob(args.input, args.output, _identify(config), defaults, args.retry_errors) as job:
        _warn(job.strangers, job.locked, args.output)
        try:
            job.run(make_llm, report=lambda progress: line.show(_status(progress)))
        except KeyboardInterrupt:
            stopped = True
        except ModelFailed as failure:
            raise YalisFailure(f"{failure}; {_go_on(job, args.output)}") from failure
        finally:
            line.clear()
    now = job.progress
    if stopped:
        print_status(f"stopped: {_go_on(job, args.output)}")
        return INTERRUPTED
    _finish(job, args)
    return 1 if now.total and now.errors == now.total else 0


def _go_on(job: BatchJob, output: Path) -> str:
    now = job.progress
    return f"{output} holds {now.done} of {count_results(now.total)}; run the same command again to continue"


def _identify(config: EngineConfig) -> str:
    """The model as far as a result depends on it; a folder by its whole path, however it was spelt."""
    place = Path(config.model).expanduser()
    name = str(place.resolve()) if place.exists() else config.model
    return json.dumps([name, config.tokenizer, config.load, config.load_seed, config.dtype])


def _warn(strangers: list[str], locked: bool, output: Path) -> None:
    if strangers:
        count = f"{count_results(len(strangers))} that the input does not ask for"
        print_status(f"{output} also holds {count} (such as {strangers[0]!r}), kept as before")
    if not locked:
        print_status(f"the file system of {output} has no locks; take care that only one job writes to it")


def _status(now: JobProgress) -> str:
    parts = [f"{now.done}/{now.total} ({100 * now.done // max(now.total, 1)}%)"]
    if not now.generated:
        return f"{parts[0]} · reading the first prompts"
    parts += [f"{now.running} running", f"{now.generated} tokens, {now.tokens_per_s:.1f}/s"]
    if now.requests_per_s >= 0.1:  # or it would read as if nothing moved
        parts.append(f"{now.requests_per_s:.1f} requests/s")
    if now.left is not None:
        parts.append(f"{'at most' if now.left.at_most else 'about'} {format_duration(now.left.seconds)} left")
    return " · ".join(parts)


def _finish(job: BatchJob, args: argparse.Namespace) -> None:
    now = job.progress
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
        print_status(f"{args.input} has no lines")
        return
    if now.total == 1:
        told = f"{args.output} holds the one result" + (", an error" if now.errors else "")
    else:
        told = f"{args.output} holds all {now.done} results, {now.errors} of them errors"
    if now.errors:
        told += f" (once mended, --retry-errors tries {'it' if now.errors == 1 else 'them'} again)"
    if now.resumed:
        told += f"; {now.resumed} {'was' if now.resumed == 1 else 'were'} there before"
    if fresh and now.output_tokens:
        told += f"; {format_speed(now.output_tokens, now.seconds)}"
    print_status(told)
    if (first := job.first_error) is not None:
        number, message = first
        print_status(
            f"the {'first error' if now.errors > 1 else 'error'} is of line {number} of {args.input}: {message}"
        )
