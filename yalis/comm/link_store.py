"""A torch.distributed Store over authenticated links, through which gloo process groups connect their ranks.

torch's TCPStore has no authentication: any process that reaches its port can read and write it, and exhaust the memory
of rank 0.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed

from yalis.errors import YalisFailure
from yalis.launch.link import Link
from yalis.launch.wakeup_pipe import WakeupPipe
from yalis.launch.world import World


class LinkStore(torch.distributed.Store):  # type: ignore[misc, name-defined]
    """One rank's view of the store. Rank 0 holds the values; `set`, `get` and `wait` are all that gloo calls.

    C++ code calls these methods, so this object must be kept alive as long as a group may use it.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._links = world.open_links(0)
        self._world = world
        self._server = _StoreServer(self._links) if world.rank == 0 else None
        self._fetched: dict[str, bytes] = {}  # values that wait() received, for the get() that follows

    def set(self, key: str, value: bytes | str) -> None:
        data = value if isinstance(value, str) else value.decode("latin-1")
        if self._server:
            self._server.set(key, data)
        else:
            self._links[0].send([key, data])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._fetched.pop(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. `timeout` is not used: a failure of the job ends the wait.

        The wait counts in the progress of this rank, so that the step timeout ends the job if a rank sets no key.
        """
        with self._world.progress.waiting():
            for key in keys:
                if key in self._fetched:
                    continue
                if self._server:
                    value = self._server.get(key, self._world)
                else:
                    self._links[0].send([key])
                    value = self._links[0].receive()
                self._fetched[key] = value.encode("latin-1")

    def close(self) -> None:
        if self._server:
            self._server.close()
        for link in self._links.values():
            link.close()


class _StoreServer:
    """The values, on rank 0, and a thread that serves other ranks: [key, value] sets a value, [key] requests it."""

    def __init__(self, links: dict[int, Link]) -> None:
        self._links = links
        for link in links.values():
            link.failure_source = None  # a link that another rank closes is not a failure here
        self._values: dict[str, str] = {}
        self._waiting: defaultdict[str, list[Link]] = defaultdict(list)  # links whose request has no answer yet
        self._changed = threading.Condition()
        self._wakeup = WakeupPipe()
        self._thread = threading.Thread(target=self._run, name="yalis-store", daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            for link in self._waiting.pop(key, ()):
                _answer(link, value)
            self._changed.notify_all()

    def get(self, key: str, world: World) -> str:
        with self._changed:
            while not self._changed.wait_for(lambda: key in self._values, 1.0):
                if world.failure:
                    raise YalisFailure(world.failure)
            return self._values[key]

    def close(self) -> None:
        self._wakeup.wake()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, Link):
                        return
                    if not self._read(key.fileobj):
                        selector.unregister(key.fileobj)

    def _read(self, link: Link) -> bool:
        """Handle the requests that have arrived. Returns whether the link is still open."""
        while link.poll(0):
            try:
                key, *value = link.receive()
            except YalisFailure:  # the rank has left or died, which the liveness monitor reports
                return False
            if value:
                self.set(key, value[0])
                continue
            with self._changed:
                if key in self._values:
                    _answer(link, self._values[key])
                else:
                    self._waiting[key].append(link)
        return True


def _answer(link: Link, value: str) -> None:
    with contextlib.suppress(YalisFailure):  # if the link is lost, reading it raises the same
        link.send(value)
