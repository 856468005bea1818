"""Starts peer engines, each in a process of the peers' own Python environment if there is one.

`make peers` creates that environment. Without it, peers run in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yalis
from yalis import env
from yalis.errors import YalisError, YalisFailure
from yalis.launch.launchers import environment_without_launcher
from yalis.registry import Registry
from yalis.study.peers.peer import Peer, PeerSetup, Timing, explain_failure
from yalis.trusted_files import untrusted_reason

ENVIRONMENT = ".peers"  # the folder that `make peers` creates
_GRACE_S = 15.0  # for a worker to exit by itself


PEERS: Registry[type[Peer]] = Registry(
    "peer",
    {"transformers": "yalis.study.peers.engines:TransformersPeer", "vllm": "yalis.study.peers.engines:VllmPeer"},
)


def start_peer(name: str, setup: PeerSetup) -> Peer | str:
    """Start a peer. If it cannot run here, return the reason, which becomes a row of the result."""
    peer: Any = PEERS.load(name)
    try:
        python = find_python()
        ready: Peer = peer(setup) if python is None else PeerProcess(python, name, peer, setup)
        return ready
    except Exception as error:
        return explain_failure(error)


def find_python() -> Path | None:
    """Return the Python of the peers' environment: of YALIS_PEERS, or of `.peers` in the checkout of this package.

    None if there is none: peers then run in this process. The current folder is not searched, because its files may be
    of another user. Raises YalisError if another user could change the environment.
    """
    named = env.peers_environment()
    if named == "":
        return None
    folder = Path(yalis.__file__).parents[1] / ENVIRONMENT if named is None else Path(named).expanduser()
    python = folder / "bin" / "python3"
    if named is None and not python.exists():
        return None
    packages = sorted(folder.glob("lib/python*/site-packages"))
    for path in (python, folder / "pyvenv.cfg", *packages):
        # The interpreter that the environment was made with is not checked: this process runs one like it.
        if (reason := untrusted_reason(path, follow=False)) is not None:
            raise YalisError(
                f"the peers' environment {folder} is not used, because {reason}; install your own with `make peers`, "
                "or name another with YALIS_PEERS"
            )
    return python


class PeerProcess:
    """A peer in a process of another Python. The process exits with this object or this process, even if killed."""

    def __init__(self, python: Path, name: str, peer: type[Peer], setup: PeerSetup) -> None:
        import torch

        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="yalis-peer-", ignore_cleanup_errors=True)
        self._limit = env.peer_timeout()
        self._received = b""
        self._failure = ""  # why the process is gone; empty while it runs
        home, self._log = Path(self._folder.name), Path(self._folder.name, "log")
        (home / "yalis").symlink_to(Path(yalis.__file__).parent)  # without the other packages installed with it
        variables = env.without_openmp_spin_limit(environment_without_launcher())
        path = os.pathsep.join(filter(None, [str(home), variables.get("PYTHONPATH")]))
        self._socket, worker_socket = socket.socketpair()
        with worker_socket, self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python.absolute(), "-m", "yalis.study.peers.worker", str(worker_socket.fileno()), home],
                    env={**variables, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TMPDIR": str(home)},
                    pass_fds=[worker_socket.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # so that its group can be killed, and Ctrl-C reaches only this process
                )
            except OSError as error:
                self._socket.close()
                raise YalisFailure(
                    f"{python} cannot be run ({error.strerror}); type make peers, or name another environment with "
                    "YALIS_PEERS"
                ) from error
        self.close = weakref.finalize(self, _stop, self._process, self._socket, self._folder)
        values = {
            **asdict(setup),
            "path": str(setup.path.absolute()),
            "dtype": str(setup.dtype).removeprefix("torch."),
            "device": str(setup.device),
        }
        location = f"{peer.__module__}:{peer.__qualname__}"
        self.version: str = self._request(peer=location, setup=values, threads=torch.get_num_threads())["version"]

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        return Timing(**self._request(prompts=prompts, output_len=output_len))

    def _request(self, **request: Any) -> dict[str, Any]:
        if self._failure:
            raise YalisFailure(self._failure)
        with contextlib.suppress(OSError):  # the process is gone, which _receive reports
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        reply: dict[str, Any] = json.loads(self._receive())
        if "error" in reply:
            raise YalisFailure("; ".join([reply["error"], *self._cause(reply["error"])]))
        return reply

    def _receive(self) -> bytes:
        """Return the next line. Kill the process and raise YalisFailure if it does not come."""
        deadline = time.monotonic() + self._limit
        self._socket.settimeout(1.0)
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() > deadline:
                    self._fail(f"{self.name} sent no answer for {self._limit:g} s (YALIS_PEER_TIMEOUT)")
                if self._process.poll() is None:  # children of a dead process may keep the connection open
                    continue
                data = b""
            except OSError:
                data = b""
            if not data:
                self._fail(f"the process of {self.name} exited ({self._exit_reason()})")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _fail(self, why: str) -> None:
        self._failure = why
        _kill(self._process)
        self.close()
        raise YalisFailure(why)

    def _cause(self, known: str) -> list[str]:
        """Return the last exception in the log, unless `known` has it: it may come from a process the peer started."""
        ends = re.findall(r"\b\w+(?:Error|Exception): .+", self._log.read_text(errors="replace"))
        return [end[:200] for end in ends[-1:] if end not in known]

    def _exit_reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        how = "no status yet" if status is None else f"exit status {status}" if status >= 0 else f"signal {-status}"
        lines = self._log.read_text(errors="replace").split("\n")
        printed = [" ".join(line.split()) for line in lines if line.strip()]
        return f"{how}: {printed[-1][:200]}" if printed else how


def _stop(process: subprocess.Popen[bytes], sock: socket.socket, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Let a worker exit by itself, then kill its process group."""
    sock.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill(process)
        folder.cleanup()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
