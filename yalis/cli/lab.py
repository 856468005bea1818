"""Run a command on emulated hosts of this machine, as the ranks of one job. Hosts are network namespaces, connected
by links with a delay and a rate. Ranks see the environment of torchrun, or of mpirun with --mpirun:

    yalis lab --hosts 2 --ranks-per-host 2 --delay 1ms -- yalis generate --tp 4 "The capital of France is"

Needs root. On a host the command has the files of this machine, only the network of the lab, and no standard input.
"""

from __future__ import annotations

import argparse
import sys

from yalis.cli.flags import parse_int
from yalis.errors import YalisError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=parse_int, metavar="N", default=2, help="number of hosts (default: 2)")
    parser.add_argument(
        "--ranks-per-host", type=parse_int, metavar="N", default=2, help="ranks on each host (default: 2)"
    )
    parser.add_argument("--delay", metavar="1ms", default="0", help="one-way delay of a link (default: 0)")
    parser.add_argument("--rate", metavar="10gbit", help="bandwidth of a host's link (default: no limit)")
    parser.add_argument("--realtime", action="store_true", help="run ranks with real-time priority, for measurements")
    parser.add_argument("--mpirun", action="store_true", help="start the ranks with Open MPI's mpirun")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of each rank")


def run(args: argparse.Namespace) -> int:
    from yalis.study.lab.hosts import Lab, check_memory
    from yalis.study.lab.ranks import run as run_ranks

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise YalisError("no command given; type it after --, such as -- yalis generate --tp 4 Hello")
    if args.hosts < 1 or args.ranks_per_host < 1:
        raise YalisError(
            f"--hosts is {args.hosts} and --ranks-per-host {args.ranks_per_host}; give at least one of each"
        )
    check_memory(args.hosts * args.ranks_per_host)
    if command[0] == "yalis":  # this installation, not one that the hosts' PATH has
        command = [sys.executable, "-m", *command]
    with Lab(args.hosts, args.delay, args.rate) as lab:
        return run_ranks(lab, args.ranks_per_host, command, () if args.mpirun else None, args.realtime)
