"""All ranks meet at rank 0: who is there, on which machine, under which address."""

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

from yalis.errors import NotHeard, YalisFailure
from yalis.launch.link import MAX_FRAME, Link, LinkLost, plain_address
from yalis.launch.local import LocalRanks
from yalis.launch.meeting import Meeting
from yalis.launch.member import Member, list_ranks
from yalis.version import __version__

_MAX_HELLO = 64 << 10  # before anyone has shown who they are
_PATIENCE_S = 10  # for an answer to a hello
_LINGER_S = 5  # once the job cannot be, for the others to come and hear why
CHANNELS = ("control", "watch")


def machine() -> str:
    """The same on two ranks if and only if they share this machine's memory and network."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(Path(path).read_text().strip() if "boot_id" in path else str(os.stat(path).st_ino))
        except OSError:
            parts.append("-")
    return " ".join(parts)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class Reception:
    """Rank 0's side."""

    def __init__(self, server: socket.socket, meeting: Meeting, size: int, local: LocalRanks | None) -> None:
        self.meeting, self.size, self.local = meeting, size, local
        self.links: dict[str, dict[int, Link]] = {channel: {} for channel in CHANNELS}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._unknown: set[Link] = set()
        self._verdict: str | None = None  # why there will be no job
        self._condemned: set[int] = set()  # ranks not waited for any more
        self._deadline = 0.0
        self._server = server
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def receive_all(self, timeout: float) -> tuple[Member, ...]:
        """Wait for every rank and tell all who is there; on any trouble everyone who came is told why."""
        try:
            self._deadline = time.monotonic() + timeout
            while self._missing():
                if time.monotonic() > self._deadline:
                    raise YalisFailure(self._verdict or self._absence(timeout))
                for key, _ in self._selector.select(min(0.1, timeout)):
                    if isinstance(key.fileobj, Link):
                        self._read(key.fileobj)
                    else:
                        self._accept()
                self._check_started()
            if self._verdict:
                raise YalisFailure(self._verdict)
            members = self._table()
            for rank, link in self.links["control"].items():
                self._send(rank, link, {"members": [asdict(member) for member in members]})
            return members
        except BaseException as error:
            sentence = str(error) if isinstance(error, YalisFailure) else "rank 0 gave up before all ranks were there"
            for link in self.links["control"].values():
                _answer(link, {"refused": sentence})
            for link in (*self.links["control"].values(), *self.links["watch"].values()):
                link.close()
            raise
        finally:
            for link in self._unknown:
                link.close()
            self._selector.close()
            self._server.close()

    def _missing(self) -> list[int]:
        awaited = (rank for rank in range(1, self.size) if rank not in self._condemned)
        return [rank for rank in awaited if any(rank not in self.links[name] for name in CHANNELS)]

    def _condemn(self, rank: int, sentence: str) -> None:
        """There is no job without this rank."""
        self._verdict = self._verdict or sentence
        self._condemned.add(rank)
        self._deadline = min(self._deadline, time.monotonic() + _LINGER_S)

    def _absence(self, timeout: float) -> str:
        missing = self._missing()
        return (
            f"{list_ranks(missing)} of {self.size} did not arrive at rank 0 ({socket.gethostname()}, port "
            f"{self._server.getsockname()[1]}) within {timeout:g} s; look for messages of "
            "theirs, and whether other hosts can reach this port"
        )

    def _check_started(self) -> None:
        for rank in self._missing() if self.local else ():
            if self.local and (end := self.local.ended(rank)):
                raise YalisFailure(f"rank {rank} on {socket.gethostname()} ended before it joined ({end})")

    def _accept(self) -> None:
        try:
            sock, address = self._server.accept()
        except OSError:
            return  # whoever it was has left again
        link = Link(sock, plain_address(address[0]), limit=_MAX_HELLO)
        self._unknown.add(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: Link) -> None:
        if not link.poll(0):
            return
        if link not in self._unknown:  # nobody speaks again before the welcome, so this is an end
            rank = next(r for channel in self.links.values() for r, known in channel.items() if known is link)
            hello = self._hellos[rank]
            end = (self.local.ended(rank, 0.3) if self.local else None) or f"pid {hello['pid']}"
            self._condemn(rank, f"rank {rank} on {hello['host']} ({end}) died while ranks were still arriving")
            self._dismiss(link)
            return
        self._unknown.remove(link)
        hello = {}
        with contextlib.suppress(LinkLost):
            hello = link.receive()
        if refusal := self._judge(hello, link):
            _answer(link, refusal)
            self._dismiss(link)
            return
        rank, channel = int(hello["rank"]), str(hello["channel"])
        link.peer, link.limit = f"rank {rank} on {hello['host']}", MAX_FRAME
        self._hellos.setdefault(rank, hello)
        self.links[channel][rank] = link
        _answer(link, {"here": rank})

    def _dismiss(self, link: Link) -> None:
        self._selector.unregister(link)
        link.close()

    def _judge(self, hello: Any, link: Link) -> dict[str, str] | None:
        """Why this hello is not accepted."""
        wanted = {"secret", "job", "version", "rank", "size", "channel", "host", "pid", "machine", "address"}
        if not isinstance(hello, dict) or not wanted <= hello.keys():
            return {"stranger": f"rank 0 of {self.meeting.job} did not understand what {link.peer} said"}
        if not hmac.compare_digest(str(hello["secret"]).encode(), self.meeting.secret.encode()):
            return {"stranger": f"this is rank 0 of {self.meeting.job}, not of {hello['job']}"}
        rank, who = hello["rank"], f"rank {hello['rank']} on {hello['host']} (pid {hello['pid']})"
        if hello["version"] != __version__:
            return self._refuse(
                rank,
                f"{who} runs yalis {hello['version']} and rank 0 on {socket.gethostname()} runs {__version__}; install "
                "the same version on every host",
            )
        if hello["size"] != self.size or rank not in range(1, self.size) or hello["channel"] not in CHANNELS:
            return self._refuse(
                rank, f"{who} was started as one of {hello['size']} ranks, and rank 0 as one of {self.size}"
            )
        known = self._hellos.get(rank)
        if rank in self.links[hello["channel"]] or (
            known and (known["pid"], known["machine"]) != (hello["pid"], hello["machine"])
        ):
            assert known is not None
            return {"refused": f"{who} came second: rank {rank} is pid {known['pid']} on {known['host']} already"}
        return None

    def _refuse(self, rank: int, sentence: str) -> dict[str, str]:
        self._condemn(rank, sentence)
        return {"refused": sentence}

    def _send(self, rank: int, link: Link, message: Any) -> None:
        try:
            link.send(message)
        except LinkLost as error:
            raise YalisFailure(f"rank {rank} on {self._hellos[rank]['host']} died at the rendezvous") from error

    def _table(self) -> tuple[Member, ...]:
        ours = [link.addresses()[0] for link in self.links["control"].values()]
        outward = next((address for address in ours if not is_loopback(address)), ours[0])
        own: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": machine(),
            "address": outward,
            "pid": os.getpid(),
        }
        hellos = [own, *(self._hellos[rank] for rank in range(1, self.size))]
        machines: dict[str, list[int]] = {}
        for rank, hello in enumerate(hellos):
            machines.setdefault(hello["machine"], []).append(rank)
        if len(machines) > 1:  # a neighbour may have reached rank 0 by an address that means nothing elsewhere
            for rank in machines[own["machine"]]:
                if is_loopback(hellos[rank]["address"]):
                    hellos[rank] = {**hellos[rank], "address": outward}
        order = list(machines)
        return tuple(
            Member(
                rank,
                hello["host"],
                order.index(hello["machine"]),
                machines[hello["machine"]].index(rank),
                hello["address"],
                hello["pid"],
            )
            for rank, hello in enumerate(hellos)
        )


def _answer(link: Link, message: Any) -> None:
    with contextlib.suppress(LinkLost):  # who has left needs no answer
        link.send(message)


def visit(
    meeting: Meeting, rank: int, size: int, timeout: float, parent: int | None = None
) -> tuple[tuple[Member, ...], dict[str, Link]]:
    """The other ranks' side: go to rank 0 with a connection for each channel, and wait until all are there."""
    links: dict[str, Link] = {}
    deadline = time.monotonic() + timeout
    hello = {"secret": meeting.secret, "job": meeting.job, "version": __version__, "rank": rank, "size": size}
    hello |= {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
    try:
        ports: Sequence[int] = meeting.ports
        for channel in CHANNELS:
            links[channel], port = _call(meeting, ports, {**hello, "channel": channel}, deadline, timeout, parent)
            ports = (port,)
        # rank 0 began to wait before this rank reached it, and gives up first
        if not links["control"].poll(timeout + _PATIENCE_S):
            raise YalisFailure(f"rank 0 on {meeting.host} did not say within {timeout:g} s that all ranks were there")
        welcome = links["control"].receive()
        if "members" not in welcome:
            raise YalisFailure(welcome["refused"])
    except LinkLost as error:
        _close(links)
        raise YalisFailure(f"rank 0 on {meeting.host} ended before all ranks were there") from error
    except BaseException:
        _close(links)
        raise
    return tuple(Member(**member) for member in welcome["members"]), links


def _close(links: dict[str, Link]) -> None:
    for link in links.values():
        link.close()


def _call(
    meeting: Meeting, ports: Sequence[int], hello: dict[str, Any], deadline: float, timeout: float, parent: int | None
) -> tuple[Link, int]:
    """Knock at rank 0's ports until it opens one; it may not be up yet, and others may have taken a port."""
    trouble = "no answer"
    pause = 0.02
    while True:
        for port in ports:
            answer: Any = {}
            try:
                sock = socket.create_connection((meeting.host, port), timeout=5)
                link = Link(sock, f"rank 0 on {meeting.host}", limit=_MAX_HELLO)
                link.send({**hello, "address": link.addresses()[0]})
                answer = link.receive() if link.poll(_PATIENCE_S) else {}
                answer = answer if isinstance(answer, dict) else {}
            except OSError as error:
                trouble = error.strerror or str(error)
                continue
            except LinkLost as error:
                trouble = str(error)
            if "here" in answer:
                link.limit = MAX_FRAME
                return link, port
            link.close()
            if "refused" in answer:
                raise YalisFailure(str(answer["refused"]))
            trouble = str(answer.get("stranger", trouble))
        if parent is not None and os.getppid() != parent:
            raise YalisFailure(f"rank 0 (pid {parent}) ended before rank {hello['rank']} reached it")
        if time.monotonic() > deadline:
            raise NotHeard(
                f"rank {hello['rank']} on {hello['host']} did not reach rank 0 at {meeting.host}, port "
                f"{', '.join(map(str, ports))}, within {timeout:g} s ({trouble}); start all ranks, or give a larger "
                "--join-timeout"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)
