"""The pipe that wakes background threads, also after the process has forked."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from yalis.comm.link_store import LinkStore
from yalis.launch.serving import serving
from yalis.launch.wakeup_pipe import WAKE, WakeupPipe
from yalis.launch.world import World


@contextmanager
def forked_child(before_sleep: str = "") -> Iterator[int]:
    """Fork a child that lives until the end of the block and keeps all file descriptors that it inherits."""
    ready, inherited = os.pipe()
    pid = os.fork()
    if not pid:
        if before_sleep == "SIGUSR1":
            signal.raise_signal(signal.SIGUSR1)
        os.write(inherited, b"x")
        signal.pause()
        os._exit(1)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(inherited)


def close_in_thread(close: object) -> bool:
    """Return whether `close` returns within 5 s."""
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_a_store_closes_while_a_forked_child_runs() -> None:
    world = World.single_process()
    world.open_links = lambda leader: {}  # type: ignore[method-assign]
    store = LinkStore(world)
    store.set("key", b"value")
    assert store.get("key") == b"value"
    with forked_child():
        assert close_in_thread(store.close)


def test_serving_ends_while_a_forked_child_runs() -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(1))
    signal.alarm(10)  # the block below runs on the main thread, and must not hang the tests
    with ExitStack() as stack, serving(World.single_process()):
        stack.enter_context(forked_child())  # ends after serving() has returned
    signal.alarm(0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_signals_of_a_forked_child_do_not_reach_the_parent() -> None:
    """A Ctrl-C in a terminal reaches the children of rank 0 too, and must not count twice."""
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    pipe = WakeupPipe()
    pipe.receive_signals(replace=True)
    try:
        with forked_child(before_sleep="SIGUSR1"):
            assert not select.select([pipe], [], [], 0.1)[0]
            signal.raise_signal(signal.SIGUSR1)
            pipe.wake()
            assert pipe.read() == bytes([signal.SIGUSR1, WAKE])
    finally:
        pipe.close()
        signal.signal(signal.SIGUSR1, previous)
    assert signal.set_wakeup_fd(-1) == -1
