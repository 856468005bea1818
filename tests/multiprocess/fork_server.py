"""Forks ranks from a process that has imported torch already, so that a job does not pay for the import per rank.

`python -m tests.multiprocess.fork_server` reads each job as a line of JSON. It prints the pids of the ranks, then the
exit status of each. A rank runs the yalis command, or a script if its first argument is one, until interpreter exit.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from typing import Any

import yalis.engine.llm  # noqa: F401  the slow import
from tests.multiprocess.fault import install
from yalis.cli.main import main


def report(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def serve() -> dict[str, Any] | None:
    """Fork the ranks of each job. Returns its arguments in a rank, and None in the server after the last job."""
    jobs = os.fdopen(os.dup(0))  # ranks must have an unused sys.stdin
    report(ready=True)
    while line := jobs.readline():
        ranks: dict[int, int] = {}
        for number, arguments in enumerate(json.loads(line)):
            pid = os.fork()
            if not pid:
                return dict(arguments)
            ranks[pid] = number
        report(pids=list(ranks))
        for _ in range(len(ranks)):
            pid, status = os.wait()
            report(number=ranks[pid], status=os.waitstatus_to_exitcode(status), at=time.time())
    return None


def run(argv: list[str], env: dict[str, str], cwd: str, shown: str) -> None:
    os.setsid()
    for number, path in enumerate((os.devnull, f"{shown}.out", f"{shown}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(cwd)
    os.environ.update(env)
    tempfile.tempdir = None  # $TMPDIR may have changed
    install()
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.exit(main(argv))


if __name__ == "__main__":
    job = serve()
    if job is not None:
        run(**job)
