"""How the other ranks find the endpoint (host, port and secret) that rank 0 listens on.

- torchrun: rank 0 writes it to the TCPStore of torchrun's agent.
- mpirun on several hosts: rank 0 broadcasts it over MPI.
- Otherwise every rank derives it from the launcher's variables: MASTER_ADDR and MASTER_PORT where they are set, else
  the first node of the job and ports computed from the job's name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any

from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.launchers import OPEN_MPI, TORCHRUN, LaunchInfo
from yalis.launch.link import listen, plain_address

_NUM_PORTS = 8
_PORTS = range(20000, 32000)  # below the ephemeral ports of Linux


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 of a job accepts the other ranks."""

    host: str
    ports: tuple[int, ...]  # rank 0 listens on one of these
    job: str
    secret: str  # a rank must present it to be accepted


def open_endpoint(info: LaunchInfo, timeout: float) -> tuple[socket.socket, Endpoint]:
    """Listen on rank 0 and publish the endpoint. Returns the listening socket and the endpoint."""
    if info.has_store or _uses_mpi_broadcast(info):
        server = listen("127.0.0.1" if info.single_host else "", 0)
        host = "127.0.0.1" if info.single_host else _own_address(info)
        endpoint = Endpoint(host, (server.getsockname()[1],), info.job, secrets.token_hex(16))
        try:
            if info.has_store:
                _connect_store(info, timeout).set(_store_key(info), json.dumps(asdict(endpoint)))
            else:
                _broadcast(endpoint)
        except BaseException:
            server.close()
            raise
        return server, endpoint
    endpoint = derive_endpoint(info)
    for port in endpoint.ports:
        try:
            return listen("127.0.0.1" if endpoint.host in ("127.0.0.1", "localhost") else "", port), endpoint
        except OSError as error:
            reason = error.strerror or str(error)
    ports = ", ".join(map(str, endpoint.ports))
    raise YalisFailure(
        f"rank 0 cannot listen on port {ports} of this host ({reason}); choose another port with MASTER_PORT"
    )


def find_endpoint(info: LaunchInfo, timeout: float) -> Endpoint:
    """Return the endpoint of rank 0, on any other rank. Waits until rank 0 has published it."""
    if info.has_store:
        try:
            return _parse(_connect_store(info, timeout).get(_store_key(info)))
        except RuntimeError as error:
            raise YalisFailure(
                f"rank 0 did not publish its address in torchrun's store at {info.address}:{info.port} within "
                f"{timeout:g} s ({first_line(error)})"
            ) from error
    if _uses_mpi_broadcast(info):
        return _broadcast(None)
    return derive_endpoint(info)


def derive_endpoint(info: LaunchInfo) -> Endpoint:
    """Return the endpoint as computed from the launcher's variables, the same on every rank."""
    host = info.address or ("127.0.0.1" if info.single_host else None)
    if host is None or (info.launcher == TORCHRUN.name and info.port is None):
        raise YalisError(
            f"the environment of {info.launcher} does not contain the address of rank 0; set MASTER_ADDR to its host "
            "and MASTER_PORT to a free port, for every rank"
        )
    ports = (info.port,) if info.port is not None else derive_ports(info.job)
    return Endpoint(host, ports, info.job, info.secret or info.job)


def derive_ports(job: str) -> tuple[int, ...]:
    """Return candidate ports computed from a job's name; several, in case another program uses the first."""
    digest = hashlib.sha256(job.encode()).digest()
    return tuple(_PORTS[int.from_bytes(digest[2 * i : 2 * i + 2], "big") % len(_PORTS)] for i in range(_NUM_PORTS))


def _uses_mpi_broadcast(info: LaunchInfo) -> bool:
    return info.launcher == OPEN_MPI.name and info.address is None and not info.single_host


def _parse(text: str | bytes) -> Endpoint:
    value = json.loads(text)
    return Endpoint(value["host"], tuple(value["ports"]), value["job"], value["secret"])


def _connect_store(info: LaunchInfo, timeout: float) -> Any:
    """Return a client of the TCPStore that torchrun's agent serves at MASTER_ADDR and MASTER_PORT."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if info.address is None or info.port is None:
        raise YalisError(
            "the environment of torchrun has no MASTER_ADDR and MASTER_PORT; start the ranks with torchrun"
        )
    try:
        return TCPStore(info.address, info.port, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise YalisFailure(
            f"torchrun's store at {info.address}:{info.port} did not answer ({first_line(error)})"
        ) from error


def _store_key(info: LaunchInfo) -> str:
    return f"yalis/{info.job}/rank0"


def _own_address(info: LaunchInfo) -> str:
    """Return the address of this host on the network of the other ranks."""
    if info.address is None:
        return socket.gethostname()
    try:
        resolved = socket.getaddrinfo(info.address, info.port or 1, type=socket.SOCK_DGRAM)
    except OSError:
        return socket.gethostname()
    for family, socket_type, protocol, _, target in resolved:
        with socket.socket(family, socket_type, protocol) as probe:
            try:
                probe.connect(target)  # a datagram socket only chooses a route here; nothing is sent
            except OSError:
                continue
            address = plain_address(str(probe.getsockname()[0]))
            # A loopback route means that MASTER_ADDR is this host. The other hosts can resolve its name.
            return info.address if address.startswith("127.") or address == "::1" else address
    return socket.gethostname()


def _broadcast(endpoint: Endpoint | None) -> Endpoint:
    """Broadcast rank 0's endpoint to all ranks over MPI; the other ranks pass None."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise YalisError(
            "mpirun does not set the address of rank 0; add -x MASTER_ADDR=HOST -x MASTER_PORT=PORT with the host of "
            "rank 0 and a free port there, or pip install mpi4py"
        ) from None
    return _parse(MPI.COMM_WORLD.bcast(None if endpoint is None else json.dumps(asdict(endpoint)), root=0))
