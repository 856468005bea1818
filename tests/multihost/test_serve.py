"""`slurm/serve.sh` over two nodes: the announced URL, the drain before the time limit, and the requeue."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.launchers.launch import YALIS
from tests.launchers.slurm import Slurm
from tests.multihost.hosts import Hosts
from tests.system.processes import ROOT
from tests.tiny_chat import save_tiny_chat

TOKENS = 400  # more than a second over two nodes

#: Streams a completion from the URL in a file; prints a line after the first event, and the last event with tokens.
CLIENT = """
import json, sys, urllib.request
url = open(sys.argv[1]).read().strip()
headers = {"Authorization": "Bearer 0123456789abcdef", "Content-Type": "application/json"}
body = {"prompt": [5, 6, 7], "max_tokens": int(sys.argv[2]), "stream": True, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
tokens = []
for line in urllib.request.urlopen(request, timeout=60):
    if line.startswith(b"data: {"):
        choice = json.loads(line[6:])["choices"][0]
        if not tokens:
            print(url, flush=True)
        tokens += choice["token_ids"]
print(len(tokens), choice["finish_reason"])
"""


def test_a_server_drains_and_announces_its_new_url_after_a_requeue(tmp_path: Path) -> None:
    model, log, announced, key = (
        save_tiny_chat(tmp_path, 2048),
        tmp_path / "log",
        tmp_path / "run" / "url",
        tmp_path / "key",
    )
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    options = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={log}", f"--chdir={tmp_path}"]
    flags = [str(announced), "--model", str(model), "--tp", "2", "--threads", "1", "--api-key-file", str(key)]
    with Hosts(2) as hosts, Slurm(hosts) as slurm:

        def request(tokens: int) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", CLIENT, str(announced), str(tokens)]
            return hosts.run(1, argv, stdout=subprocess.PIPE, text=True)

        submitted = slurm.run(
            ["sbatch", "--parsable", *options, str(ROOT / "slurm/serve.sh"), *flags],
            env={"PATH": f"{Path(YALIS).parent}:{os.environ['PATH']}"},
        )
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.strip()
        _wait(announced.exists, log)
        assert announced.stat().st_mode & 0o777 == 0o600
        running = request(TOKENS)
        assert running.stdout is not None
        first_url = running.stdout.readline().strip()
        assert first_url.startswith(f"http://{hosts.names[0]}:")
        assert slurm.run(["scancel", "--signal=USR1", job]).returncode == 0  # as Slurm does before the time limit
        _wait(lambda: not announced.exists(), log)
        assert running.poll() is None  # the file is gone while the request still runs
        assert running.communicate(timeout=30)[0] == f"{TOKENS} length\n"
        _wait(announced.exists, log)
        assert announced.read_text().strip() != first_url
        assert request(4).communicate(timeout=30)[0] == f"{announced.read_text()}4 length\n"
        assert slurm.run(["scancel", job]).returncode == 0
        _wait(lambda: not slurm.run(["squeue", "--noheader", f"--jobs={job}"]).stdout.strip(), log)
    assert not announced.exists()
    assert log.read_text().count("yalis: serving") == 2
    assert "yalis: error" not in log.read_text()


def _wait(ready: Callable[[], bool], log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, log.read_text() if log.exists() else "the job has not started"
        time.sleep(0.05)
