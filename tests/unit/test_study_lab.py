"""The parts of the lab that can be tested without creating hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from yalis.errors import YalisError
from yalis.host_memory import HostMemory
from yalis.kernels.compiler import Unavailable
from yalis.study.lab import hosts, switch


def test_delays_and_rates() -> None:
    assert [hosts.parse_delay(text) for text in ("0", "1ms", "200us", "0.2 ms", ".5s")] == pytest.approx(
        [0, 1e-3, 2e-4, 2e-4, 0.5]
    )
    assert [hosts.parse_rate(text) for text in ("10gbit", "2.5Gbit", "100mbit", "8kbit")] == [1e10, 2.5e9, 1e8, 8e3]
    for text in ("", "1", "-1ms", "1 hour", "11s", "ms"):
        with pytest.raises(YalisError, match="not a link delay; give one such as 1ms"):
            hosts.parse_delay(text)
    for text in ("", "10", "0gbit", "10gb"):
        with pytest.raises(YalisError, match="not a link rate; give one such as 10gbit"):
            hosts.parse_rate(text)


def test_errors_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(YalisError, match="only root can create; type sudo before the same command"):
        hosts.Lab(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "find_program", lambda name: None)
    assert hosts.missing() == "creating hosts needs `ip`, which is not installed; on Debian type apt install iproute2"
    monkeypatch.setattr(hosts, "find_program", lambda name: name)
    refused = subprocess.CompletedProcess([], 1, "", "unshare: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: refused)
    assert "not allowed here (unshare: Operation not permitted)" in str(hosts.missing())


def test_more_ranks_than_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "read_host_memory", lambda: HostMemory(3 * 2**30))
    hosts.check_memory(6)
    with pytest.raises(YalisError, match=r"99 ranks need about 49.5 GiB of memory, of which 3.0 .* at most 6 ranks"):
        hosts.check_memory(99)
    monkeypatch.setattr(hosts, "read_host_memory", lambda: HostMemory(None))
    hosts.check_memory(99)


def test_the_switch_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable, match="no-such-compiler was not found"):
        switch.build()
    monkeypatch.delenv("CC")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(switch, "FLAGS", (*switch.FLAGS, "-Wall", "-Wextra", "-Werror"))
    program = switch.build()
    made = program.stat().st_mtime_ns
    assert switch.build() == program
    assert program.stat().st_mtime_ns == made
    done = subprocess.run([program, "0", "0", "0"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: switch DELAY_NS BITS_PER_SECOND PORTS\n")
