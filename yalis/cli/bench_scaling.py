"""`yalis bench scaling`: its flags, and running its settings."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.bench_throughput import add_work_flags, work_config, work_plan
from yalis.cli.flags import add_common_flags, add_engine_flags, parse_float, parse_int, parse_ints
from yalis.cli.signals import INTERRUPTED
from yalis.cli.terminal import print_status
from yalis.errors import YalisError, count_of
from yalis.launch.launchers import EXTERNAL_LAUNCHERS, detect_launcher
from yalis.progress_line import ProgressLine

if TYPE_CHECKING:
    from yalis.config import EngineConfig
    from yalis.study.scaling.settings import ScalingPlan, Setting
    from yalis.study.scaling.slurm import SlurmPlan

ABOUT = "one workload over rank counts, parallelism schemes and all-reduces: speed-up and parallel efficiency"
_VARIED = ("tp", "pp", "dp", "allreduce")  # engine fields that the settings of a study vary


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--out", type=Path, metavar="DIR", required=True,
        help="folder of the study; settings that have a result in it are not run again",
    )  # fmt: skip
    add("--ranks", type=parse_ints, metavar="1,2,4", help="rank counts (default: 1,2,4)")
    add(
        "--schemes", type=_names, metavar="NAMES",
        help="tp, grid, pp, hybrid, dp for each rank count, or one split such as 2x2 or tp2-pp2 (default: tp,pp)",
    )  # fmt: skip
    add(
        "--allreduce", dest="allreduces", type=_names, metavar="NAMES",
        help="communication backends (see `yalis doctor`); ranks of mpi are started by mpirun (default: auto)",
    )  # fmt: skip
    add("--minutes", type=parse_float, metavar="N", help="time limit of one setting, in minutes (default: 30)")
    add("--plot", type=Path, metavar="FILE", help="plot time and efficiency against ranks, as FILE.png and FILE.svg")
    add("--gather", action="store_true", help="run nothing; summarize the results in the folder")
    add_work_flags(parser)
    slurm = parser.add_argument_group("slurm", "write job scripts instead of running on this machine")
    slurm.add_argument("--slurm", type=Path, metavar="FOLDER", help="write one job script per setting to this folder")
    slurm.add_argument(
        "--tasks-per-node", dest="node_ranks", type=parse_int, metavar="N",
        help="ranks per node, also the tensor-parallel size of hybrid (default: 4)",
    )  # fmt: skip
    slurm.add_argument("--cpus-per-task", type=parse_int, metavar="N", default=8, help="cores per rank (default: 8)")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further sbatch option, such as --sbatch=--partition=gpu; may be repeated",
    )
    add_engine_flags(parser, without=_VARIED)
    add_common_flags(parser, json="print the result as one JSON object")
    parser.set_defaults(run=run, uses_engine=False)


def run(args: argparse.Namespace) -> int:
    from yalis.study import plots, results
    from yalis.study.scaling.local_jobs import make_folder
    from yalis.study.scaling.settings import list_settings
    from yalis.study.scaling.slurm import SlurmPlan
    from yalis.study.scaling.summary import failed, find_result, gather
    from yalis.study.throughput import prepare

    if detect_launcher().size > 1:
        raise YalisError(f"bench scaling starts its own ranks; run it without {EXTERNAL_LAUNCHERS}")
    if args.plot is not None:
        plots.check_plot(args.plot, output_folder=args.out)
    config, plan = work_config(args), _plan(args)
    slurm = SlurmPlan(args.cpus_per_task, config.device != "cpu", tuple(args.sbatch))
    settings = list_settings(plan)
    if not args.gather and any(find_result(config, plan, setting) is None for setting in settings):
        prepare(config, plan.throughput)  # report invalid workloads once, not for every setting
    make_folder(args.out)
    if args.slurm is not None:
        return _write_scripts(config, plan, slurm, settings, args.slurm)
    if not args.gather and (status := _run_missing(config, plan, settings)):
        return status
    result = gather(config, plan, settings, shlex.join(["yalis", *sys.argv[1:]]))
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print("\n".join(results.kind_of(result).text(result)))
    bad = failed(result)
    if len(bad) < len(settings):  # a result without figures would replace an earlier one
        print_status(f"wrote {results.write(result, plan.folder)}")
        if args.plot is not None:
            print_status(f"wrote {' and '.join(map(str, plots.write_plot(result, args.plot)))}")
    if bad:
        again = "" if args.gather else "; the same command runs them again"
        count = f"{len(bad)} of {count_of(len(settings), 'setting')}"
        print_status(f"no figures for {count} (see log.txt in the folder of each){again}")
    return 1 if bad else 0


def _plan(args: argparse.Namespace) -> ScalingPlan:
    from yalis.study.scaling.settings import ScalingPlan

    names = ("ranks", "schemes", "allreduces", "minutes", "node_ranks")
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    return ScalingPlan(args.out, throughput=work_plan(args), **fields)


def _write_scripts(
    config: EngineConfig, plan: ScalingPlan, slurm: SlurmPlan, settings: list[Setting], folder: Path
) -> int:
    from yalis.study.scaling.slurm import write_scripts

    *scripts, submit = write_scripts(config, plan, slurm, settings, folder)
    print_status(
        f"wrote {count_of(len(scripts), 'script')}; type `bash {submit}`, and after the jobs this command with "
        "--gather instead of --slurm"
    )
    return 0


def _run_missing(config: EngineConfig, plan: ScalingPlan, settings: list[Setting]) -> int:
    """Run the settings without a result. Returns the exit status: 0, or INTERRUPTED after Ctrl-C."""
    from yalis.study.scaling.local_jobs import run_missing
    from yalis.study.scaling.summary import find_result

    line = ProgressLine()
    try:
        run_missing(config, plan, settings, line.show)
        return 0
    except KeyboardInterrupt:
        line.clear()
        done = sum(find_result(config, plan, setting) is not None for setting in settings)
        count = f"{done} of {count_of(len(settings), 'setting')}"
        print_status(f"stopped: {plan.folder} has {count}; the same command continues")
        return INTERRUPTED
    finally:
        line.clear()


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
