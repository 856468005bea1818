"""Rank 0's liveness monitor: detects failed ranks, handles Ctrl-C and SIGTERM, and ends the job after a failure."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections import deque

from yalis.launch.heartbeat import (
    BEAT_S,
    CLOSING,
    IDLE,
    LOADING,
    RankState,
    find_culprit,
    is_stopped,
    silence_limit,
)
from yalis.launch.link import Link, LinkLost
from yalis.launch.liveness import STUCK_S, LivenessMonitor, print_error
from yalis.launch.local import LocalRanks
from yalis.launch.rank_info import RankInfo
from yalis.launch.wakeup_pipe import WakeupPipe
from yalis.log import get_logger

_log = get_logger(__name__)

INTERRUPTED = 128 + signal.SIGINT
GOODBYE_S = 5.0  # after rank 0 has left, for the "bye" of the ranks that it has started
STOP_S = 8.0  # without progress after Ctrl-C or SIGTERM, after which the job counts as stuck


class Rank0Monitor(LivenessMonitor):
    """The monitor of rank 0. It has a link to every other rank, and reports failures for the whole job."""

    def __init__(
        self, members: tuple[RankInfo, ...], links: dict[int, Link], local: LocalRanks | None, launched: bool
    ) -> None:
        """`launched`: an external launcher started the ranks."""
        super().__init__(members, 0)
        self._links, self._local, self._launched = links, local, launched
        self._phases: dict[int, str] = {}
        self._states = [RankState() for _ in members]
        self._deadline = 0.0  # for the other ranks to leave, once this monitor is closing
        self._stopped_s = 0.0  # how long this process itself was stopped, if longer than the silence limit
        self._stop_signal: signal.Signals | None = None  # a Ctrl-C or SIGTERM that has not ended the call yet
        self._wakeup = WakeupPipe()
        self._phase_count = 0  # how often rank 0 has entered a phase
        self._interrupts: deque[int] = deque(maxlen=2)  # the phase count at each of the last two Ctrl-C

    def start(self) -> None:
        super().start()
        if threading.current_thread() is threading.main_thread():
            self._wakeup.receive_signals(replace=False)

    def set_phase(self, phase: str) -> None:
        self._phase_count += 1
        self._phase_thread = threading.get_ident()
        self.phase = phase
        if self._stop_signal and phase not in (IDLE, CLOSING):
            self._stop_signal = None  # the program has caught it and continues

    def set_step_timeout(self, seconds: float) -> None:
        super().set_step_timeout(seconds)
        self._send_heartbeats()

    def fail(self, message: str, background: bool = False, traceback: str | None = None) -> None:
        if background:
            self._end_job(f"{self.members[0]}: {message}")
            return
        self.failure_handled.set()
        self._broadcast_failure(f"{self.members[0]}: {message}", print_it=False)  # the caller raises its own error

    def leave(self) -> None:
        with self._changed:
            if self.closing:
                return
            self._deadline = time.monotonic() + (GOODBYE_S if self._local and not self.failure else 0.0)
            self.closing = True
        self.failure_handled.set()
        for link in self._links.values():
            self._send(link, {"bye": 0})
        self._wakeup.wake()

    def close(self) -> None:
        """Wait until the ranks that rank 0 started have left, and warn about those that have not after GOODBYE_S."""
        self.leave()
        try:
            self._thread.join()
        finally:  # also if Ctrl-C interrupts the wait
            self._deadline = 0.0
            self._wakeup.wake()
            self._thread.join()
        for link in self._links.values():
            link.close()
        self._wakeup.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            ticked = time.monotonic()
            while not self.closing or (self._remaining() and time.monotonic() < self._deadline):
                wake_up = self._deadline if self.closing else ticked + BEAT_S
                for key, _ in selector.select(max(0.0, wake_up - time.monotonic())):
                    if not isinstance(key.fileobj, Link):
                        self._handle_signals(self._wakeup.read())
                    elif not self._read(key.data, key.fileobj):
                        selector.unregister(key.fileobj)
                elapsed = time.monotonic() - ticked
                if elapsed >= BEAT_S and not self.closing:
                    ticked += elapsed
                    self._tick(elapsed)
        for rank in self._remaining() if self._local and not self.failure else ():
            reason = "it is stopped (SIGSTOP)" if is_stopped(self.members[rank].pid) else "it hangs"
            _log.warning("%s had to be killed after the last request: %s", self._name(rank), reason)

    def _remaining(self) -> list[int]:
        return [rank for rank in self._links if rank not in self.departed]

    def _tick(self, elapsed: float) -> None:
        """Send heartbeats, and end the job if a rank is silent or a step does not end."""
        self._send_heartbeats()
        silence = silence_limit(self.step_timeout)
        if elapsed > silence:
            self._stopped_s = elapsed
        for rank, state in enumerate(self._states):
            # If this process was stopped, it read no heartbeats meanwhile, so a tick counts two seconds at most.
            state.advance(min(elapsed, 2 * BEAT_S))
            if rank in self.departed or rank == 0:
                state.silent_s = 0.0
        self._states[0].update(self.progress.counters())
        if self.failure or self.closing:
            return
        silent = max(range(len(self._states)), key=lambda rank: self._states[rank].silent_s)
        if self._states[silent].silent_s > silence:
            self._end_job(self._describe_silent(silent), kill=silent)
        elif self.step_timeout and any(state.step_s > self.step_timeout for state in self._states):
            limit = f"{self.step_timeout:g} s; give a larger step_timeout= if steps take that long"
            self._end_stuck_job(f"a step that takes longer than {limit}")
        elif self._stop_signal and self.phase != IDLE and self._is_stuck(STOP_S):
            cause = "Ctrl-C" if self._stop_signal == signal.SIGINT else self._stop_signal.name
            self._end_stuck_job(f"the step for {STOP_S:g} s after {cause}", 128 + self._stop_signal)
        elif self.phase == CLOSING and self._is_stuck(silence):
            self._end_stuck_job(f"the end of the job for {silence:g} s")

    def _send_heartbeats(self) -> None:
        """Send a heartbeat to every rank. It contains the seconds after which a rank without one must exit."""
        for rank, link in self._links.items():
            if rank not in self.departed:
                self._send(link, {"beat": silence_limit(self.step_timeout)})

    def _is_stuck(self, seconds: float) -> bool:
        """Return whether no rank has made progress for this long."""
        return all(state.unchanged_s > seconds for state in self._states)

    def _end_stuck_job(self, work: str, status: int = 1) -> None:
        """End the job because `work` does not end, naming the rank that holds it up if it can be found."""
        culprit = find_culprit(self._states)
        if culprit is None and self.phase == CLOSING:
            busy = [rank for rank in (0, *self._remaining()) if not self._states[rank].waiting]
            culprit = busy[0] if len(busy) == 1 else None
        if culprit is None:
            self._end_job(f"no rank makes progress in {work}", status=status)
        elif self._states[culprit].silent_s > 2 * BEAT_S:
            self._end_job(self._describe_silent(culprit), kill=culprit, status=status)
        else:
            if self._phase_of(culprit) == LOADING:
                work = f"the job: it has read no weights for {self.step_timeout:g} s"
            self._end_job(f"{self._name(culprit)} holds up {work}", kill=culprit, status=status)

    def _describe_silent(self, rank: int) -> str:
        return self._describe_silence(rank, self._states[rank].silent_s, self._phase_of(rank))

    def _phase_of(self, rank: int) -> str:
        if self.closing:
            return CLOSING
        return self.phase if self.phase in (IDLE, CLOSING) else self._phases.get(rank) or self.phase

    def _handle_signals(self, signals: bytes) -> None:
        """Record a Ctrl-C or SIGTERM, and end rank 0 at a second Ctrl-C in one phase.

        A collective that another rank holds up never returns to the interpreter, so Python's signal handler cannot run.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            if number in signals:
                self._stop_signal = number
        self._interrupts.extend([self._phase_count] * signals.count(signal.SIGINT))
        if self.phase == IDLE or list(self._interrupts) != [self._phase_count] * 2:
            return
        phase_count = self._phase_count
        time.sleep(1)  # for Python's signal handler to run, if it can
        if (
            self._phase_count == phase_count
            and not self.closing
            and self._broadcast_failure("rank 0 was interrupted", print_it=False)
        ):
            if self._local:
                self._local.stop(0.5)
            os._exit(INTERRUPTED)

    def _read(self, rank: int, link: Link) -> bool:
        """Handle the messages that have arrived. Returns whether the link is still open."""
        while link.poll(0):
            try:
                message = link.receive()
            except LinkLost as lost:
                if rank not in self.departed:
                    self._handle_death(rank, lost)
                return False
            if "beat" in message:
                self._states[rank].update(message["beat"])
            elif "phase" in message:
                self._phases[rank] = message["phase"]
            elif "fail" in message:
                self._handle_failure(rank, f"{self.members[rank]}: {message['fail']}", message.get("traceback"))
            elif "bye" in message:
                self._mark_departed(rank)
        return True

    def _handle_death(self, rank: int, lost: LinkLost) -> None:
        if self._stopped_s:
            message = f"{self._name(0)} was stopped for {self._stopped_s:.0f} s, and the other ranks have ended"
        else:
            status = self._local.exit_status(rank, 0.3) if self._local and not self.failure else None
            message = self._describe_death(rank, lost, self._phase_of(rank), status)
        self._handle_failure(rank, message)

    def _handle_failure(self, rank: int, message: str, traceback: str | None = None) -> None:
        if not self.closing:
            self._end_job(message, traceback)
        elif self._local and not self.failure:
            self._mark_departed(rank)
            _log.warning("%s", message)

    def _end_job(self, message: str, traceback: str | None = None, kill: int | None = None, status: int = 1) -> None:
        """Report the failure and make all ranks exit. `kill`: a rank that does not respond; `status`: of rank 0."""
        # Print at once under a launcher: it detects the death too, and may kill this process at any moment.
        # After Ctrl-C or SIGTERM the main thread reports only that, and while it closes the engine it reports nothing.
        phase_count = self._phase_count
        print_it = self._launched or self._stop_signal is not None or self.phase == CLOSING
        if not self._broadcast_failure(message, print_it, traceback):
            return
        # If a rank does not respond, a collective with it returns only if that rank can be killed here: wait less.
        seconds = STUCK_S if kill is None else STUCK_S / 2 if kill else 0.5
        deadline = time.monotonic() + seconds
        if self._local:
            if kill:
                self._local.kill(kill)
            self._local.stop(STUCK_S / 2)
        # receive(), all_gather_object() or explain() raises the failure, unless rank 0 is stuck in a collective.
        if self.phase == IDLE or self.failure_handled.wait(max(0.0, deadline - time.monotonic())):
            return
        if self._phase_count == phase_count:
            if not print_it:
                print_error(message)
            os._exit(status)

    def _broadcast_failure(self, message: str, print_it: bool, traceback: str | None = None) -> bool:
        """Send the failure to all ranks, which exit. Returns False if the job has already failed or is closing."""
        if not self._set_failure(message, traceback):
            return False
        if print_it:
            print_error(message)
        for link in self._links.values():
            self._send(link, {"failed": message})
        return True
