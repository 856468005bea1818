"""The yalis command: finds the verb, runs it, and turns what went wrong into one line and an exit status.

Exit status: 0 done · 1 failed · 2 bad input · 70 a bug · 130 Ctrl-C · 141 the reader of our output went away · 143
SIGTERM, which is answered as Ctrl-C is.
Parsing imports neither torch nor transformers, so `yalis --help` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from yalis import __version__, env
from yalis.cli import batch, bench, chat, doctor, generate, lab, models, plan, profile, report
from yalis.cli.flags import Parser, engine_config
from yalis.cli.signals import INTERRUPTED, TERMINATED, sigterm_as_ctrl_c
from yalis.cli.terminal import tell
from yalis.errors import Rank0Unreachable, YalisError
from yalis.launch.launchers import detect_launcher, process_rank
from yalis.log import configure_logging

VERBS = {
    "generate": (generate, "complete one or more prompts"),
    "chat": (chat, "talk with a model"),
    "batch": (batch, "answer every line of a JSONL file, resuming where it stopped"),
    "bench": (bench, "measure"),
    "profile": (profile, "where the time goes: matmul, attention, communication, other kernels, idle"),
    "report": (report, "results as one page of plots and tables"),
    "lab": (lab, "run a command as ranks on several hosts that are namespaces of this machine"),
    "plan": (plan, "what each rank of a split would hold, before anything is loaded"),
    "models": (models, "models with a short name, and the families that can be loaded"),
    "doctor": (doctor, "what is installed and usable here"),
}


def build_parser() -> Parser:
    parser = Parser(prog="yalis", description="Run large language models, and study how that scales.")
    parser.add_argument("--version", action="version", version=f"yalis {__version__}")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    for name, (module, summary) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        verb.set_defaults(run=module.run)
        module.add_flags(verb)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    with sigterm_as_ctrl_c() as terminated:
        status = _answer(given)
    return TERMINATED if terminated and status == INTERRUPTED else status


def _answer(given: list[str]) -> int:
    debug = "--debug" in given
    _open_closed_streams()
    _accept_any_text()
    try:
        args, unknown = build_parser().parse_known_args(given)
        if unknown:
            verb = " ".join(["yalis", *filter(None, (args.verb, getattr(args, "benchmark", None)))])
            raise YalisError(f"unknown argument {unknown[0]!r}; type `{verb} --help` for what is accepted")
        if args.verb is None:
            raise YalisError(
                'no verb given; type `yalis --help` for the verbs, or `yalis generate "The capital of France is"`'
            )
        configure_logging(process_rank())
        env.share_cores()  # before torch comes
        status = _run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as stop:
        if debug:
            traceback.print_exc()
        if process_rank() == 0:
            _say(f"stopped: {stop}" if str(stop) else "stopped")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except (YalisError, OSError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        if process_rank() == 0 or isinstance(error, Rank0Unreachable):  # rank 0 says it for all
            _say(f"error: {_sentence(error)}")
        if isinstance(error, OSError):
            _drop_stdout()
        return error.exit_code if isinstance(error, YalisError) else 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        name = type(error).__name__
        _say(f"internal error: {name}: {_one_line(error)}; run again with --debug for the traceback")
        return 70


def _run(args: argparse.Namespace) -> int:
    """The verb, on the one rank that reads and prints; other ranks of a launcher serve it until it is done."""
    run: Callable[[argparse.Namespace], int] = args.run
    if not getattr(args, "serves_ranks", False) or detect_launcher().size == 1:
        return run(args)
    from yalis.engine.worker import lead_or_serve

    with lead_or_serve(engine_config(args)) as first:
        return run(args) if first else 0


def _open_closed_streams() -> None:
    """Python has None for a standard stream that was closed (`>&-`); here nothing comes from it and nothing arrives."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  for as long as we run


def _accept_any_text() -> None:
    """Characters that the terminal's encoding lacks are written as escapes. Input bytes that are no text are kept, as
    in arguments, and refused where the text is used."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        unnamed = "the output could not be written: " if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else unnamed
        return f"{where}{error.strerror or _one_line(error)}"
    if isinstance(error, MemoryError):
        return "out of memory; give a smaller --kv-memory, --max-num-seqs or model"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # perhaps nobody reads stderr either
        tell(sentence)


def _drop_stdout() -> None:
    """What is still buffered has nowhere to go; without this Python complains about it on the way out."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
