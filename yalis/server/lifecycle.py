"""Runs a server: from the open socket until its requests have finished, or the model has failed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import uvicorn

from yalis.engine.async_llm import AsyncLLM
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.server.app import build_app
from yalis.server.config import ServeConfig
from yalis.server.connection import Connection, abort_slow_connections
from yalis.server.keys import ApiKeys
from yalis.server.metrics import ServerMetrics
from yalis.server.state import ServerState

_CHECK_S = 0.5  # between two looks at whether a rank has died
_SEND_BUFFER = 256 << 10  # bytes that the kernel keeps for a client that does not read; by default megabytes
_BACKLOG = 64  # connections accepted in one turn of the event loop
_RESERVED_FILES = 96  # descriptors of the engine and its ranks, and for files that are read
_MOST_FILES = 65536
_LAST_WORDS_S = 5.0  # for clients to read the error events of their streams


def bind(config: ServeConfig) -> socket.socket:
    """Return a bound socket that does not listen yet, so that an address in use is reported before the model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise _listen_error(config, error) from error
    return listener


def _listen_error(config: ServeConfig, error: OSError) -> YalisError:
    is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    advice = "--host, such as 127.0.0.1 or 0.0.0.0" if is_host else "--port, such as --port 0 for any free one"
    return YalisError(f"cannot listen on {config.host} port {config.port}: {error.strerror}; give another {advice}")


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves one LLM. The first signal drains: what runs finishes, what is new is refused. The second one stops."""

    def __init__(self, llm: LLM, config: ServeConfig, keys: ApiKeys, listener: socket.socket) -> None:
        self._llm, self._config, self._keys, self._listener = llm, config, keys, listener
        self.state: ServerState | None = None  # once it serves
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self.stopped = False  # by a second signal, with requests unfinished
        self.last_signal: int | None = None

    def run(self, on_ready: Callable[[], None], on_drain: Callable[[], None] = lambda: None) -> None:
        """Serve until a signal; raises the failure if the model fails. Call this on the main thread.

        Calls `on_ready` when requests are accepted, and `on_drain` when new ones are refused.
        """
        with self._signals():
            asyncio.run(self.serve(on_ready, on_drain))

    async def serve(self, on_ready: Callable[[], None], on_drain: Callable[[], None] = lambda: None) -> None:
        """The same without signals, in the running event loop: drain() ends it."""
        try:
            self._listener.listen()
        except OSError as error:  # another process listens there since
            raise _listen_error(self._config, error) from error
        self._loop = asyncio.get_running_loop()
        _log_uvicorn()
        metrics = ServerMetrics(self._llm, self._config.name_of(self._llm.config.model))
        async_llm = AsyncLLM(self._llm, metrics.observe)
        self.state = ServerState(self._llm, async_llm, self._config, self._keys, metrics)
        http = _HttpServer(
            uvicorn.Config(
                build_app(self.state),
                http=partial(Connection, max_connections=_connection_limit()),  # type: ignore[arg-type]
                backlog=_BACKLOG,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(self._config.timeout),
            )
        )
        serving = asyncio.create_task(http.serve([self._listener]))
        watching = asyncio.create_task(abort_slow_connections(http.server_state.connections, self._config.timeout))
        try:
            while not http.started and not serving.done():
                await asyncio.sleep(0.01)
            if http.started:
                on_ready()
                await self._until_ended(http, on_drain)
        finally:
            self.state.draining = True
            await async_llm.close()  # streams that are open end with an error event
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(http.idle(), _LAST_WORDS_S)
            watching.cancel()
            http.end()
            await serving

    async def _until_ended(self, http: _HttpServer, on_drain: Callable[[], None]) -> None:
        """Wait for a failure, or for a signal and then for the requests that run."""
        assert self.state is not None
        async_llm, told = self.state.async_llm, False
        while async_llm.failure is None:
            if self.state.draining and not told:
                on_drain()
                told = True
            if self.stopped or (self.state.draining and not http.is_busy):
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.02 if self.state.draining else _CHECK_S)
            self._stopping.clear()
        raise async_llm.failure

    def drain(self) -> None:
        """Refuse new requests, and end once the others have finished. The second call ends at once. From any thread."""
        if self.state is None or self._loop is None:
            raise KeyboardInterrupt
        self.stopped = self.state.draining
        self.state.draining = True
        self._llm.announce_stop()
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Call drain() for SIGINT and SIGTERM.

        Handlers of the event loop would take the signals away from the liveness monitor.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self.last_signal = number
            self.drain()

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and without its ten wake-ups a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a request has not been answered completely."""
        return bool(self.server_state.tasks)

    async def idle(self) -> None:
        while self.is_busy:
            await asyncio.sleep(0.02)

    def end(self) -> None:
        self.force_exit = True
        self.should_exit = True
        self._end.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._end.wait()


def _connection_limit() -> int:
    """Return how many connections leave enough descriptors, and raise the limit of this process to what it may have.

    Without a descriptor asyncio cannot accept a connection, and logs that thousands of times a second.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES)
    return max(16, files - _BACKLOG - _RESERVED_FILES)


def _log_uvicorn() -> None:
    """Log uvicorn's errors like those of this package. Its warnings are about clients that send no HTTP."""
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = logging.getLogger("yalis").handlers
    logger.setLevel(logging.ERROR)
    logger.propagate = False
