"""Check an installation on the machines where it will run: versions, links, transports, all-reduces on every backend,
a killed and a stalled rank, times, and decoding over several ranks.

Start it with srun, torchrun or mpirun, one rank per GPU, or alone on one machine. It writes a page and an archive."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from yalis.cli.flags import HELP, add_common_flags, parse_float, parse_int
from yalis.cli.signals import INTERRUPTED
from yalis.cli.terminal import print_status
from yalis.errors import YalisError
from yalis.launch.launchers import EXTERNAL_LAUNCHERS, detect_launcher


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer operations and sizes, and no tuning table: about a minute")
    add("--out", type=Path, metavar="DIR", default=Path("acceptance"), help="output folder (default: acceptance)")
    add("--ranks", type=parse_int, metavar="N", help=f"ranks to start on this machine (without {EXTERNAL_LAUNCHERS})")
    add("--ranks-per-node", type=parse_int, metavar="N", help="treat this many consecutive ranks as a node")
    add("--ranks-per-gpu", type=parse_int, metavar="N", default=1, help="ranks that may share a GPU (default: 1)")
    add("--device", metavar="NAME", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--backends", metavar="NAMES", help="backends to check, such as torch,nvrar (default: all that can be used)")
    add(
        "--machine", metavar="NAME", default="", help="show what the planner predicts for this machine, by name or file"
    )
    add("--join-timeout", type=parse_float, metavar="SECONDS", default=300.0,
        help="time limit for all ranks to join (default: 300)")  # fmt: skip
    add("--insecure-rendezvous", action="store_true", help=HELP["insecure_rendezvous"])
    add_common_flags(parser, json="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    _check(args)
    launch = detect_launcher()
    if not launch.launcher:
        return _start_ranks(args)
    if args.ranks is not None and args.ranks != launch.size:
        raise YalisError(f"--ranks is {args.ranks}, but {launch.launcher} started {launch.size}; leave --ranks out")
    from yalis.engine.interrupts import if_stopped
    from yalis.progress_line import ProgressLine
    from yalis.study.accept.line import FAILED, Line, summarize
    from yalis.study.accept.plan import BACKENDS, PAGE, AcceptPlan
    from yalis.study.accept.run import accept, archive_of

    backends = tuple(args.backends.split(",")) if args.backends else BACKENDS
    plan = AcceptPlan(
        args.quick, args.device, backends, args.ranks_per_node, args.ranks_per_gpu, args.machine, args.join_timeout
    )
    with ProgressLine() as progress, if_stopped(f"{args.out / PAGE} has what was done"):

        def show(line: Line) -> None:
            progress.clear()
            if not args.json:
                print(line, flush=True)

        def report(text: str) -> None:
            if launch.rank == 0:
                progress.show(text)

        command = shlex.join(["yalis", *sys.argv[1:]])
        result = accept(plan, args.out, command, report, show, args.insecure_rendezvous)
    if result is None:
        return 0
    outcomes = [row["outcome"] for row in result.rows]
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print(summarize(outcomes))
    print_status(f"wrote {args.out / PAGE} and {archive_of(args.out)}")
    return 1 if FAILED in outcomes else 0


def _check(args: argparse.Namespace) -> None:
    """Raise before any rank is started or joined if an argument is invalid."""
    from yalis.study.accept.plan import BACKENDS

    if args.out.exists() and not args.out.is_dir():
        raise YalisError(f"--out is {args.out}, which is a file; give a folder, such as acceptance")
    for name in args.backends.split(",") if args.backends else ():
        if name not in BACKENDS:
            raise YalisError(f"unknown backend {name!r}; accepted: {', '.join(BACKENDS)}")
    if args.ranks is not None and args.ranks < 2:
        raise YalisError(f"--ranks is {args.ranks}; give at least 2, because an all-reduce needs several ranks")
    if args.machine:
        from yalis.planner.machine import load_machine

        load_machine(args.machine)


def _start_ranks(args: argparse.Namespace) -> int:
    """Start the ranks on this machine: --ranks, else one per GPU, and at least two."""
    import torch

    from yalis.study.accept.run import start_ranks

    ranks = args.ranks or max(2, torch.cuda.device_count() if args.device != "cpu" else 0)
    given = iter(sys.argv[1:])
    argv = [word for word in given if word != "--ranks" or not next(given)]
    try:
        return start_ranks(ranks, [word for word in argv if not word.startswith("--ranks=")])
    except KeyboardInterrupt:
        return INTERRUPTED  # rank 0 has said what was done
