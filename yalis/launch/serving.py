"""Handles signals and errors in a rank other than 0 while it serves rank 0."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from yalis.errors import YalisError, YalisFailure
from yalis.launch.liveness import LEAVE_S
from yalis.launch.wakeup_pipe import WAKE, WakeupPipe
from yalis.launch.world import World

TERMINATED = 128 + signal.SIGTERM
_STOPPING_S = 20.0  # more, if rank 0 has received a signal too and completes a long step
_SAME_ERROR_S = 2.0  # for rank 0 to raise the same error about the input, and leave


@contextmanager
def serving(world: World) -> Iterator[None]:
    """Run the block, which serves rank 0 until rank 0 ends it.

    Ctrl-C is ignored: rank 0 handles it. After SIGTERM, which batch systems send to every rank, rank 0 has ten seconds
    to finish and close (30 if it has received the signal too), and this process exits with status 143. An error ends
    the job with a message that names this rank, except after rank 0 has left, when broken connections are expected. A
    rank that is still in the block ten seconds after rank 0 has left is killed.
    """
    terminated = threading.Event()
    with world.serving_rank0(), _handle_signals(world, terminated):
        try:
            yield
        except Exception as error:
            report_error(world, error)
            if not world.rank0_left:
                raise
    if terminated.is_set():
        raise SystemExit(TERMINATED)


def report_error(world: World, error: Exception) -> None:
    """End the job with an error of this rank. Call before any connection is closed; returns only if rank 0 has left.

    A PeerLost is reported only if the lost rank does not report an error of its own.
    """
    if world.rank0_left:
        return
    world.explain(error)  # does not return if another rank has failed: rank 0 then ends this process
    if isinstance(error, YalisError) and not isinstance(error, YalisFailure):
        world.wait_rank0_left(_SAME_ERROR_S)  # if rank 0 rejects the same input, it reports it for all
    world.fail(error)


@contextmanager
def _handle_signals(world: World, terminated: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pipe = WakeupPipe()
    arguments = (pipe, world, terminated)
    thread = threading.Thread(target=_wait_for_sigterm, args=arguments, name="yalis-signals", daemon=True)
    thread.start()
    sigint_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sigterm_handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    pipe.receive_signals(replace=True)
    try:
        yield
    finally:
        pipe.stop_receiving_signals()
        signal.signal(signal.SIGTERM, sigterm_handler)
        signal.signal(signal.SIGINT, sigint_handler)
        pipe.wake()
        thread.join()
        pipe.close()


def _wait_for_sigterm(pipe: WakeupPipe, world: World, terminated: threading.Event) -> None:
    signals = b""
    while WAKE not in signals:
        signals = pipe.read()
        if signal.SIGTERM in signals:
            if world.rank0_left:
                os._exit(TERMINATED)
            terminated.set()
            threading.Thread(target=_exit_unless_rank0_leaves, args=(world,), daemon=True).start()


def _exit_unless_rank0_leaves(world: World) -> None:
    if not world.wait_rank0_left(LEAVE_S) and not (world.rank0_stopping and world.wait_rank0_left(_STOPPING_S)):
        world.fail("received SIGTERM", background=True)
        os._exit(TERMINATED)
