"""Generate a result for every line of a JSONL file. After a crash, Ctrl-C or SIGTERM the same command resumes the job.
A result belongs to its prompt, sampling, --dtype and model. The model is identified by its path: a checkpoint that was
changed in place counts as the same model.

In float32 the results of a resumed job equal those of an uninterrupted one, token for token. In bfloat16 and float16 a
result may differ where two tokens were almost equally likely, because the batches were composed differently. Log
probabilities may differ in their last digits. Exit status 1 if there are lines and all their results are errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import (
    add_common_flags,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    name_flags,
    sampling_fields,
)
from yalis.cli.loading import load_llm
from yalis.cli.signals import INTERRUPTED
from yalis.cli.terminal import format_duration, format_speed, print_status, report_model_defaults
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.progress_line import ProgressLine

if TYPE_CHECKING:
    from yalis.batch.job import BatchJob
    from yalis.batch.progress import JobProgress
    from yalis.config import EngineConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN.jsonl", type=_source, help='lines of the OpenAI batch format, or such as {"prompt": "..."}'
    )
    parser.add_argument(
        "output", metavar="OUT.jsonl", type=_target, help="one result per line, in the order in which they finish"
    )
    parser.add_argument(
        "--format", choices=("flat", "openai"), metavar="FORMAT",
        help="openai: lines as the OpenAI batch API writes them; flat: text and token ids at the top level (default: "
        "as the results in OUT.jsonl; if it has none, openai if the first line of IN.jsonl has a body, else flat)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-errors", action="store_true", help="remove error results from OUT.jsonl and run those lines again"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)  # defaults for lines that do not set them
    add_common_flags(parser, json="print a summary as a JSON object at the end")


def _source(text: str) -> Path:
    if text == "-":
        raise YalisError(
            "standard input can be read only once, and a job reads its input twice; save it to a file first"
        )
    return Path(text)


def _target(text: str) -> Path:
    if text == "-":
        raise YalisError("a job that writes to standard output could not be resumed; give a file")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    config, given = engine_config(args), sampling_fields(args)
    from yalis.batch.job import BatchJob, ModelFailed
    from yalis.checkpoint.generation_config import find_sampling_defaults

    # Part of each request's digest, so that results of other defaults are not taken for this job's.
    model_defaults = find_sampling_defaults(config.model) if config.generation_config == "auto" else {}
    report_model_defaults(model_defaults, given)

    line = ProgressLine()
    stopped: str | None = None  # how to resume a job that was stopped
    defaults, name = {**model_defaults, **given}, _identify(config)
    with BatchJob(args.input, args.output, name, defaults, args.retry_errors, args.format, config.model) as job:
        _warn(job.unknown_ids, job.locked, args.output)
        try:
            job.run(
                lambda: load_llm(config, line),
                report=lambda progress: line.show(_status(progress)),
                describe=lambda error: name_flags(str(error)),
            )
        except KeyboardInterrupt:
            stopped = _how_to_resume(job, args.output)
        except ModelFailed as failure:
            raise YalisFailure(f"{failure}; {_how_to_resume(job, args.output)}") from failure
        finally:
            line.clear()
    now = job.progress
    if stopped is not None:
        print_status(f"stopped: {stopped}")
        return INTERRUPTED
    _finish(job, args)
    return 1 if now.total and now.errors == now.total else 0


def _how_to_resume(job: BatchJob, output: Path) -> str:
    try:
        job.verify_output()
    except YalisFailure as displaced:
        return str(displaced)
    now = job.progress
    if not job.has_results:
        return "nothing was written"
    return f"{output} holds {now.done} of {count_of(now.total, 'result')}; run the same command again to continue"


def _identify(config: EngineConfig) -> str:
    """Return everything about the model that a result depends on; a local model is named by its absolute path."""
    path = Path(config.model).expanduser()
    name = str(path.resolve()) if path.exists() else config.model
    return json.dumps([name, config.tokenizer, config.load, config.load_seed, config.dtype])


def _warn(unknown_ids: list[str], locked: bool, output: Path) -> None:
    if unknown_ids:
        unknown = f"{count_of(len(unknown_ids), 'result')} whose {'id is' if len(unknown_ids) == 1 else 'ids are'}"
        print_status(f"{output} also holds {unknown} not in the input (such as {unknown_ids[0]!r}); kept")
    if not locked:
        print_status(f"the file system of {output} has no locks; make sure that only one job writes to it")


def _status(now: JobProgress) -> str:
    parts = [f"{now.done}/{now.total} ({100 * now.done // max(now.total, 1)}%)"]
    if not now.generated:
        return f"{parts[0]} · reading the first prompts"
    parts += [f"{now.running} running", f"{now.generated} tokens, {now.tokens_per_s:.1f}/s"]
    if now.requests_per_s >= 0.1:  # a smaller rate would show as 0.0
        parts.append(f"{now.requests_per_s:.1f} requests/s")
    if (left := now.time_left) is not None:
        parts.append(f"{'at most' if left.at_most else 'about'} {format_duration(left.seconds)} left")
    return " · ".join(parts)


def _finish(job: BatchJob, args: argparse.Namespace) -> None:
    now = job.progress
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
        print_status(f"{args.input} has 0 requests, so nothing was written to {args.output}")
        return
    if now.total == 1:
        message = f"{args.output} holds the one result" + (", an error" if now.errors else "")
    else:
        message = f"{args.output} holds all {now.done} results, {now.errors} of them errors"
    if now.errors:
        message += f" (after a fix, --retry-errors runs {'it' if now.errors == 1 else 'them'} again)"
    if now.resumed:
        message += f"; {now.resumed} {'was' if now.resumed == 1 else 'were'} from an earlier run"
    if now.done > now.resumed and now.output_tokens:
        message += f"; {format_speed(now.output_tokens, now.seconds)}"
    print_status(message)
    if (first := job.first_error) is not None:
        line_number, error = first
        label = "first error" if now.errors > 1 else "error"
        print_status(f"the {label} is in line {line_number} of {args.input}: {error}")
