"""The rendezvous: every rank connects to rank 0 and learns which ranks there are, on which hosts and addresses.

A rank opens one connection per channel and sends a hello on each. Rank 0 answers {"here": rank}, or why it does not
accept the rank: {"refused": ...} ends that rank, {"stranger": ...} means that another job listens there. When all ranks
have connected, rank 0 sends the table of ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yalis.errors import Rank0Unreachable, YalisFailure
from yalis.launch.endpoint import Endpoint
from yalis.launch.link import MAX_FRAME, Link, LinkLost, plain_address
from yalis.launch.local import LocalRanks
from yalis.launch.rank_info import RankInfo, list_ranks
from yalis.version import __version__

_MAX_HELLO = 64 << 10  # bytes accepted from a peer that has not been authenticated
_ANSWER_S = 10  # for rank 0 to answer a hello
_LINGER_S = 5  # after a fatal error, for late ranks to connect and receive the reason
CONTROL, LIVENESS = "control", "watch"  # as sent in a hello
CHANNELS = (CONTROL, LIVENESS)
_HELLO_FIELDS = {"secret", "job", "version", "rank", "size", "channel", "host", "pid", "machine", "address"}


def machine_id() -> str:
    """Return a string that is equal on two ranks if and only if they share a host's memory and network."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(Path(path).read_text().strip() if "boot_id" in path else str(os.stat(path).st_ino))
        except OSError:
            parts.append("-")
    return " ".join(parts)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class RendezvousServer:
    """Rank 0's side of the rendezvous."""

    def __init__(self, server: socket.socket, endpoint: Endpoint, size: int, local: LocalRanks | None) -> None:
        """`local`: the ranks that this process started, whose early exit ends the wait."""
        self.endpoint, self.size, self.local = endpoint, size, local
        self.links: dict[str, dict[int, Link]] = {channel: {} for channel in CHANNELS}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._unauthenticated: set[Link] = set()
        self._error: str | None = None  # why the job cannot start
        self._given_up: set[int] = set()  # ranks that are no longer waited for
        self._deadline = 0.0
        self._server = server
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait_for_ranks(self, timeout: float) -> tuple[RankInfo, ...]:
        """Wait for every rank, send all of them the table of ranks and return it.

        On an error, the ranks that have connected receive its message.
        """
        try:
            self._deadline = time.monotonic() + timeout
            while self._missing():
                if time.monotonic() > self._deadline:
                    raise YalisFailure(self._error or self._describe_missing(timeout))
                for key, _ in self._selector.select(min(0.1, timeout)):
                    if isinstance(key.fileobj, Link):
                        self._read(key.fileobj)
                    else:
                        self._accept()
                self._check_local_ranks()
            if self._error:
                raise YalisFailure(self._error)
            members = self._make_table()
            for rank, link in self.links[CONTROL].items():
                self._send(rank, link, {"members": [asdict(member) for member in members]})
            return members
        except BaseException as error:
            message = str(error) if isinstance(error, YalisFailure) else "rank 0 gave up before all ranks had joined"
            for link in self.links[CONTROL].values():
                _try_send(link, {"refused": message})
            for channel in CHANNELS:
                _close(self.links[channel])
            raise
        finally:
            for link in self._unauthenticated:
                link.close()
            self._selector.close()
            self._server.close()

    def _missing(self) -> list[int]:
        expected = (rank for rank in range(1, self.size) if rank not in self._given_up)
        return [rank for rank in expected if any(rank not in self.links[name] for name in CHANNELS)]

    def _give_up(self, rank: int, message: str) -> None:
        """Record that the job cannot start because of this rank, and stop waiting for it."""
        self._error = self._error or message
        self._given_up.add(rank)
        self._deadline = min(self._deadline, time.monotonic() + _LINGER_S)

    def _describe_missing(self, timeout: float) -> str:
        return (
            f"{list_ranks(self._missing())} of {self.size} did not arrive at rank 0 ({socket.gethostname()}, port "
            f"{self._server.getsockname()[1]}) within {timeout:g} s; look for their error messages, and check that "
            "other hosts can reach this port"
        )

    def _check_local_ranks(self) -> None:
        for rank in self._missing() if self.local else ():
            if self.local and (status := self.local.exit_status(rank)):
                raise YalisFailure(f"rank {rank} on {socket.gethostname()} ended before it joined ({status})")

    def _accept(self) -> None:
        try:
            sock, address = self._server.accept()
        except OSError:
            return  # the peer has disconnected already
        link = Link(sock, plain_address(address[0]), limit=_MAX_HELLO)
        self._unauthenticated.add(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: Link) -> None:
        if not link.poll(0):
            return
        if link not in self._unauthenticated:  # a joined rank sends nothing more here, so its connection has ended
            rank = next(r for channel in self.links.values() for r, known in channel.items() if known is link)
            hello = self._hellos[rank]
            status = (self.local.exit_status(rank, 0.3) if self.local else None) or f"pid {hello['pid']}"
            self._give_up(rank, f"rank {rank} on {hello['host']} ({status}) died before all ranks had joined")
            self._disconnect(link)
            return
        self._unauthenticated.remove(link)
        hello = {}
        with contextlib.suppress(LinkLost):
            hello = link.receive()
        if refusal := self._check_hello(hello, link):
            _try_send(link, refusal)
            self._disconnect(link)
            return
        rank, channel = int(hello["rank"]), str(hello["channel"])
        link.peer, link.limit = f"rank {rank} on {hello['host']}", MAX_FRAME
        self._hellos.setdefault(rank, hello)
        self.links[channel][rank] = link
        _try_send(link, {"here": rank})

    def _disconnect(self, link: Link) -> None:
        self._selector.unregister(link)
        link.close()

    def _check_hello(self, hello: Any, link: Link) -> dict[str, str] | None:
        """Return the refusal to send, or None if the hello is accepted."""
        if not isinstance(hello, dict) or not hello.keys() >= _HELLO_FIELDS:
            return {"stranger": f"rank 0 of {self.endpoint.job} received an unknown message from {link.peer}"}
        if not hmac.compare_digest(str(hello["secret"]).encode(), self.endpoint.secret.encode()):
            return {"stranger": f"this is rank 0 of {self.endpoint.job}, not of {hello['job']}"}
        rank, sender = hello["rank"], f"rank {hello['rank']} on {hello['host']} (pid {hello['pid']})"
        if hello["version"] != __version__:
            return self._refuse(
                rank,
                f"{sender} runs yalis {hello['version']} and rank 0 on {socket.gethostname()} runs {__version__}; "
                "install the same version on every host",
            )
        if hello["size"] != self.size or rank not in range(1, self.size) or hello["channel"] not in CHANNELS:
            return self._refuse(
                rank, f"{sender} was started as one of {hello['size']} ranks, and rank 0 as one of {self.size}"
            )
        known = self._hellos.get(rank)
        if rank in self.links[hello["channel"]] or (
            known and (known["pid"], known["machine"]) != (hello["pid"], hello["machine"])
        ):
            assert known is not None
            return {"refused": f"{sender} is a duplicate: pid {known['pid']} on {known['host']} is rank {rank} already"}
        return None

    def _refuse(self, rank: int, message: str) -> dict[str, str]:
        self._give_up(rank, message)
        return {"refused": message}

    def _send(self, rank: int, link: Link, message: Any) -> None:
        try:
            link.send(message)
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


def _try_send(link: Link, message: Any) -> None:
    with contextlib.suppress(LinkLost):  # a peer that has disconnected needs no answer
        link.send(message)


def connect_to_rank0(
    endpoint: Endpoint, rank: int, size: int, timeout: float, parent_pid: int | None = None
) -> tuple[tuple[RankInfo, ...], dict[str, Link]]:
    """Connect to rank 0 and wait until all ranks have joined. Returns the table of ranks and a link per channel."""
    links: dict[str, Link] = {}
    deadline = time.monotonic() + timeout
    hello = {"secret": endpoint.secret, "job": endpoint.job, "version": __version__, "rank": rank, "size": size}
    hello |= {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine_id()}
    try:
        ports: Sequence[int] = endpoint.ports
        for channel in CHANNELS:
            links[channel], port = _connect(
                endpoint, ports, {**hello, "channel": channel}, deadline, timeout, parent_pid
            )
            ports = (port,)
        # Rank 0 started to wait before this rank reached it, so its own timeout ends first.
        if not links[CONTROL].poll(timeout + _ANSWER_S):
            raise YalisFailure(
                f"rank 0 on {endpoint.host} did not report within {timeout:g} s that all ranks had joined"
            )
        answer = links[CONTROL].receive()
        if "members" not in answer:
            raise YalisFailure(answer["refused"])
    except LinkLost as error:
        _close(links)
        raise YalisFailure(f"rank 0 on {endpoint.host} ended before all ranks had joined") from error
    except BaseException:
        _close(links)
        raise
    return tuple(RankInfo(**member) for member in answer["members"]), links


def _close(links: dict[Any, Link]) -> None:
    for link in links.values():
        link.close()


def _connect(
    endpoint: Endpoint,
    ports: Sequence[int],
    hello: dict[str, Any],
    deadline: float,
    timeout: float,
    parent_pid: int | None,
) -> tuple[Link, int]:
    """Try rank 0's ports until one accepts the hello; rank 0 may start later, or another program may use a port."""
    problem = "no answer"
    pause = 0.02
    while True:
        for port in ports:
            answer: Any = {}
            try:
                sock = socket.create_connection((endpoint.host, port), timeout=5)
                link = Link(sock, f"rank 0 on {endpoint.host}", limit=_MAX_HELLO)
                link.send({**hello, "address": link.addresses()[0]})
                answer = link.receive() if link.poll(_ANSWER_S) else {}
                answer = answer if isinstance(answer, dict) else {}
            except OSError as error:
                problem = error.strerror or str(error)
                continue
            except LinkLost as error:
                problem = str(error)
            if "here" in answer:
                link.limit = MAX_FRAME
                return link, port
            link.close()
            if "refused" in answer:
                raise YalisFailure(str(answer["refused"]))
            problem = str(answer.get("stranger", problem))
        if parent_pid is not None and os.getppid() != parent_pid:
            raise YalisFailure(f"rank 0 (pid {parent_pid}) ended before rank {hello['rank']} reached it")
        if time.monotonic() > deadline:
            raise Rank0Unreachable(
                f"rank {hello['rank']} on {hello['host']} did not reach rank 0 at {endpoint.host}, port "
                f"{', '.join(map(str, ports))}, within {timeout:g} s ({problem}); start all ranks, or give a larger "
                "join_timeout="
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)
