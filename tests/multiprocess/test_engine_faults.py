"""A rank that dies, fails or never arrives ends the job within seconds, with a message and no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.engine_job import ForkServer, Job, start
from tests.multiprocess.launch_job import HOST, free_port
from yalis.launch.heartbeat import LOADING, WARMING_UP

DEADLINE = 10.0
PHASES = {"loading": LOADING, "prefill": "running", "decode": "running"}


def generate(model: str, *flags: str) -> list[str]:
    prompt = ["--prompt-ids", "5,17,99,3,8,41", "--max-tokens", "200", "--ignore-eos"]
    return ["generate", "--model", model, *prompt, "--device", "cpu", *flags]


def wait_for(note: Path, seconds: float = 60) -> None:
    deadline = time.time() + seconds
    while not (note.exists() and note.read_text()):
        assert time.time() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("moment", "split"), [(moment, ("--pp", "2")) for moment in PHASES] + [("decode", ("--dp", "2"))]
)
def test_a_killed_rank_under_a_launcher(
    fork_server: ForkServer, model: str, tmp_path: Path, moment: str, split: tuple[str, str]
) -> None:
    """Rank 2 is in the second stage, or leads the second replica."""
    note, port = tmp_path / "note", free_port()
    argv = generate(model, "--prompt-ids", "7,8", "--tp", "2", *split)
    job = fork_server.start(argv, 4, fault=f"2 kill {moment} {note}", port=port)
    ended = job.finish()
    assert ended.within(DEADLINE, note)
    assert ended.statuses == [1, 1, -signal.SIGKILL, 1]
    assert f"rank 2 on {HOST} (pid {job.pids[2]}) died while {PHASES[moment]}" in ended.errors
    assert ("tokens of at most 400" in ended.errors) == bool(ended.outputs[0])  # the tokens generated before
    assert moment == "decode" or not ended.outputs[0]
    assert not any(ended.outputs[1:])
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("moment", ["loading", "decode"])
def test_all_ranks_exit_when_rank_0_is_killed(fork_server: ForkServer, model: str, tmp_path: Path, moment: str) -> None:
    note, port = tmp_path / "note", free_port()
    job = fork_server.start(generate(model, "--tp", "2", "--pp", "2"), 4, fault=f"0 kill {moment} {note}", port=port)
    ended = job.finish()
    assert ended.within(DEADLINE, note)
    assert ended.statuses == [-signal.SIGKILL, 1, 1, 1]
    # Other ranks name their own phase: they may have loaded their part already.
    phase = PHASES[moment].replace(LOADING, f"({LOADING}|{WARMING_UP})")
    assert re.search(rf"rank 0 on {HOST} \(pid {job.pids[0]}\) died while {phase}\n", ended.errors)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_killed_rank_under_torchrun(model: str, tmp_path: Path) -> None:
    """torchrun notices the death too, and then ends rank 0."""
    note = tmp_path / "note"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "yalis"]
    ended = start([*torchrun, *generate(model, "--tp", "2", "--pp", "2")], tmp_path, f"2 kill decode {note}").finish()
    assert ended.statuses == [1]
    assert ended.within(DEADLINE, note)
    messages = [line for line in ended.errors.splitlines() if line.startswith("yalis: ")]
    assert any(f"rank 2 on {HOST}" in line and "died while running" in line for line in messages), ended.errors
    assert re.fullmatch(
        r"(\d+( \d+)*\n)?", *ended.outputs
    )  # the tokens generated before, if there was time to print them


@pytest.mark.parametrize(("split", "moment"), [("--tp", "prefill"), ("--pp", "loading"), ("--dp", "decode")])
def test_the_error_of_a_rank_is_reported(fork_server: ForkServer, model: str, split: str, moment: str) -> None:
    """And not the connections that break because of it."""
    ended = fork_server.run(generate(model, "--prompt-ids", "7,8", split, "2"), fault=f"1 raise {moment}")
    assert ended.statuses == [1]
    (line,) = ended.errors.splitlines()
    assert f"error: rank 1 on {HOST}: RuntimeError: a bug" in line


def test_the_error_of_a_rank_under_a_launcher(fork_server: ForkServer, model: str) -> None:
    argv = generate(model, "--prompt-ids", "7,8", "--tp", "2", "--dp", "2")
    for flags, tracebacks in (((), 0), (("--debug",), 1)):
        ended = fork_server.run([*argv, *flags], 4, fault="3 raise decode")
        assert ended.statuses == [1] * 4
        assert f"yalis: rank 3 on {HOST}: RuntimeError: a bug" in ended.errors
        assert ended.errors.count('raise RuntimeError("a bug")') == tracebacks
        assert "died while" not in ended.errors


# Stopped and hung ranks


def test_a_stopped_rank_is_named(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    argv = generate(model, "--prompt-ids", "7,8", "--dp", "2", "--step-timeout", "3")
    ended = fork_server.run(argv, fault=f"1 stop decode {note}")
    assert ended.within(9, note)
    assert ended.statuses == [1]
    (line,) = ended.errors.splitlines()
    assert re.search(rf"rank 1 on {HOST} \(pid \d+\) has not answered for [345] s while running: it is stopped", line)


def test_a_rank_that_hangs_in_a_step_is_named(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    ended = fork_server.run(generate(model, "--tp", "2", "--step-timeout", "3"), fault=f"1 sleep decode {note}")
    assert ended.within(10, note)
    assert ended.statuses == [1]
    (line,) = ended.errors.splitlines()
    assert f"rank 1 on {HOST} (pid " in line
    assert "holds up a step for 3 s; give a larger --step-timeout" in line


def test_all_ranks_end_when_rank_0_is_stopped(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    """Once rank 0 is continued, it reports that it was stopped."""
    note = tmp_path / "note"
    job = fork_server.start(generate(model, "--tp", "2", "--step-timeout", "3"), fault=f"0 stop loading {note}")
    wait_for(note)
    while len(job.left()) > 1:
        time.sleep(0.05)
        assert time.time() - float(note.read_text()) < 8
    os.kill(job.pids[0], signal.SIGCONT)
    ended = job.finish(10)
    assert ended.statuses == [1]
    by_rank_1, by_rank_0 = ended.errors.splitlines()
    assert re.search(r" s while (loading the model|warming up): it is stopped \(SIGSTOP\)$", by_rank_1)
    assert re.search(rf"error: rank 0 on {HOST} \(pid \d+\) was stopped for \d s, and the other ranks", by_rank_0)


BUSY = """
import ctypes, os, signal
from yalis import LLM, SamplingParams

sampling = SamplingParams(max_tokens=4, ignore_eos=True)
with LLM(MODEL, tp=2, device="cpu", step_timeout=3) as llm:
    before = llm.generate([[5, 17, 99]], sampling)
    child = os.fork()
    if not child:
        signal.pause()
    ctypes.PyDLL(None).sleep(6)  # holds Python's GIL, longer than the limits
    os.kill(os.getpid(), signal.SIGSTOP)
    after = llm.generate([[5, 17, 99]], sampling)
    assert before[0].completions[0].token_ids == after[0].completions[0].token_ids
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_a_script_may_compute_stop_and_fork_between_two_calls(
    fork_server: ForkServer, model: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUSY.replace("MODEL", repr(model)))
    job = fork_server.start([str(script)])
    stat = Path(f"/proc/{job.pids[0]}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.1)
    time.sleep(5)  # as after Ctrl-Z
    os.kill(job.pids[0], signal.SIGCONT)
    ended = job.finish()
    assert (ended.statuses, ended.errors) == ([0], "")


def test_a_rank_that_is_stopped_at_the_end_is_killed(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    ended = fork_server.run(generate(model, "--tp", "2", "--max-tokens", "4"), fault=f"1 stop shutdown {note}")
    assert ended.within(12, note)
    assert ended.statuses == [0]  # the results are complete
    assert "had to be killed after the last request: it is stopped (SIGSTOP)" in ended.errors.splitlines()[-1]


def test_a_rank_killed_while_memory_is_shared_leaves_nothing(fork_server: ForkServer, model: str) -> None:
    ended = fork_server.run(generate(model, "--tp", "2"), fault="1 kill connecting")  # finish() looks into /dev/shm
    assert ended.statuses == [1]
    assert "killed by SIGKILL) died while connecting" in ended.errors


def test_one_sigterm_ends_a_job_with_a_stopped_rank(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    job = fork_server.start(generate(model, "--prompt-ids", "7,8", "--dp", "2"), fault=f"1 stop decode {note}")
    wait_for(note)
    terminate(job)
    ended = job.finish()
    assert ended.within(15, note)
    assert ended.statuses == [143]
    reason, stopped = ended.errors.splitlines()
    assert re.search(r"while (running|closing): it is stopped \(SIGSTOP\)", reason)
    assert stopped.startswith("yalis: stopped: ")


def test_a_rank_that_never_arrives_is_named(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    argv = generate(model, "--tp", "2", "--pp", "2", "--join-timeout", "2")
    job = fork_server.start(argv, 4, fault="2 sleep arriving")
    time.sleep(5)
    os.kill(job.pids[2], signal.SIGKILL)  # as the launcher would
    ended = job.finish()
    assert ended.statuses == [1, 1, -signal.SIGKILL, 1]
    assert sorted(ended.times)[2] - sorted(ended.times)[0] < 3
    message = f"yalis: error: rank 2 of 4 did not arrive at rank 0 ({HOST}, address "
    assert [line.startswith(message) for line in ended.errors.splitlines()] == [True]
    assert "within 2 s" in ended.errors


def test_other_ranks_report_that_rank_0_never_arrived(fork_server: ForkServer, model: str) -> None:
    job = fork_server.start(generate(model, "--tp", "2", "--join-timeout", "2"), 2, fault="0 sleep arriving")
    time.sleep(5)
    os.kill(job.pids[0], signal.SIGKILL)
    ended = job.finish()
    assert ended.statuses == [-signal.SIGKILL, 1]
    assert ended.errors.startswith(f"yalis: error: rank 1 on {HOST} did not reach rank 0 at ")
    assert ended.errors.count("\n") == 1


# Ranks that rank 0 started itself

FAULTS = """
import json, os, signal, time
from yalis import LLM, SamplingParams
from yalis.errors import YalisFailure
from yalis.launch import rank0_monitor

rank0_monitor.STUCK_S = 1.0  # seconds for rank 0 to return from its current operation after a death
model, note = ARGUMENTS
sampling = SamplingParams(max_tokens=40, ignore_eos=True)

def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()

def kill(llm):
    os.kill(llm._world.members[1].pid, signal.SIGKILL)
    open(note, "w").write(str(time.time()))
    time.sleep(2)

def attempt(fault, **fields):
    os.environ["YALIS_TEST_FAULT"] = f"1 {fault} {note}"
    calls = 0
    try:
        with LLM(model, tp=2, device="cpu", **fields) as llm:
            if fault == "kill unused":
                kill(llm)
            llm.generate([[5, 17, 99]], sampling)
            calls += 1
            kill(llm)
            llm.generate([[5, 17, 99]], sampling)
    except YalisFailure as error:
        took = time.time() - float(open(note).read())
        print(json.dumps([fault, calls, str(error), took, children()]), flush=True)

for fault in ("kill loading", "kill prefill", "kill decode", "kill unused", "kill later"):
    attempt(fault)
attempt("sleep arriving", join_timeout=2)
del os.environ["YALIS_TEST_FAULT"]
llm = LLM(model, tp=2, device="cpu")
llm.generate([[5, 17, 99]], sampling)
ranks, begin = children(), time.time()
del llm  # without close()
print(json.dumps(["unreferenced", len(ranks), "", time.time() - begin, children()]), flush=True)
"""


def test_a_script_catches_the_failure_and_creates_a_new_llm(
    fork_server: ForkServer, model: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAULTS.replace("ARGUMENTS", repr((model, str(tmp_path / "note")))))
    ended = fork_server.start([str(script)]).finish(120)
    assert ended.statuses == [0], ended.errors
    found = [json.loads(line) for line in ended.outputs[0].splitlines()]
    assert all(took < DEADLINE for *_, took, _ in found)
    assert [left for *_, left in found] == [[]] * 7  # neither running nor zombies
    messages = {fault: message for fault, _, message, *_ in found}
    phases = {"loading": " while loading the model", "prefill": " while running", "decode": " while running"}
    for moment, phase in {**phases, "unused": "", "later": ""}.items():
        assert messages[f"kill {moment}"].startswith(f"rank 1 on {HOST} (pid ")
        assert messages[f"kill {moment}"].endswith(f", killed by SIGKILL) died{phase}")
    assert messages["sleep arriving"].startswith("rank 1 of 2 did not arrive at rank 0")
    assert [calls for _, calls, *_ in found] == [0, 0, 0, 0, 1, 0, 1]
    assert ended.errors == ""  # nothing is printed: the script got the exception


@pytest.mark.parametrize("victim", [0, 1])
def test_the_command_ends_when_a_rank_is_killed(
    fork_server: ForkServer, model: str, tmp_path: Path, victim: int
) -> None:
    note = tmp_path / "note"
    ended = fork_server.run(generate(model, "--tp", "2"), fault=f"{victim} kill decode {note}")
    assert ended.within(DEADLINE, note)
    assert ended.statuses == [1 if victim else -signal.SIGKILL]
    (line,) = ended.errors.splitlines()
    assert f"rank {victim} on {HOST} (pid " in line
    if victim == 0:
        assert line.endswith("died while running")
    else:
        found = re.search(r"died while running; (\d+) tokens? of at most 200$", line)
        assert found, line
        assert len(ended.outputs[0].split()) == int(found[1])


def interrupt(job: Job) -> None:
    os.killpg(job.pids[0], signal.SIGINT)  # as a terminal does


def interrupt_twice(job: Job) -> None:
    interrupt(job)
    time.sleep(0.5)
    interrupt(job)


def terminate(job: Job) -> None:
    os.kill(job.pids[0], signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "send", "status", "seconds"),
    [
        ("slow", interrupt, 130, 5),
        ("sleep", interrupt_twice, 130, 5),  # rank 0 hangs in a collective
        ("slow", terminate, 143, 5),
    ],
    ids=["INT", "INT-twice", "TERM"],
)
def test_a_signal_during_generation(fork_server, model, tmp_path, fault, send, status, seconds) -> None:
    note = tmp_path / "note"
    job = fork_server.start(generate(model, "--tp", "2"), fault=f"1 {fault} decode {note}")
    wait_for(note)
    note.write_text(str(time.time()))
    send(job)
    ended = job.finish()
    assert ended.statuses == [status]
    assert ended.within(seconds, note)
    assert "Traceback" not in ended.errors
    if send is not interrupt_twice:  # the tokens so far are printed
        tokens = len(ended.outputs[0].split())
        assert tokens > 0
        assert ended.errors == f"yalis: stopped: {tokens} tokens of at most 200\n"
