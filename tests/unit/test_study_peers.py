"""Peers in a process of another Python; here it is this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_chat import save_tiny_chat
from yalis.errors import YalisFailure
from yalis.study.peers.engines import TransformersPeer
from yalis.study.peers.peer import PeerSetup, Timing, explain_failure
from yalis.study.peers.process import PEERS, PeerProcess, find_python, start_peer

ROOT = Path(__file__).parents[2]
PRINT, FAIL, CRASH, HANG = range(1, 5)


class FakePeer:
    """A peer whose prompt selects its behaviour."""

    name, version = "fake", "1"

    def __init__(self, setup: PeerSetup) -> None:
        if setup.random_weights:
            import a_package_that_is_not_there  # noqa: F401

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        action = prompts[0][0]
        if action == PRINT:
            os.write(1, b'{"error": "only printed"}\n')
            print('{"error": "only printed"}', flush=True)
        if action == FAIL:
            print("EngineCore: ValueError: where it began", file=sys.stderr, flush=True)
            raise RuntimeError("out of\nluck")
        if action == CRASH:
            if not os.fork():  # a child that keeps the connection open and must not outlive its parent
                time.sleep(60)
            print("some\nlast  words\n", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(60)
        return Timing(0.5, [], 1.0, [[os.getpid(), torch.get_num_threads(), output_len]])


@pytest.fixture
def peers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_PEERS", sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the peer above
    monkeypatch.setattr(PEERS, "_entries", {**PEERS._entries, "fake": f"{__name__}:FakePeer"})


def _setup(path: Path, missing: bool = False) -> PeerSetup:
    return PeerSetup(path, missing, torch.float32, torch.device("cpu"), 32, 2, 32)


def _started(name: str, setup: PeerSetup) -> PeerProcess:
    peer = start_peer(name, setup)
    assert isinstance(peer, PeerProcess), peer
    return peer


def _state(pid: int) -> tuple[str, int]:
    """Return the state of a process and the leader of its group."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:  # it has been waited for
        return "Z", 0
    return state, int(group)


def _ended(pid: int) -> bool:
    return _state(pid)[0] == "Z"


def _running(leader: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if _state(pid)[1] == leader and not _ended(pid)]


def _eventually(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


@pytest.mark.usefixtures("peers_environment")
def test_transformers_in_its_own_process_returns_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_chat(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    setup, prompts = _setup(Path("model")), [[7, 8, 9], [4, 5, 6]]
    peer = _started("transformers", setup)
    here = TransformersPeer(setup)
    timing = peer.run(prompts, 6)
    assert timing.tokens == here.run(prompts, 6).tokens
    assert 0 < timing.first_token < timing.total
    assert len(timing.steps) == 5
    assert peer.version == here.version
    pid = peer._process.pid
    del peer
    assert _ended(pid)


@pytest.mark.usefixtures("peers_environment")
def test_failures_are_one_sentence(tmp_path: Path) -> None:
    peer = _started("fake", _setup(tmp_path))
    assert _failure(peer, FAIL) == "RuntimeError: out of luck; ValueError: where it began"
    assert peer.run([[PRINT]], 3).tokens == [
        [peer._process.pid, torch.get_num_threads(), 3]
    ]  # it keeps running after a failure
    assert _failure(peer, CRASH) == _failure(peer, PRINT) == "the process of fake exited (signal 9: last words)"
    assert _eventually(lambda: not _running(peer._process.pid))
    assert not Path(peer._folder.name).exists()


@pytest.mark.usefixtures("peers_environment")
def test_a_hanging_peer_is_killed(tmp_path: Path) -> None:
    peer = _started("fake", _setup(tmp_path))
    peer._limit = 0.5
    assert _failure(peer, HANG) == "fake sent no answer for 0.5 s (YALIS_PEER_TIMEOUT)"
    assert _ended(peer._process.pid)


@pytest.mark.usefixtures("peers_environment")
def test_a_missing_package_or_environment_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = start_peer("fake", _setup(tmp_path, missing=True))
    name = "a_package_that_is_not_there"
    assert reason == f"{name} is not installed: {sys.prefix}/bin/python3 -m pip install {name}"
    monkeypatch.setenv("YALIS_PEERS", str(tmp_path))
    reason = start_peer("fake", _setup(tmp_path))
    assert reason == (
        f"{tmp_path}/bin/python3 cannot be run (No such file or directory); type make peers, or name another "
        "environment with YALIS_PEERS"
    )


def _failure(peer: PeerProcess, action: int) -> str:
    with pytest.raises(YalisFailure) as raised:
        peer.run([[action]], 1)
    return explain_failure(raised.value)


@pytest.mark.usefixtures("peers_environment")
def test_a_worker_exits_when_its_parent_is_killed() -> None:
    script = """
import os, signal
from tests.unit import test_study_peers as here
here.PEERS._entries["fake"] = here.__name__ + ":FakePeer"
peer = here._started("fake", here._setup(here.ROOT))
print(peer._process.pid, peer._folder.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, folder = done.stdout.split()
    assert _eventually(lambda: _ended(int(pid)))
    assert not Path(folder).exists()


def test_where_the_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YALIS_PEERS", raising=False)
    (tmp_path / "checkout" / "yalis").mkdir(parents=True)
    monkeypatch.setattr("yalis.__file__", str(tmp_path / "checkout" / "yalis" / "__init__.py"))
    assert find_python() is None
    python = tmp_path / "checkout" / ".peers" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_python() == python
    monkeypatch.setenv("YALIS_PEERS", "")
    assert find_python() is None
    monkeypatch.setenv("YALIS_PEERS", "~/x")
    assert find_python() == Path("~/x/bin/python3").expanduser()


def test_an_environment_in_the_current_folder_is_not_executed(tmp_path: Path) -> None:
    python, ran = tmp_path / ".peers" / "bin" / "python3", tmp_path / "ran"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {ran}\n")
    python.chmod(0o755)
    program = f"""
import torch
from pathlib import Path
from yalis.study.peers.peer import PeerSetup
from yalis.study.peers.process import start_peer
print(start_peer("transformers", PeerSetup(Path({str(tmp_path)!r}), True, torch.float32, torch.device("cpu"))))
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("YALIS_PEERS", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert not ran.exists()
    assert done.returncode == 0, done.stderr
