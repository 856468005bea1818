"""The rendezvous: every rank connects to rank 0 and receives a table of all ranks, their hosts and addresses.

A rank opens one connection per channel. After the handshake (`auth.py`) it sends a hello as JSON. Rank 0 answers
{"here": rank}, or {"refused": reason}, which ends that rank. When all ranks have connected, rank 0 sends the table of
ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from yalis.errors import NotJoined, YalisFailure
from yalis.launch.acceptor import Acceptor, reserve_descriptors
from yalis.launch.auth import HandshakeError, JobKey, Method, MethodMismatch, authenticate
from yalis.launch.endpoint import Endpoint, resolve
from yalis.launch.heartbeat import StoppedTimer
from yalis.launch.link import MAX_FRAME, Link, LinkLost, encode_frame, is_loopback
from yalis.launch.local import LocalRanks
from yalis.launch.rank_info import RankInfo, list_ranks
from yalis.launch.secret import SecretMissing
from yalis.log import get_logger
from yalis.version import __version__

_MAX_HELLO = 64 << 10  # bytes of a message before all ranks have joined
_ANSWER_S = 10  # for rank 0 to answer a hello
_STOPPED_S = 3  # an iteration of rank 0's loop, normally 0.1 s, that takes longer shows that rank 0 was stopped
_LATE_S = 3  # after the timeout, for rank 0's error message to arrive
_LINGER_S = 5  # after a fatal error, for the remaining ranks to connect and receive the reason
_PURPOSE = b"rendezvous"
CONTROL, LIVENESS = "control", "liveness"  # as sent in a hello
CHANNELS = (CONTROL, LIVENESS)


def machine_id() -> str:
    """Return a string that is equal on two ranks if and only if they share a host's memory and network."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(Path(path).read_text().strip() if "boot_id" in path else str(os.stat(path).st_ino))
        except OSError:
            parts.append("-")
    return " ".join(parts)


class RendezvousServer:
    """Rank 0's side of the rendezvous."""

    def __init__(self, server: socket.socket, key: JobKey, size: int, local: LocalRanks | None) -> None:
        """`local`: the ranks that this process started, whose early exit ends the wait."""
        self.size, self.local = size, local
        self.links: dict[str, dict[int, Link]] = {channel: {} for channel in CHANNELS}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._error: str | None = None  # why the job cannot start
        self._given_up: set[int] = set()  # ranks that are no longer waited for
        self._deadline = 0.0
        reserve_descriptors(size - 1)
        self._acceptor = Acceptor(server, key, _PURPOSE, self._accept)
        self._without_hello: set[Link] = set()  # authenticated, but have not sent a hello yet

    def wait_for_ranks(self, timeout: float) -> tuple[RankInfo, ...]:
        """Wait for every rank, send all of them the table of ranks and return it.

        On an error, the ranks that have connected receive its message.
        """
        try:
            now = time.monotonic()
            self._deadline = now + timeout
            while self._missing():
                if now > self._deadline:
                    raise YalisFailure(self._error or self._describe_missing(timeout))
                self._acceptor.run_once(min(0.1, timeout))
                now, before = time.monotonic(), now
                self._check_local_ranks(stopped_s=now - before)
            if self._error:
                raise YalisFailure(self._error)
            members = self._make_table()
            frame = encode_frame({"members": [member._asdict() for member in members]})
            for rank, link in self.links[CONTROL].items():
                self._send_table(rank, link, frame)
            return members
        except BaseException as error:
            message = str(error) if isinstance(error, YalisFailure) else "rank 0 gave up before all ranks had joined"
            for link in (*self.links[CONTROL].values(), *self._without_hello):
                _try_send(link, {"refused": message})
            for channel in CHANNELS:
                _close(self.links[channel])
            raise
        finally:
            for link in self._without_hello:
                link.close()
            self._acceptor.close()

    def _missing(self) -> list[int]:
        joined = self.links[CONTROL].keys() & self.links[LIVENESS].keys()
        return sorted({*range(1, self.size)} - joined - self._given_up)

    def _give_up(self, rank: int, message: str) -> None:
        """Record that the job cannot start because of this rank, and do not wait for it any longer."""
        self._error = self._error or message
        self._given_up.add(rank)
        self._deadline = min(self._deadline, time.monotonic() + _LINGER_S)

    def _describe_missing(self, timeout: float) -> str:
        address, port = self._acceptor.server.getsockname()[:2]
        refusal = f" ({self._acceptor.refusal})" if self._acceptor.refusal else ""
        return (
            f"{list_ranks(self._missing())} of {self.size} did not arrive at rank 0 ({socket.gethostname()}, address "
            f"{address}, port {port}) within {timeout:g} s{refusal}; look for their error messages, and check that "
            "other hosts can reach this port"
        )

    def _check_local_ranks(self, stopped_s: float) -> None:
        """Raise if a rank that this process started has ended or is stopped.

        `stopped_s`: seconds since the last call; many if this process itself was stopped.
        """
        for rank in self._missing() if self.local else ():
            if self.local and (status := self.local.exit_status(rank)):
                if stopped_s > _STOPPED_S:
                    reason = f"was stopped for {stopped_s:.0f} s, and rank {rank} has ended meanwhile ({status})"
                    raise YalisFailure(f"rank 0 on {socket.gethostname()} {reason}")
                raise YalisFailure(f"rank {rank} on {socket.gethostname()} ended before it joined ({status})")
            if self.local and self.local.is_stopped(rank):
                pid = self.local.processes[rank].pid
                raise YalisFailure(f"rank {rank} on {socket.gethostname()} (pid {pid}) was stopped before it joined")

    def _accept(self, link: Link) -> None:
        link.limit = _MAX_HELLO
        self._without_hello.add(link)
        self._acceptor.watch(link, self._read)

    def _read(self, link: Link) -> None:
        if not link.poll(0):
            return
        if link not in self._without_hello:  # a joined rank sends nothing more here, so its connection has ended
            rank = next(r for channel in self.links.values() for r, known in channel.items() if known is link)
            hello = self._hellos[rank]
            status = (self.local.exit_status(rank, 0.3) if self.local else None) or f"pid {hello['pid']}"
            self._give_up(rank, f"rank {rank} on {hello['host']} ({status}) died before all ranks had joined")
            self._disconnect(link)
            return
        self._without_hello.remove(link)
        try:
            hello = link.receive()
        except LinkLost:
            self._disconnect(link)
            return
        if refusal := self._check_hello(hello):
            _try_send(link, {"refused": refusal})
            self._disconnect(link)
            return
        rank, channel = hello["rank"], hello["channel"]
        link.peer, link.limit = f"rank {rank} on {hello['host']}", MAX_FRAME
        self._hellos.setdefault(rank, hello)
        self.links[channel][rank] = link
        _try_send(link, {"here": rank})

    def _disconnect(self, link: Link) -> None:
        self._acceptor.unwatch(link)
        link.close()

    def _check_hello(self, hello: Any) -> str | None:
        """Return why the hello is refused, or None if it is accepted. Different versions or sizes end the job."""
        if not _is_hello(hello):
            return f"rank 0 on {socket.gethostname()} received a malformed hello"
        rank, sender = hello["rank"], f"rank {hello['rank']} on {hello['host']} (pid {hello['pid']})"
        if hello["version"] != __version__:
            return self._refuse(
                rank,
                f"{sender} runs yalis {hello['version']} and rank 0 on {socket.gethostname()} runs {__version__}; "
                "install the same version on every host",
            )
        if hello["size"] != self.size:
            return self._refuse(
                rank, f"{sender} was started as one of {hello['size']} ranks, and rank 0 as one of {self.size}"
            )
        if rank not in range(1, self.size):
            return f"{sender} is not one of the ranks 1 to {self.size - 1}"
        known = self._hellos.get(rank)
        if rank in self.links[hello["channel"]] or (
            known and (known["pid"], known["machine"]) != (hello["pid"], hello["machine"])
        ):
            assert known is not None
            return f"{sender} is a duplicate: pid {known['pid']} on {known['host']} is rank {rank} already"
        return None

    def _refuse(self, rank: int, message: str) -> str:
        self._give_up(rank, message)
        return message

    def _send_table(self, rank: int, link: Link, frame: bytes) -> None:
        try:
            link.send_frame(frame)
        except LinkLost as error:
            raise YalisFailure(f"rank {rank} on {self._hellos[rank]['host']} died during the rendezvous") from error

    def _make_table(self) -> tuple[RankInfo, ...]:
        own_addresses = [link.addresses()[0] for link in self.links[CONTROL].values()]
        external = next((address for address in own_addresses if not is_loopback(address)), own_addresses[0])
        rank0: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": machine_id(),
            "address": external,
            "pid": os.getpid(),
        }
        hellos = [rank0, *(self._hellos[rank] for rank in range(1, self.size))]
        machines: dict[str, list[int]] = {}
        for rank, hello in enumerate(hellos):
            machines.setdefault(hello["machine"], []).append(rank)
        if len(machines) > 1:  # ranks on rank 0's host may have connected over loopback, unreachable from other hosts
            for rank in machines[rank0["machine"]]:
                if is_loopback(hellos[rank]["address"]):
                    hellos[rank] = {**hellos[rank], "address": external}
        order = list(machines)
        return tuple(
            RankInfo(
                rank,
                hello["host"],
                order.index(hello["machine"]),
                machines[hello["machine"]].index(rank),
                hello["address"],
                hello["pid"],
            )
            for rank, hello in enumerate(hellos)
        )


def _is_hello(hello: Any) -> bool:
    """Return whether a received value has the fields of a hello, with values that can be used in messages."""
    if not isinstance(hello, dict):
        return False
    numbers = [hello.get(name) for name in ("rank", "size", "pid")]
    texts = [hello.get(name) for name in ("version", "host", "machine", "address")]
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        return False
    if not all(isinstance(text, str) and len(text) <= 512 and text.isprintable() for text in texts):
        return False
    try:
        ipaddress.ip_address(hello["address"])
    except ValueError:
        return False
    return hello.get("channel") in CHANNELS


def _try_send(link: Link, message: Any) -> None:
    with contextlib.suppress(LinkLost):  # a peer that has disconnected needs no answer
        link.send(message)


class RankClient:
    """The side of ranks other than 0: connects to rank 0 and waits until all ranks have joined."""

    def __init__(
        self,
        endpoint: Endpoint,
        method: Method,
        find_secret: Callable[[], bytes | None],
        rank: int,
        size: int,
        timeout: float,
        parent_pid: int | None = None,
    ) -> None:
        """`find_secret` returns the job's secret, or None if rank 0 sends it; it may raise SecretMissing."""
        self.endpoint, self.method, self.rank, self.timeout = endpoint, method, rank, timeout
        self.links: dict[str, Link] = {}
        self._find_secret = find_secret
        self._parent_timer = StoppedTimer(parent_pid) if parent_pid is not None else None
        self._key: JobKey | None = None  # known from the first handshake on
        self._targets: Sequence[tuple[str, int]] = ()  # address and port at which rank 0 was authenticated
        self._hello = {"version": __version__, "rank": rank, "size": size}
        self._hello |= {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine_id()}
        self._warned = False

    def join(self) -> tuple[tuple[RankInfo, ...], JobKey]:
        """Return the table of ranks and the job's key. `links` then has a link per channel."""
        deadline = time.monotonic() + self.timeout
        try:
            for channel in CHANNELS:
                self.links[channel] = self._connect(channel, deadline)
            # Rank 0 started to wait before this rank reached it, so its own timeout ends first.
            last = time.monotonic() + self.timeout + _LATE_S
            while not self.links[CONTROL].poll(1.0):
                self._check_parent()
                if time.monotonic() > last:
                    host = self.endpoint.host
                    raise NotJoined(
                        f"rank 0 on {host} did not report within {self.timeout:g} s that all ranks had joined"
                    )
            members = self._receive_table()
        except LinkLost as error:
            _close(self.links)
            raise self._rank0_ended() from error
        except BaseException:
            _close(self.links)
            raise
        assert self._key is not None
        return members, self._key

    def _rank0_ended(self) -> NotJoined:
        return NotJoined(f"rank 0 on {self.endpoint.host} ended before all ranks had joined")

    def _check_parent(self) -> None:
        """Raise if rank 0 started this rank, and has ended or is stopped."""
        if self._parent_timer is None:
            return
        if os.getppid() != self._parent_timer.pid:
            raise NotJoined(f"rank 0 (pid {self._parent_timer.pid}) ended before rank {self.rank} had joined")
        if self._parent_timer.expired():
            raise NotJoined(f"rank 0 (pid {self._parent_timer.pid}) was stopped before rank {self.rank} had joined")

    def _receive_table(self) -> tuple[RankInfo, ...]:
        answer = self.links[CONTROL].receive()
        if "members" not in answer:
            raise YalisFailure(answer["refused"])
        return tuple(RankInfo(**member) for member in answer["members"])

    def _connect(self, channel: str, deadline: float) -> Link:
        """Try rank 0's addresses and ports until one accepts the hello.

        Rank 0 may start later, or another program may use a port.
        """
        problem = "no answer"
        pause = 0.02
        while True:
            try:
                secret = self._key.secret if self._key else self._find_secret()
                for target in self._targets or [
                    (address, port) for port in self.endpoint.ports for address in resolve(self.endpoint.host)
                ]:
                    try:
                        return self._try_target(target, secret, channel, deadline)
                    except HandshakeError as error:
                        problem = f"the process at {target[0]}, port {target[1]} {error}"
                        self._warn_once(error, problem)
                    except OSError as error:
                        if isinstance(error, ConnectionRefusedError) and self._targets:
                            raise self._rank0_ended() from error
                        problem = error.strerror or str(error)
                    except LinkLost as error:
                        problem = str(error)
            except SecretMissing as error:
                problem = str(error)
            except OSError as error:  # of resolve()
                problem = error.strerror or str(error)
            if CONTROL in self.links and self.links[CONTROL].poll(0):
                self._receive_table()  # raises: rank 0 has ended, or refuses to start
            self._check_parent()
            if time.monotonic() > deadline:
                raise NotJoined(
                    f"rank {self.rank} on {socket.gethostname()} did not reach rank 0 at {self.endpoint.host}, port "
                    f"{', '.join(map(str, self.endpoint.ports))}, within {self.timeout:g} s ({problem}); start all "
                    "ranks, or give a larger join_timeout="
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def _try_target(self, target: tuple[str, int], secret: bytes | None, channel: str, deadline: float) -> Link:
        sock = socket.create_connection(target, timeout=5)
        seconds = min(_ANSWER_S, max(1.0, deadline - time.monotonic()))  # a stopped rank 0 never answers
        try:
            key = authenticate(sock, self.method, self.endpoint.job, secret, _PURPOSE, seconds)
            link = Link(sock, f"rank 0 on {self.endpoint.host}", limit=_MAX_HELLO)
            link.send({**self._hello, "channel": channel, "address": link.addresses()[0]})
            answer = link.receive() if link.poll(seconds) else {}
        except LinkLost:  # rank 0 is authenticated, but has ended, or closed this connection to accept another
            self._targets = (target,)
            sock.close()
            raise
        except BaseException:
            sock.close()
            raise
        if "here" in answer:
            link.limit = MAX_FRAME
            self._key, self._targets = key, (target,)
            return link
        link.close()
        if "refused" in answer:
            raise YalisFailure(str(answer["refused"]))
        raise LinkLost(f"rank 0 did not answer within {seconds:.0f} s", link.peer)

    def _warn_once(self, error: HandshakeError, problem: str) -> None:
        """Log once that rank 0 uses another method, which does not change by waiting.

        It does not end this rank, because the reply is not authenticated.
        """
        if isinstance(error, MethodMismatch) and not self._warned:
            self._warned = True
            get_logger(__name__).warning("%s", problem)


def _close(links: dict[Any, Link]) -> None:
    for link in links.values():
        link.close()
