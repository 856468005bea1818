"""Ranks forked from a process that has imported torch, so that a job of many costs no more than its work.

`python -m tests.multiprocess.fork_server` reads a job as a line of JSON and says which processes it made, then how each
ended. A rank runs the command line, or a script if its first argument is one, to the interpreter's own end.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from typing import Any

import yalis.engine.llm  # noqa: F401  what takes its time
from tests.multiprocess.fault import install
from yalis.cli.main import main


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def breed() -> dict[str, Any] | None:
    """What this process is to run; None in the fork_server itself once there are no more jobs."""
    jobs = os.fdopen(os.dup(0))  # a rank's sys.stdin is to be unused
    say(ready=True)
    while line := jobs.readline():
        ranks: dict[int, int] = {}
        for number, one in enumerate(json.loads(line)):
            pid = os.fork()
            if not pid:
                return dict(one)
            ranks[pid] = number
        say(pids=list(ranks))
        for _ in range(len(ranks)):
            pid, status = os.wait()
            say(number=ranks[pid], status=os.waitstatus_to_exitcode(status), at=time.time())
    return None


def run(argv: list[str], env: dict[str, str], cwd: str, shown: str) -> None:
    os.setsid()
    for number, path in enumerate((os.devnull, f"{shown}.out", f"{shown}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(cwd)
    os.environ.update(env)
    install()
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.exit(main(argv))


if __name__ == "__main__":
    given = breed()
    if given is not None:
        run(**given)
