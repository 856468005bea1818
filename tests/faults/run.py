"""Runs cases of the fault matrix in parallel and checks how each job ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cases import (
    FAULTS,
    HOSTS,
    MOMENTS,
    SPLITS,
    Case,
    error_sentences,
    wrong_sentences,
    wrong_statuses,
)
from tests.faults.lane import FOLDERS, Lane, ProcessTable, RunningJob
from yalis.study.lab.hosts import Lab

_START_S = 120.0  # for a job to reach the moment of the fault
_FREED_S = 5.0  # for a rank to end after its freeing signal
_RELEASE_S = 2.0  # for the kernel to close the sockets of a process that was killed
_HUNG_S = 10.0  # after the limit; a job that ends before that is late, not hung


@dataclass(frozen=True)
class Limits:
    """In seconds. A job must end within `end` after the fault."""

    step_timeout: float = 10.0
    join_timeout: float = 10.0
    end: float = 15.0


@dataclass
class Outcome:
    """How the job of a case ended."""

    case: Case
    hung: bool = False
    seconds: float | None = None  # from the fault until all processes have ended, except one with a freeing signal
    freed_seconds: float | None = None  # from the freeing signal until the faulty rank has ended
    statuses: dict[int, int] = field(default_factory=dict)  # by rank
    sentence: str = ""  # the last error that was printed
    left: list[str] = field(default_factory=list)  # processes, ports and files that the job left behind
    problems: list[str] = field(default_factory=list)
    errors: str = ""  # the whole error output

    def to_json(self) -> dict[str, object]:
        case = self.case
        return {
            "case": str(case),
            **{name: getattr(case, name) for name in ("fault", "phase", "split", "rank")},
            "hung": self.hung,
            "seconds": self.seconds,
            "freed_seconds": self.freed_seconds,
            "statuses": self.statuses,
            "sentence": self.sentence,
            "left": self.left,
            "problems": self.problems,
        }


def command(case: Case, model: str, limits: Limits) -> list[str]:
    prompts = ["--prompt-ids", "5,17,99,3,8,41", "--prompt-ids", "7,8"]
    sampling = ["--max-tokens", str(case.max_tokens), "--ignore-eos", "--json"]
    timeouts = ["--step-timeout", f"{limits.step_timeout:g}"]
    # Importing torch takes seconds, so only the jobs that fail to join have the short limit.
    timeouts += ["--join-timeout", f"{limits.join_timeout if case.phase == 'join' else 60:g}"]
    split = SPLITS[case.split].flags
    return [
        "generate",
        "--model",
        model,
        "--device",
        "cpu",
        *split,
        *prompts,
        *sampling,
        *timeouts,
    ]


class Runner:
    """Runs cases on lanes. More jobs run than there are cores, since they mostly wait after the fault, but only as many
    start at the same time."""

    def __init__(self, folder: Path, model: str, limits: Limits, report: Callable[[Outcome], None]) -> None:
        self._folder, self._model, self._limits, self._report = folder, model, limits, report
        self._starting = threading.Semaphore(os.cpu_count() or 1)
        self._table = ProcessTable()

    def run(self, cases: Sequence[Case], jobs: int) -> list[Outcome]:
        """Run the cases of one host, then those of two, each with up to `jobs` at a time."""
        outcomes: list[Outcome] = []
        for on_hosts in (False, True):
            chosen = [case for case in cases if (case.start == HOSTS) == on_hosts]
            # Longest first: these wait for a timeout.
            chosen.sort(key=lambda case: case.fault in ("sigstop", "hang") or case.by_network, reverse=True)
            if chosen:
                outcomes += self._run(chosen, min(jobs, len(chosen)), on_hosts)
        return outcomes

    def _run(self, cases: list[Case], jobs: int, on_hosts: bool) -> list[Outcome]:
        waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in cases:
            waiting.put(case)
        outcomes: list[Outcome] = []
        failures: list[BaseException] = []

        def work(lab: Lab | None, first_host: int) -> None:
            try:
                with self._starting:
                    lane = Lane(self._folder, lab, first_host)
                with contextlib.closing(lane):
                    while not failures:
                        outcome = self._run_case(waiting.get_nowait(), lane)
                        outcomes.append(outcome)
                        self._report(outcome)
            except queue.Empty:
                return
            except BaseException as error:
                failures.append(error)

        with Lab(2 * jobs) if on_hosts else contextlib.nullcontext() as lab:
            threads = [threading.Thread(target=work, args=(lab, 2 * number)) for number in range(jobs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        return outcomes

    def _run_case(self, case: Case, lane: Lane) -> Outcome:
        outcome = Outcome(case)
        ports, memory = lane.listening_ports(), lane.shared_memory()
        note = "FOLDER/note"
        fault = f"{case.rank} {FAULTS[case.fault].action} {MOMENTS.get(case.phase, case.phase)} {note}"
        with contextlib.ExitStack() as stack:
            with self._starting:
                job = lane.start(case, command(case, self._model, self._limits), fault)
                began = self._wait_for_fault(job)
            try:
                if began is None:
                    outcome.problems.append("the fault was not reached")
                    began = time.time()
                elif case.by_network:
                    stack.enter_context(lane.network_fault(case))
                    began = time.time()
                    (job.folder / "note.go").touch()
                self._wait_for_end(case, job, began, outcome)
            finally:
                for pid in job.running(self._table):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGKILL)
                job.reap(10)
        deadline = time.monotonic() + _RELEASE_S
        while (left := _left_behind(job, lane, ports, memory)) and time.monotonic() < deadline:
            time.sleep(0.05)
        outcome.left += left
        self._judge(job, outcome)
        return outcome

    def _wait_for_fault(self, job: RunningJob) -> float | None:
        """Return the time of the fault, or None if the job ended or took too long before it."""
        deadline = time.monotonic() + _START_S
        note = job.folder / "note"
        while time.monotonic() < deadline:
            running = job.running(self._table)
            if note.exists() and (text := note.read_text()):
                return float(text)
            if not running:
                return None
            time.sleep(0.02)
        return None

    def _wait_for_end(self, case: Case, job: RunningJob, began: float, outcome: Outcome) -> None:
        """Wait until the job has ended, or all of it except a rank that needs a signal, which is then sent."""
        culprit = job.pids[case.rank] if case.rank < len(job.pids) else None
        while running := job.running(self._table):
            if case.freeing_signal and running == {culprit}:
                outcome.seconds = round(time.time() - began, 2)
                self._free(case, job, outcome)
                return
            if time.time() - began > self._limits.end + _HUNG_S:
                outcome.hung = True
                outcome.left += ["process" for _ in running]
                return
            time.sleep(0.05)
        outcome.seconds = round(time.time() - began, 2)

    def _free(self, case: Case, job: RunningJob, outcome: Outcome) -> None:
        assert case.freeing_signal is not None
        # A rank that has not joined yet tries to join first.
        limit = _FREED_S + (self._limits.join_timeout if case.phase == "join" else 0)
        sent = time.time()
        os.kill(job.pids[case.rank], signal.Signals[case.freeing_signal])
        while job.running(self._table):
            if time.time() - sent > limit:
                outcome.problems.append(f"rank {case.rank} does not end after {case.freeing_signal}")
                return
            time.sleep(0.05)
        outcome.freed_seconds = round(time.time() - sent, 2)

    def _judge(self, job: RunningJob, outcome: Outcome) -> None:
        case = outcome.case
        outcome.statuses, outcome.errors = job.statuses, _anonymous(job.errors)
        sentences = error_sentences(outcome.errors)
        outcome.sentence = sentences[-1] if sentences else ""
        completed = _is_complete(job.output, case.max_tokens)
        if outcome.hung:
            outcome.problems.append("hung")
        elif outcome.seconds is not None and outcome.seconds > self._limits.end:
            outcome.problems.append(f"ended after {outcome.seconds:g} s")
        if not outcome.hung:
            outcome.problems += wrong_sentences(case, completed, outcome.errors)
            outcome.problems += wrong_statuses(case, completed, outcome.statuses)
        if outcome.left:
            outcome.problems.append(f"left: {', '.join(outcome.left)}")


def _left_behind(job: RunningJob, lane: Lane, ports: set[tuple[int, str]], memory: set[tuple[int, str]]) -> list[str]:
    """Return the ports and files that an ended job left behind. `ports` and `memory` were in use before it."""
    left = [f"port {address}" for _, address in sorted(lane.listening_ports() - ports)]
    left += [f"/dev/shm/{name}" for _, name in sorted(lane.shared_memory() - memory)]
    for folder in (job.folder / name for name in FOLDERS):
        left += [f"{folder.name}/{path.relative_to(folder)}" for path in folder.rglob("*") if not path.is_dir()]
    return left


def _is_complete(output: str, tokens: int) -> bool:
    results = [json.loads(line) for line in output.splitlines()]
    return len(results) == 2 and all(len(result["token_ids"]) == tokens for result in results)


def _anonymous(errors: str) -> str:
    """Replace host names, pids and ports, which differ between machines and runs."""
    errors = re.sub(r"\bpid \d+", "pid PID", errors.replace(socket.gethostname(), "HOST"))
    errors = re.sub(r"yalis-host(\d+)", lambda found: f"host{int(found[1]) % 2}", errors)
    return re.sub(r"\bport [\d, ]*\d", "port PORT", errors)
