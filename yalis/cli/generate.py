"""Complete one or more prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, add_engine_flags, add_sampling_flags, engine_config, sampling_fields
from yalis.cli.loading import load_llm
from yalis.cli.terminal import format_speed, print_status, report_model_defaults
from yalis.engine.interrupts import Stopped, if_stopped, interrupts_held
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.progress_line import ProgressLine
from yalis.types import Completion, Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from yalis.engine.llm import LLM
    from yalis.engine.progress import Progress


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="prompt text; - reads one from standard input")
    parser.add_argument(
        "--prompt-ids",
        metavar="1,2,3",
        action="append",
        default=[],
        help="a prompt as token ids; may be repeated",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)
    add_common_flags(parser, json="print one JSON object per result")


def run(args: argparse.Namespace) -> int:
    config, given = engine_config(args), sampling_fields(args)
    check_logprobs(given, args.json)
    if given.get("max_tokens") == 0 and not args.json:
        raise YalisError("--max-tokens 0 generates no text; add --json to print the log-probabilities of the prompt")
    with if_stopped("nothing was generated"):
        prompts = _prompts(args)
        with ProgressLine() as line:
            loaded = load_llm(config, line)
    with loaded as llm:
        sampling = llm.default_sampling_params(**given)
        report_model_defaults(llm.sampling_defaults, given)
        start = time.monotonic()
        if len(prompts) == 1 and sampling.n == 1 and sys.stdout.isatty() and not args.json:
            tokens = _stream(llm, prompts[0], sampling)
        else:
            tokens = _print_all(llm, prompts, sampling, args.json)
        print_status(format_speed(tokens, time.monotonic() - start))
    return 0


def check_logprobs(given: Mapping[str, Any], as_json: bool) -> None:
    """Refuse flags that only add to JSON output."""
    for name in ("logprobs", "prompt_logprobs"):
        if name in given and not as_json and given.get("max_tokens") != 0:
            raise YalisError(f"--{name.replace('_', '-')} prints nothing without --json; add --json")


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    # Editors and echo end a text with a newline that is not part of the prompt.
    prompts: list[Prompt] = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in args.prompts]
    prompts += [_ids(text) for text in args.prompt_ids]
    if not prompts:
        raise YalisError(
            'no prompt given; type one, such as `yalis generate "The capital of France is"`, or - for standard input'
        )
    return prompts


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise YalisError(f"--prompt-ids is {text!r}; give whole numbers separated by commas, such as 1,2,3") from None


def _stream(llm: LLM, prompt: Prompt, sampling: SamplingParams) -> int:
    tokens, completion = 0, None
    try:
        for chunk in llm.stream([prompt], sampling):
            completion = chunk.completion or completion
            text = chunk.text
            if llm.tokenizer is None:
                text = " ".join(["", *map(str, chunk.token_ids)] if tokens else map(str, chunk.token_ids))
            print(text, end="", flush=True)
            tokens += len(chunk.token_ids)
    except KeyboardInterrupt as interrupt:
        print(flush=True)
        raise Stopped(describe_output(tokens, min(sampling.max_tokens, llm.max_model_len))) from interrupt
    except YalisFailure:
        print(flush=True)  # the text printed so far stays on its own line
        raise
    print()
    report_full_contexts(llm, filter(None, [completion]), sampling)
    return tokens


def _print_all(llm: LLM, prompts: list[Prompt], sampling: SamplingParams, as_json: bool) -> int:
    outputs: list[RequestOutput] = []
    ended: Stopped | YalisFailure | None = None
    max_tokens = len(prompts) * sampling.n * min(sampling.max_tokens, llm.max_model_len)  # until the first progress
    with ProgressLine() as line:

        def show(now: Progress) -> None:
            nonlocal max_tokens
            max_tokens = now.max_output_tokens
            tokens = f"{count_of(now.output_tokens, 'token')} of at most {max_tokens}"
            line.show(f"{now.finished}/{count_of(now.total, 'prompt')} · {tokens}")

        try:
            with if_stopped("nothing was generated"):
                outputs = llm.generate(prompts, sampling, progress=show)
        except (Stopped, YalisFailure) as early:
            outputs, ended = early.done or [], early
    completions = [completion for output in outputs for completion in output.completions]
    tokens = sum(completion.metrics.output_tokens for completion in completions)
    with interrupts_held():
        for position, output in enumerate(outputs if tokens or ended is None else (), 1):
            if as_json:
                print(json.dumps(_object(output)))
            else:
                _print_text(position, output, llm.tokenizer is not None, titled=len(prompts) > 1 or sampling.n > 1)
        sys.stdout.flush()
    if ended is not None:
        requested = len(prompts) * sampling.n
        finished = sum(not _is_cancelled(completion) for completion in completions)
        counts = f", {finished} of {requested} answers finished" if tokens and requested > 1 else ""
        summary = describe_output(tokens, max_tokens) + counts
        if isinstance(ended, Stopped):
            raise Stopped(summary) from ended
        raise YalisFailure(f"{ended}; {summary}") from ended
    report_full_contexts(llm, completions, sampling)
    return tokens


def report_full_contexts(llm: LLM, completions: Iterable[Completion], sampling: SamplingParams) -> None:
    """Print how many completions ended because the context was full, before they had --max-tokens tokens."""
    short = [one for one in completions if one.finish_reason == "length" and len(one.token_ids) < sampling.max_tokens]
    if short:
        count = "an answer" if len(short) == 1 else f"{len(short)} answers"
        print_status(
            f"the context of {llm.max_model_len} tokens ended {count} before --max-tokens {sampling.max_tokens}"
        )


def describe_output(tokens: int, max_tokens: int) -> str:
    return f"{count_of(tokens, 'token')} of at most {max_tokens}" if tokens else "nothing was generated"


def _is_cancelled(completion: Completion) -> bool:
    return completion.finish_reason == "cancelled"


def _object(output: RequestOutput) -> dict[str, Any]:
    from yalis.batch.output import result_fields

    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    return {"prompt": prompt, **result_fields(output), "metrics": asdict(output.metrics)}


def _print_text(position: int, output: RequestOutput, has_text: bool, titled: bool) -> None:
    """Print the completions of one prompt: as text, or as token ids if the model has no tokenizer."""
    prompt = output.prompt if output.prompt is not None else " ".join(map(str, output.prompt_token_ids))
    for index, completion in enumerate(output.completions, 1):
        if titled:
            suffix = f".{index}" if len(output.completions) > 1 else ""
            print(f"[{position}{suffix}] {prompt}" + (" (stopped)" if _is_cancelled(completion) else ""))
        text = completion.text if has_text else " ".join(map(str, completion.token_ids))
        print(text + ("\n" if titled else ""))
