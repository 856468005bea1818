"""A small job on this host whose rank 1 dies or stalls, to see how the others end.

`python -m yalis.study.accept.child_job FAULT` runs rank 0, which starts rank 1 and prints the outcome as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from yalis.comm.selection import open_backend
from yalis.errors import YalisError
from yalis.launch.join import join
from yalis.launch.launchers import SRUN, environment_without_launcher
from yalis.launch.serving import serving

MODULE = "yalis.study.accept.child_job"
FAULTS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}
_TIME_LIMIT_S = 60.0
_OPERATIONS_BEFORE = 20
_STEP_TIMEOUT_S = 6.0  # a rank that does not answer for this long is lost
#: Within this time the others must end, and name the rank.
LIMIT_S = 30.0


def start(fault: str) -> subprocess.Popen[str]:
    """Start the job, as if no launcher had started this process."""
    variables = environment_without_launcher()
    variables.pop(SRUN.rank_variable, None)
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, fault], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the job. Returns the error that rank 0 raised as "error", and the seconds until then as "seconds"."""
    try:
        out, err = process.communicate(timeout=_TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": "", "seconds": _TIME_LIMIT_S}
    lines = out.strip().splitlines()
    if lines:
        outcome: dict[str, Any] = json.loads(lines[-1])
        return outcome
    return {"error": err.strip().splitlines()[-1] if err.strip() else "no output", "seconds": _TIME_LIMIT_S}


def main() -> int:
    fault = sys.argv[1]
    torch.set_num_threads(1)
    world = join(2, (MODULE, fault))
    world.set_step_timeout(_STEP_TIMEOUT_S)
    comm = open_backend("torch", world, torch.device("cpu")).group("all", range(2))
    x = torch.ones(1000)
    for _ in range(_OPERATIONS_BEFORE):
        comm.all_reduce(x.fill_(1))
    if world.rank:
        with serving(world):
            os.kill(os.getpid(), FAULTS[fault])
            while True:
                comm.all_reduce(x.fill_(1))
    begun = time.monotonic()
    try:
        with world.progress.step():
            while True:
                comm.all_reduce(x.fill_(1))
    except (YalisError, RuntimeError) as error:
        reason = world.explain(error) or error
    sys.stdout.write(json.dumps({"error": str(reason), "seconds": time.monotonic() - begun}) + "\n")
    sys.stdout.flush()
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
