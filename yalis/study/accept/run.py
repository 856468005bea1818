"""Runs the stages of an acceptance run on all ranks, and writes its page and archive on rank 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from yalis.comm.topology import Topology
from yalis.config import EngineConfig
from yalis.engine.device import rank_device, share_threads
from yalis.errors import YalisError, YalisFailure, describe_error
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher, environment_without_launcher, torchrun_variables
from yalis.launch.link import listen
from yalis.launch.secret import new_secret
from yalis.launch.serving import report_error
from yalis.launch.world import World
from yalis.study import bandwidth, results
from yalis.study.accept.line import FAILED, IMPOSSIBLE, Line
from yalis.study.accept.plan import MACHINE, PAGE, AcceptPlan, Job
from yalis.study.accept.stages import STAGES
from yalis.study.report.build import write_report
from yalis.study.results import StoredResult
from yalis.study.results.result import Result
from yalis.study.topology import topology_of

_LEAVE_S = 20.0  # for the other ranks to exit after rank 0

Show = Callable[[Line], None]


def accept(
    plan: AcceptPlan, out: Path, command: str, report: Callable[[str], None], show: Show, insecure: bool = False
) -> Result | None:
    """Run all stages with the ranks of the launcher. Returns None on all ranks except rank 0.

    After Ctrl-C or a failure of the job, what was done so far is written too; Ctrl-C is then raised again."""
    world = join(detect_launcher().size, (), plan.join_timeout, insecure)
    if world.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the job
        try:
            job = _prepare(world, plan, out, command, report)
            for stage in STAGES.values():
                list(stage(job))
        except Exception as error:
            report_error(world, error)
            raise
        return None
    return _lead(world, plan, out, command, report, show)


def _prepare(world: World, plan: AcceptPlan, out: Path, command: str, report: Callable[[str], None]) -> Job:
    """Return this rank's part of the run, after checking that all ranks were given the same."""
    world.phase = "accepting"
    if len(set(world.all_gather_object(json.dumps(asdict(plan))))) > 1:
        raise YalisError("the ranks were given different options; type the same command on every rank")
    config = EngineConfig(device=plan.device, ranks_per_gpu=plan.ranks_per_gpu, ranks_per_node=plan.ranks_per_node)
    device = rank_device(config, world)
    share_threads(config, world, device)
    return Job(world, plan, device, Topology.of(world, plan.ranks_per_node), out, command, report)


def _lead(world: World, plan: AcceptPlan, out: Path, command: str, report: Callable[[str], None], show: Show) -> Result:
    lines: list[Line] = []
    stopped, interrupt, name = "", None, "start"
    job: Job | None = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (MACHINE, "acceptance.json", "allreduce.json"):
            (out / old).unlink(missing_ok=True)
        job = _prepare(world, plan, out, command, report)
        for name, stage in STAGES.items():
            report(name)
            for line in stage(job):
                lines.append(line)
                show(line)
    except KeyboardInterrupt as error:
        stopped, interrupt = f"stopped during {name!r}", error
        world.abort(error)
    except Exception as error:
        reason = world.abort(error)
        if job is None:
            raise reason from reason.__cause__
        stopped = f"the job ended during {name!r}"
        lines.append(Line(name, "the job", FAILED, describe_error(reason)))
        show(lines[-1])
    if job is None:
        assert interrupt is not None
        raise interrupt
    for missing in list(STAGES)[list(STAGES).index(name) + 1 :] if stopped else ():
        lines.append(Line(missing, "all", IMPOSSIBLE, stopped))
        show(lines[-1])
    result = _write(job, lines, stopped)
    if interrupt is not None:
        raise interrupt
    return result


def _write(job: Job, lines: Sequence[Line], stopped: str) -> Result:
    """Write the results, the page and the archive."""
    facts = {
        "ranks": job.world.size,
        "shape": str(job.topology),
        "quick": job.plan.quick,
        "stopped": stopped,
        "plan": asdict(job.plan),
    }
    rows = [line.to_row() for line in lines]
    devices = [bandwidth.describe_device(job.device)]
    result = results.new("acceptance", facts, rows, job.command, devices, topology=topology_of(job.world))
    stored = [
        StoredResult(results.write(one, job.out, name), one)
        for one, name in ((result, "acceptance"), *((one, one.kind) for one in job.results))
    ]
    # Plots need matplotlib, which clusters often lack; the page of the lines alone does not.
    with_plots = find_spec("matplotlib") is not None
    write_report(stored if with_plots else stored[:1], job.out / PAGE, "YALIS acceptance")
    archive = archive_of(job.out)
    try:
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(job.out, arcname=job.out.name)
    except OSError as error:
        raise YalisFailure(f"cannot write {archive}: {error.strerror}; give another --out") from error
    return result


def archive_of(out: Path) -> Path:
    """Return the path of the archive of an output folder."""
    return out.absolute().with_name(f"{out.absolute().name}.tar.gz")


def start_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Run `yalis ARGV` as so many ranks on this host, and return the exit status of rank 0."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    base, secret = environment_without_launcher(), new_secret()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            variables = torchrun_variables(rank, ranks, 1, "127.0.0.1", port, secret)
            command = [sys.executable, "-m", "yalis", *argv]
            # In their own session, so that a Ctrl-C of the terminal reaches rank 0 once, through this process.
            processes.append(subprocess.Popen(command, env={**base, **variables}, start_new_session=True))
        return _wait(processes)
    except KeyboardInterrupt:
        processes[0].terminate()  # which stops it as Ctrl-C does, even where that is ignored
        _wait(processes)
        raise
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for rank 0, then for the others, which leave with it."""
    status = processes[0].wait()
    for process in processes[1:]:
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
    return status
