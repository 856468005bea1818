"""Other engines, measured in the same run on the same tokens, so that a ratio compares like with like.

Where the peers have an environment of their own (`make peers`), each runs in a process of that Python, behind
`worker`; else in ours. The worker imports this file too, so nothing here needs more than torch.
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
from yalis.errors import YalisFailure
from yalis.launch.launchers import environment_without_launcher
from yalis.registry import Registry
from yalis.study.peers.peer import Peer, PeerSetup, Timing, explain_failure

HOME = ".peers"  # what `make peers` makes
_GRACE_S = 15.0  # for a worker to end by itself


PEERS: Registry[type[Peer]] = Registry(
    "peer",
    {"transformers": "yalis.study.peers.engines:TransformersPeer", "vllm": "yalis.study.peers.engines:VllmPeer"},
)


def start_peer(name: str, setup: PeerSetup) -> Peer | str:
    """The peer, ready; or why it cannot run here, which is a line in the table and not the end of the benchmark."""
    peer: Any = PEERS.load(name)
    try:
        python = find_python()
        ready: Peer = peer(setup) if python is None else PeerProcess(python, name, peer, setup)
        return ready
    except Exception as error:
        return explain_failure(error)


def find_python() -> Path | None:
    """The Python of the peers' environment: the named one, or what lies here or beside the package; or none."""
    named = env.peers()
    if named is not None:
        return Path(named).expanduser() / "bin" / "python3" if named else None
    for folder in Path.cwd(), Path(yalis.__file__).parents[1]:
        python = folder / HOME / "bin" / "python3"
        if python.exists():
            return python
    return None


class PeerProcess:
    """A peer in a process of another Python. It ends with this object, or with this process however that ends."""

    def __init__(self, python: Path, name: str, peer: type[Peer], setup: PeerSetup) -> None:
        import torch

        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="yalis-peer-", ignore_cleanup_errors=True)
        self._limit = env.peer_timeout()
        self._heard = b""
        self._gone = ""  # why it can be asked no more
        home, self._chatter = Path(self._folder.name), Path(self._folder.name, "chatter")
        (home / "yalis").symlink_to(Path(yalis.__file__).parent)  # this package alone, not what is installed beside it
        variables = env.without_shared_cores(environment_without_launcher())
        path = os.pathsep.join(filter(None, [str(home), variables.get("PYTHONPATH")]))
        self._socket, theirs = socket.socketpair()
        with theirs, self._chatter.open("wb") as chatter:
            try:
                self._process = subprocess.Popen(
                    [python.absolute(), "-m", "yalis.study.peers.worker", str(theirs.fileno()), home],
                    env={**variables, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TMPDIR": str(home)},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=chatter,
                    stderr=chatter,
                    start_new_session=True,  # what it starts can be ended with it, and Ctrl-C is ours to hear
                )
            except OSError as error:
                self._socket.close()
                raise YalisFailure(
                    f"{python} cannot be run ({error.strerror}); type make peers, or name another environment with "
                    "YALIS_PEERS"
                ) from error
        self.close = weakref.finalize(self, _end, self._process, self._socket, self._folder)
        given = {
            **asdict(setup),
            "path": str(setup.path.absolute()),
            "dtype": str(setup.dtype).removeprefix("torch."),
            "device": str(setup.device),
        }
        where = f"{peer.__module__}:{peer.__qualname__}"
        self.version: str = self._ask(peer=where, setup=given, threads=torch.get_num_threads())["version"]

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        return Timing(**self._ask(prompts=prompts, output_len=output_len))

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._gone:
            raise YalisFailure(self._gone)
        with contextlib.suppress(OSError):  # it has ended, and whoever listens finds out
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        reply: dict[str, Any] = json.loads(self._listen())
        if "error" in reply:
            raise YalisFailure("; ".join([reply["error"], *self._cause(reply["error"])]))
        return reply

    def _listen(self) -> bytes:
        """The next line; ends the process where there is none."""
        deadline = time.monotonic() + self._limit
        self._socket.settimeout(1.0)
        while b"\n" not in self._heard:
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() > deadline:
                    self._give_up(f"{self.name} gave no answer for {self._limit:g} s (YALIS_PEER_TIMEOUT)")
                if self._process.poll() is None:  # one that ended may have left the connection to its children
                    continue
                piece = b""
            except OSError:
                piece = b""
            if not piece:
                self._give_up(f"the process of {self.name} ended ({self._last_words()})")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _give_up(self, why: str) -> None:
        self._gone = why
        _kill(self._process)
        self.close()
        raise YalisFailure(why)

    def _cause(self, known: str) -> list[str]:
        """What went wrong first, where that was in a process the peer started: the end of a traceback it printed."""
        ends = re.findall(r"\b\w+(?:Error|Exception): .+", self._chatter.read_text(errors="replace"))
        return [end[:200] for end in ends[-1:] if end not in known]

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.returncode
        how = "no status yet" if status is None else f"exit status {status}" if status >= 0 else f"signal {-status}"
        lines = self._chatter.read_text(errors="replace").split("\n")
        said = [" ".join(line.split()) for line in lines if line.strip()]
        return f"{how}: {said[-1][:200]}" if said else how


def _end(process: subprocess.Popen[bytes], sock: socket.socket, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Let a worker end by itself, then make it and all that it started."""
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
