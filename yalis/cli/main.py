"""The yalis command: runs a verb, and turns errors into one line on stderr and an exit status.

Exit status: 0 success, 1 failure, 2 invalid input, 70 internal error, 130 Ctrl-C, 141 broken pipe, 143 SIGTERM (handled
like Ctrl-C). Parsing imports neither torch nor transformers, so that `yalis --help` is fast.
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
from yalis.cli import accept, batch, bench, calibrate, chat, doctor, generate, lab, models, plan, profile, report
from yalis.cli.flags import Parser, engine_config, name_flags
from yalis.cli.log_handler import configure_logging
from yalis.cli.signals import INTERRUPTED, TERMINATED, sigterm_as_ctrl_c
from yalis.cli.terminal import print_status
from yalis.errors import NotJoined, YalisError, YalisFailure
from yalis.launch import liveness
from yalis.launch.launchers import detect_launcher, process_rank

VERBS = {
    "generate": (generate, "generate text for one or more prompts"),
    "chat": (chat, "chat with a model"),
    "batch": (batch, "process a JSONL file of requests; an interrupted run can be resumed"),
    "bench": (bench, "run benchmarks"),
    "profile": (profile, "profile steps: time in matmul, attention, communication, other kernels, idle"),
    "report": (report, "make an HTML page of plots and tables from benchmark results"),
    "lab": (lab, "run a command as ranks on emulated hosts (network namespaces of this machine)"),
    "calibrate": (calibrate, "measure this machine and write a machine file for `yalis plan`"),
    "plan": (plan, "show the layers, weights and KV cache of each rank without loading the model"),
    "models": (models, "list the short names of models and the supported model families"),
    "accept": (accept, "check an installation on the machines where it will run, and write a page about it"),
    "doctor": (doctor, "check which packages, devices and backends are usable on this machine"),
}


def build_parser() -> Parser:
    parser = Parser(prog="yalis", description="Run large language models and measure how they scale.")
    parser.add_argument("--version", action="version", version=f"yalis {__version__}")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print the traceback of an error"
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    for name, (module, summary) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        verb.set_defaults(run=module.run)
        module.add_flags(verb)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    with sigterm_as_ctrl_c() as terminated:
        status = _run_command(arguments)
    return TERMINATED if terminated and status == INTERRUPTED else status


def _run_command(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    _open_closed_streams()
    _accept_any_text()
    try:
        args, unknown = build_parser().parse_known_args(arguments)
        if unknown:
            args.parser.refuse_unknown(unknown[0])
        if args.verb is None:
            raise YalisError(
                'no verb given; type `yalis --help` for the verbs, or `yalis generate "The capital of France is"`'
            )
        configure_logging(process_rank(), name_flags)
        env.limit_openmp_spinning()  # before torch is imported
        status = _run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as stop:
        if debug:
            traceback.print_exc()
        if process_rank() == 0:
            _print_error(f"stopped: {stop}" if str(stop) else "stopped")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except (YalisError, OSError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        if process_rank() == 0 or isinstance(error, NotJoined):  # rank 0 prints for all ranks
            _report(error)
        if isinstance(error, OSError):
            _drop_stdout()
        return error.exit_code if isinstance(error, YalisError) else 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and error.name in doctor.REQUIRED:
            if process_rank() == 0:
                hint = "`yalis doctor` lists what else is missing"
                _print_error(f"error: {error.name} is {doctor.how_to_install(error.name)} ({hint})")
            return 1
        name = type(error).__name__
        _print_error(f"internal error: {name}: {_one_line(error)}; run again with --debug for the traceback")
        return 70


def _run(args: argparse.Namespace) -> int:
    """Run the verb on rank 0; under a launcher, the other ranks serve it until it returns."""
    run: Callable[[argparse.Namespace], int] = args.run
    liveness.reword = name_flags
    if not getattr(args, "uses_engine", False) or detect_launcher().size == 1:
        return run(args)
    from yalis.engine.worker import lead_or_serve

    with lead_or_serve(engine_config(args)) as is_leader:
        return run(args) if is_leader else 0


def _open_closed_streams() -> None:
    """Replace standard streams that the shell has closed (`>&-`), which are None in Python, by /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until exit


def _accept_any_text() -> None:
    """Write characters that the terminal cannot encode as escapes, and keep undecodable input bytes as surrogates.

    The code that uses such an input rejects it with a clear message.
    """
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _report(error: Exception) -> None:
    """Print the error, without the part that the liveness monitor has printed when the job failed."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, YalisFailure) and cause.printed):
        cause = cause.__cause__
    if cause is None:
        _print_error(f"error: {_describe(error)}")
    elif rest := _describe(error).removeprefix(name_flags(str(cause))).removeprefix("; "):
        _print_error(rest)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        unnamed = "the output could not be written: " if error.errno == errno.ENOSPC else ""
        subject = f"{error.filename}: " if error.filename else unnamed
        return f"{subject}{error.strerror or _one_line(error)}"
    if isinstance(error, MemoryError):
        return "out of memory; give a smaller --kv-memory, --max-num-seqs or model"
    return name_flags(_one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed too
        print_status(message)


def _drop_stdout() -> None:
    """Discard buffered output that cannot be written; otherwise Python prints an error at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
