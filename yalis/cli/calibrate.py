"""Measure this machine (device rates, links and communication libraries) and write a machine file for `yalis plan`.
It takes a few minutes, alone, with --ranks, or under srun, torchrun or mpirun."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from yalis.cli.flags import HELP, add_common_flags, parse_int
from yalis.cli.terminal import print_status
from yalis.errors import YalisError
from yalis.launch.launchers import EXTERNAL_LAUNCHERS


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", default=Path("machine.json"), help="machine file (default: machine.json)")
    add("--name", metavar="NAME", default="this-machine", help="name of the machine (default: this-machine)")
    add(
        "--base", metavar="NAME", default="",
        help="machine, by name or file, whose values are used where nothing can be measured, such as a network on one "
        "host (default: they are marked as assumed)",
    )  # fmt: skip
    add(
        "--allreduce", type=Path, metavar="FILE",
        help="result of `yalis bench allreduce` to use, instead of measuring links and libraries",
    )  # fmt: skip
    add("--ranks", type=parse_int, metavar="N", help=f"ranks to start on this machine (without {EXTERNAL_LAUNCHERS})")
    add("--ranks-per-node", type=parse_int, metavar="N", help="treat this many consecutive ranks as a node")
    add("--device", metavar="NAME", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--insecure-rendezvous", action="store_true", help=HELP["insecure_rendezvous"])
    add_common_flags(parser, json="print the machine as one JSON object")


def run(args: argparse.Namespace) -> int:
    from yalis.engine.interrupts import if_stopped
    from yalis.progress_line import ProgressLine

    if args.out.is_dir() or not args.out.absolute().parent.is_dir():
        raise YalisError(f"--out is {args.out}; give a file in an existing folder, such as machine.json")
    with ProgressLine() as line, if_stopped("nothing was written"):
        from yalis.study import results
        from yalis.study.this_machine import CalibrationPlan, calibrate

        result = results.read(args.allreduce) if args.allreduce is not None else None
        source = args.allreduce.name if args.allreduce is not None else "`yalis calibrate`"
        plan = CalibrationPlan(
            args.name, args.base, args.ranks, args.device, args.ranks_per_node, args.insecure_rendezvous
        )
        machine = calibrate(plan, result, source, shlex.join(["yalis", *sys.argv[1:]]), line.show)
    if machine is None:
        return 0  # rank 0 writes it
    data = machine.to_json()
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    if args.json:
        print(json.dumps(data))
    else:
        print(f"{machine.description}\n")
        for path, quantity in machine.quantities().items():
            print(f"{path:<48}{quantity.value:>12.4g}  {quantity.origin:<14}{quantity.source}")
    print_status(f"wrote {args.out}; use it with --machine {args.out}")
    return 0
