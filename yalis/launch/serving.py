"""What a rank other than 0 does about signals and errors while it works for rank 0."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.watch import LEAVE_S
from yalis.launch.world import World
from yalis.log import get_logger

_log = get_logger(__name__)

TERMINATED = 128 + signal.SIGTERM
_SAME_S = 2.0  # for rank 0 to come to the same refusal


@contextmanager
def serving(world: World) -> Iterator[None]:
    """Rank 0 decides when this rank ends.

    Ctrl-C is rank 0's to answer. After a SIGTERM, which a batch system sends to every rank, rank 0 has ten seconds to
    finish and close; the status is 143 then. An error ends the job with a sentence that names this rank, except after
    rank 0's goodbye: then links are expected to break. A rank still in here ten seconds after the goodbye is ended.
    """
    asked = threading.Event()
    with world.in_service(), _signals(world, asked):
        try:
            yield
        except Exception as error:
            if not world.over:
                world.explain(error)  # does not return if another rank's death is behind this
            if not world.over:
                if not isinstance(error, YalisError):
                    _log.exception("%s failed", world.name(world.rank))
                elif not isinstance(error, YalisFailure):
                    world.wait_over(_SAME_S)  # what rank 0 refuses too it says for all, which ends this process
                world.fail(first_line(error))
                raise
    if asked.is_set():
        raise SystemExit(TERMINATED)


@contextmanager
def _signals(world: World, asked: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler in Python waits for the main thread, which may be stuck in a collective; the wake-up pipe does not.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_await_term, args=(reader, world, asked), name="yalis-signals", daemon=True)
    thread.start()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, interrupt)
        os.close(writer)
        thread.join()


def _await_term(reader: int, world: World, asked: threading.Event) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers:
            if world.over:
                os._exit(TERMINATED)
            asked.set()
            threading.Thread(target=_end_late, args=(world,), daemon=True).start()
    os.close(reader)


def _end_late(world: World) -> None:
    if not world.wait_over(LEAVE_S):
        os._exit(TERMINATED)
