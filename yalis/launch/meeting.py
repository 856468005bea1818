"""Where rank 0 is found, by launcher."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any

from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.environment import Place
from yalis.launch.link import listen, plain_address

_CANDIDATES = 8
_PORTS = range(20000, 32000)  # below what Linux hands out for outgoing connections


@dataclass(frozen=True)
class Meeting:
    host: str
    ports: tuple[int, ...]  # rank 0 listens on one of these
    job: str
    secret: str  # what a rank must know to be let in


def open_meeting(place: Place, timeout: float) -> tuple[socket.socket, Meeting]:
    """Rank 0's side: a listening socket, announced where the others look for it."""
    if place.store or (place.launcher == "mpirun" and not _agreed_in_advance(place)):
        server = listen("127.0.0.1" if place.one_machine else "", 0)
        host = "127.0.0.1" if place.one_machine else _own_address(place)
        meeting = Meeting(host, (server.getsockname()[1],), place.job, secrets.token_hex(16))
        try:
            if place.store:
                _store(place, timeout).set(_key(place), json.dumps(asdict(meeting)))
            else:
                _broadcast(meeting)
        except BaseException:
            server.close()
            raise
        return server, meeting
    meeting = _known_meeting(place)
    for port in meeting.ports:
        try:
            return listen("127.0.0.1" if meeting.host in ("127.0.0.1", "localhost") else "", port), meeting
        except OSError as error:
            reason = error.strerror or str(error)
    ports = ", ".join(map(str, meeting.ports))
    raise YalisFailure(f"rank 0 cannot listen on port {ports} of this host ({reason}); choose another with MASTER_PORT")


def find_meeting(place: Place, timeout: float) -> Meeting:
    """Everybody else's side."""
    if place.store:
        try:
            return _meeting(json.loads(_store(place, timeout).get(_key(place))))
        except RuntimeError as error:
            raise YalisFailure(
                f"rank 0 did not announce itself in torchrun's store at {place.address}:{place.port} within "
                f"{timeout:g} s ({first_line(error)})"
            ) from error
    if place.launcher == "mpirun" and not _agreed_in_advance(place):
        return _broadcast(None)
    return _known_meeting(place)


def _agreed_in_advance(place: Place) -> bool:
    return place.address is not None or place.one_machine


def _known_meeting(place: Place) -> Meeting:
    """Address and port that every rank works out alone."""
    host = place.address or ("127.0.0.1" if place.one_machine else None)
    if host is None or (place.launcher == "torchrun" and place.port is None):
        raise YalisError(
            f"{place.launcher}'s environment does not say where rank 0 is; set MASTER_ADDR to its host and MASTER_PORT "
            "to a free port for every rank"
        )
    ports = (place.port,) if place.port is not None else ports_of(place.job)
    return Meeting(host, ports, place.job, place.secret or place.job)


def ports_of(job: str) -> tuple[int, ...]:
    """Ports that follow from a job's name; several, in case another program has the first."""
    digest = hashlib.sha256(job.encode()).digest()
    return tuple(_PORTS[int.from_bytes(digest[2 * i : 2 * i + 2], "big") % len(_PORTS)] for i in range(_CANDIDATES))


def _meeting(value: dict[str, Any]) -> Meeting:
    return Meeting(value["host"], tuple(value["ports"]), value["job"], value["secret"])


def _store(place: Place, timeout: float) -> Any:
    """A client of the store that torchrun's agent keeps at MASTER_ADDR and MASTER_PORT."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if place.address is None or place.port is None:
        raise YalisError("torchrun's environment has no MASTER_ADDR and MASTER_PORT; start the ranks with torchrun")
    try:
        return TCPStore(place.address, place.port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise YalisFailure(
            f"torchrun's store at {place.address}:{place.port} did not answer ({first_line(error)})"
        ) from error


def _key(place: Place) -> str:
    return f"yalis/{place.job}/rank0"


def _own_address(place: Place) -> str:
    """The address of this host that faces the others."""
    if place.address is None:
        return socket.gethostname()
    try:
        found = socket.getaddrinfo(place.address, place.port or 1, type=socket.SOCK_DGRAM)
    except OSError:
        return socket.gethostname()
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)  # of a datagram socket: chooses a route, sends nothing
            except OSError:
                continue
            own = plain_address(str(probe.getsockname()[0]))
            # MASTER_ADDR is this host: its name means something to the others, its loopback address does not.
            return place.address if own.startswith("127.") or own == "::1" else own
    return socket.gethostname()


def _broadcast(meeting: Meeting | None) -> Meeting:
    """Rank 0's meeting to all, through MPI itself."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise YalisError(
            "mpirun does not say where rank 0 is; add -x MASTER_ADDR=HOST -x MASTER_PORT=PORT with rank 0's host and a "
            "free port there, or pip install mpi4py"
        ) from None
    sent = MPI.COMM_WORLD.bcast(None if meeting is None else json.dumps(asdict(meeting)), root=0)
    return _meeting(json.loads(sent))
