"""Rank 0's liveness monitor: detects failed ranks, handles Ctrl-C and SIGTERM, and ends the job after a failure."""

from __future__ import annotations

import math
import os
import selectors
import signal
import threading
import time
from collections import deque

from yalis.launch.heartbeat import (
    BEAT_S,
    CLOSING,
    CONNECTING,
    IDLE,
    LATE_S,
    LOADING,
    OPENING,
    SILENCE_S,
    WARMING_UP,
    RankState,
    find_culprit,
    is_stopped,
    silence_limit,
)
from yalis.launch.link import Link, LinkLost, encode_frame
from yalis.launch.liveness import STUCK_S, LivenessMonitor, print_error
from yalis.launch.local import LocalRanks
from yalis.launch.rank_info import RankInfo
from yalis.launch.wakeup_pipe import WakeupPipe
from yalis.log import get_logger

INTERRUPTED = 128 + signal.SIGINT
GOODBYE_S = 5.0  # after rank 0 has left, for the "bye" of the ranks that it has started
STOP_S = 8.0  # without progress after Ctrl-C or SIGTERM, if a rank is stopped or silent
SIGTERM_S = 20.0  # without progress after SIGTERM otherwise; batch systems send SIGKILL after 30 s


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
        self._stopped_s = 0.0  # how long this process itself was stopped, until every rank has sent a heartbeat again
        self._unheard: set[int] = set()  # ranks without a heartbeat since then
        self._idle = False  # no request runs, and the other ranks have been told
        self._stop_signal: signal.Signals | None = None  # a Ctrl-C or SIGTERM that has not ended the call yet
        self._stopping_s = 0.0  # since that signal
        self._announced_stop = False
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
        if self._idle and phase != IDLE:
            self._idle = False
            self._send_heartbeats()

    def set_idle(self) -> None:
        """Tell the other ranks that no request runs, until the next phase."""
        if self.phase == IDLE and not self._idle:
            self._idle = True
            self._send_heartbeats()  # at once: the user's code may hold Python's GIL from here on

    def set_step_timeout(self, seconds: float) -> None:
        super().set_step_timeout(seconds)
        self._send_heartbeats()

    def announce_stop(self) -> None:
        """Tell the other ranks with the next heartbeats that rank 0 completes its work and then ends."""
        self._announced_stop = True

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
                wake_up = min(ticked + BEAT_S, self._deadline) if self.closing else ticked + BEAT_S
                before = self._idle_state()
                events = selector.select(max(0.0, wake_up - time.monotonic()))
                self._note_stop(time.monotonic() - ticked, before)
                for key, _ in events:
                    if not isinstance(key.fileobj, Link):
                        self._handle_signals(self._wakeup.read())
                    elif not self._read(key.data, key.fileobj):
                        selector.unregister(key.fileobj)
                elapsed = time.monotonic() - ticked
                if elapsed >= BEAT_S:
                    ticked += elapsed
                    if not self.closing:
                        self._tick(elapsed)
        for rank in self._remaining() if self._local and not self.failure else ():
            reason = "it is stopped (SIGSTOP)" if is_stopped(self.members[rank].pid) else "it hangs"
            get_logger(__name__).warning("%s had to be killed after the last request: %s", self._name(rank), reason)

    def _remaining(self) -> list[int]:
        return [rank for rank in self._links if rank not in self.departed]

    def _idle_state(self) -> tuple[bool, int]:
        return self._idle, self._phase_count

    def _note_stop(self, elapsed: float, before: tuple[bool, int]) -> None:
        """Record that this process was stopped, before the links are read: other ranks may have ended because of it.

        `elapsed`: seconds since the last tick, about BEAT_S otherwise. The other ranks do not end if rank 0 was idle
        all the time since `before`, an earlier _idle_state(). If the phase has changed since, it may have done so
        before the stop or after it.
        """
        idle = self._idle and before == self._idle_state()
        if elapsed > silence_limit(self.step_timeout) and not idle:
            self._stopped_s = elapsed

    def _tick(self, elapsed: float) -> None:
        """Send heartbeats, and end the job if a rank is lost or a step makes no progress."""
        self._send_heartbeats()
        silence = silence_limit(self.step_timeout)
        if elapsed > silence:
            self._unheard = set(self._remaining())  # heartbeats from before and during the stop have been read
        elif not self._unheard:
            self._stopped_s = 0.0
        # If this process was stopped, it read no heartbeats meanwhile, so a tick counts two seconds at most.
        seconds = min(elapsed, 2 * BEAT_S)
        self._stopping_s += seconds
        for rank, state in enumerate(self._states):
            state.advance(seconds)
            if OPENING in self._phases.values():  # a rank that opens the model may download it, and others wait for it
                state.unchanged_s = 0.0
            if rank in self.departed or rank == 0:
                state.silent_s = 0.0
        self._states[0].update(self.progress.counters())
        if self.failure or self.closing:
            return
        if lost := self._lost_ranks(silence):
            self._end_job(self._describe_silent(lost[0]), kill=lost[0])
        elif self.step_timeout and any(state.step_s > self.step_timeout for state in self._states):
            limit = f"{self.step_timeout:g} s; give a larger step_timeout= if steps take that long"
            self._end_stuck_job(f"a step for {limit}")
        elif self._stop_signal and self.phase != IDLE and self._is_stuck(limit_s := self._stop_limit()):
            cause = "Ctrl-C" if self._stop_signal == signal.SIGINT else self._stop_signal.name
            self._end_stuck_job(f"the step for {limit_s:g} s after {cause}", 128 + self._stop_signal)
        elif self.phase == CLOSING and not self._in_step() and self._is_stuck(min(silence, SILENCE_S)):
            self._end_stuck_job(f"the end of the job for {min(silence, SILENCE_S):g} s")

    def _lost_ranks(self, silence: float) -> list[int]:
        """Return the ranks without a heartbeat for this long whose processes do not run here, longest first."""
        silent = [rank for rank, state in enumerate(self._states) if state.silent_s > silence]
        silent.sort(key=lambda rank: self._states[rank].silent_s, reverse=True)
        return [rank for rank in silent if not self._runs_here(rank)]

    def _stop_limit(self) -> float:
        """Return how long a job may make no progress after a signal.

        A job whose ranks are all alive may be in a long step: after Ctrl-C it has the step timeout, and the user can
        press Ctrl-C again.
        """
        if self._lost_ranks(LATE_S):
            limit = STOP_S
        else:
            limit = SIGTERM_S if self._stop_signal == signal.SIGTERM else math.inf
        return limit if self._stopping_s > limit else math.inf

    def _in_step(self) -> bool:
        return any(state.in_step for state in self._states)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat to every rank, with what the rank needs to judge the silence of rank 0."""
        stopping = self._announced_stop or self._stop_signal is not None
        frame = encode_frame({"beat": (self.step_timeout, self._idle, stopping)})
        for rank, link in self._links.items():
            if rank not in self.departed:
                self._send_frame(link, frame)

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
            self._end_job(f"no rank or device makes progress in {work}", status=status)
        elif self._states[culprit].silent_s > LATE_S:
            self._end_job(self._describe_silent(culprit), kill=culprit, status=status)
        else:
            if (phase := self._phase_of(culprit)) in (CONNECTING, LOADING, WARMING_UP):
                work = f"the job: no progress for {self.step_timeout:g} s while {phase}"
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
                self._stopping_s = self._stopping_s if self._stop_signal else 0.0
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
                self._unheard.discard(rank)
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
            get_logger(__name__).warning("%s", message)

    def _end_job(self, message: str, traceback: str | None = None, kill: int | None = None, status: int = 1) -> None:
        """Report the failure and make all ranks exit. `kill`: a rank that does not respond; `status`: of rank 0."""
        # Print at once under a launcher: it detects the death too, and may kill this process at any moment.
        # After Ctrl-C or SIGTERM the main thread reports only that, and while it closes the engine it reports nothing.
        phase_count = self._phase_count
        print_it = self._launched or self._stop_signal is not None or self.phase == CLOSING
        if not self._broadcast_failure(message, print_it, traceback):
            return
        # If a rank does not respond, a collective with it returns only if that rank can be killed here: wait less.
        # The same if this process was stopped: the others have ended, and nobody is left to end the collective.
        seconds = STUCK_S if kill is None and not self._stopped_s else STUCK_S / 2 if kill != 0 else 0.5
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
        if not self._set_failure(message, traceback, print_it):
            return False
        for link in self._links.values():
            self._send(link, {"failed": message})
        if print_it:
            print_error(message)
        return True
