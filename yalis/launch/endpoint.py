"""Publishes and finds the endpoint (host and port) on which rank 0 listens.

- torchrun: rank 0 writes it to the TCPStore of torchrun's agent.
- mpirun on several hosts: rank 0 broadcasts it over MPI, together with the job's secret if the user gave none.
- Otherwise every rank derives it from the launcher's variables: MASTER_ADDR and MASTER_PORT where they are set, else
  the first node of the job and ports computed from the job's name.

An endpoint is neither secret nor trusted: the handshake (`auth.py`) verifies that rank 0 of this job is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import socket
from typing import Any, NamedTuple

from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.launchers import TORCHRUN, LaunchInfo
from yalis.launch.link import is_loopback, listen, plain_address
from yalis.launch.secret import uses_mpi_broadcast

_NUM_PORTS = 8
_PORTS = range(20000, 32000)  # below the ephemeral ports of Linux
_EXAMPLE_ADDRESSES = ("192.0.2.1", "2001:db8::1")  # reserved for documentation; used only to find the default route


class Endpoint(NamedTuple):
    """Where rank 0 of a job accepts the other ranks."""

    host: str
    ports: tuple[int, ...]  # rank 0 listens on one of these
    job: str


def open_endpoint(info: LaunchInfo, secret: bytes | None, timeout: float) -> tuple[socket.socket, Endpoint]:
    """Listen on rank 0 and publish the endpoint. Returns the listening socket and the endpoint.

    `secret`: the job's secret if it is to be published over MPI.
    """
    if not info.has_store and not uses_mpi_broadcast(info):
        endpoint = derive_endpoint(info)
        return _listen(info, endpoint.ports), endpoint
    server = _listen(info, (0,))
    address, port = server.getsockname()[:2]
    endpoint = Endpoint(address if _is_specific(address) else socket.gethostname(), (port,), info.job)
    try:
        if info.has_store:
            _connect_store(info, timeout).set(_store_key(info), json.dumps(endpoint._asdict()))
        else:
            _broadcast(info, {**endpoint._asdict(), "secret": secret and secret.decode()})
    except BaseException:
        server.close()
        raise
    return server, endpoint


def find_endpoint(info: LaunchInfo, timeout: float) -> tuple[Endpoint, bytes | None]:
    """Return the endpoint of rank 0 and, if MPI broadcast it too, the job's secret. For ranks other than 0.

    Waits until rank 0 has published the endpoint.
    """
    if info.has_store:
        try:
            return _parse(_connect_store(info, timeout).get(_store_key(info))), None
        except RuntimeError as error:
            raise YalisFailure(
                f"rank 0 did not publish its address in torchrun's store at {info.address}:{info.port} within "
                f"{timeout:g} s ({first_line(error)})"
            ) from error
    if uses_mpi_broadcast(info):
        published = _broadcast(info, None)
        secret = published["secret"]
        endpoint = Endpoint(published["host"], tuple(published["ports"]), published["job"])
        return endpoint, secret and secret.encode()
    return derive_endpoint(info), None


def derive_endpoint(info: LaunchInfo) -> Endpoint:
    """Return the endpoint as computed from the launcher's variables, the same on every rank."""
    host = info.address or ("127.0.0.1" if info.single_host else None)
    if host is None or (info.launcher == TORCHRUN.name and info.port is None):
        raise YalisError(
            f"the environment of {info.launcher} does not contain the address of rank 0; set MASTER_ADDR to its host "
            "and MASTER_PORT to a free port, for every rank"
        )
    return Endpoint(host, (info.port,) if info.port is not None else derive_ports(info.job), info.job)


def derive_ports(job: str) -> tuple[int, ...]:
    """Return candidate ports computed from a job's name; several, in case another program uses the first."""
    digest = hashlib.sha256(job.encode()).digest()
    return tuple(_PORTS[int.from_bytes(digest[2 * i : 2 * i + 2], "big") % len(_PORTS)] for i in range(_NUM_PORTS))


def resolve(host: str) -> list[str]:
    """Return the IP addresses of a host name, in the order in which to try them."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _listen(info: LaunchInfo, ports: tuple[int, ...]) -> socket.socket:
    """Listen on the address at which the other ranks reach rank 0, on the first of `ports` that is free."""
    addresses = _own_addresses(info)
    problems = {}
    for address in addresses:
        for port in ports:
            try:
                return listen(address, port)
            except OSError as error:
                problems[error.errno] = error.strerror or str(error)
                if error.errno == errno.EADDRNOTAVAIL:
                    break
    if set(problems) == {errno.EADDRNOTAVAIL}:
        raise YalisFailure(
            f"rank 0 runs on {socket.gethostname()}, which does not have the address {' or '.join(addresses)} of "
            f"{info.address}; set MASTER_ADDR to the address of the host of rank 0, for every rank"
        )
    raise YalisFailure(
        f"rank 0 cannot listen on port {', '.join(map(str, ports))} of this host ({', '.join(problems.values())}); "
        "choose another port with MASTER_PORT"
    )


def _own_addresses(info: LaunchInfo) -> list[str]:
    """Return the addresses of this host at which other ranks can reach rank 0; [""] for all if they are unknown."""
    if info.has_store and info.address is not None:  # rank 0 may be on another host than torchrun's store
        route = _route_to(info.address)
        if route is not None and not is_loopback(route):
            return [route]
    name = info.address or ("127.0.0.1" if info.single_host else socket.gethostname())
    try:
        addresses = resolve(name)
    except OSError:
        addresses = []
    if not info.single_host:
        # Some hosts map their own name to a loopback address, where other hosts cannot reach them.
        addresses = [address for address in addresses if not is_loopback(address)]
    if addresses:
        return addresses
    routes = (_route_to(host) for host in (info.peer, *_EXAMPLE_ADDRESSES) if host is not None)
    return [next((route for route in routes if route is not None and not is_loopback(route)), "")]


def _route_to(host: str) -> str | None:
    """Return this host's address on the route to another host, or None if there is no route."""
    try:
        resolved = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, socket_type, protocol, _, target in resolved:
        with socket.socket(family, socket_type, protocol) as probe:
            try:
                probe.connect(target)  # on a datagram socket this only selects a route; nothing is sent
                return plain_address(str(probe.getsockname()[0]))
            except OSError:
                continue
    return None


def _is_specific(address: str) -> bool:
    return address not in ("", "0.0.0.0", "::")


def _parse(text: str | bytes) -> Endpoint:
    """Parse the endpoint in torchrun's store, which any process can write."""
    try:
        value = json.loads(text[:4096])
        host, ports, job = str(value["host"]), tuple(map(int, value["ports"])), str(value["job"])
        if not host or not ports or not all(0 < port < 65536 for port in ports):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise YalisFailure("torchrun's store contains no valid address of rank 0; another process wrote it") from None
    return Endpoint(host, ports, job)


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


def _broadcast(info: LaunchInfo, value: dict[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's value to all ranks over MPI; the other ranks pass None."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise YalisError(
            "mpirun does not set the address of rank 0; add -x MASTER_ADDR=HOST -x MASTER_PORT=PORT with the host of "
            "rank 0 and a free port there, or pip install mpi4py"
        ) from None
    if info.size != MPI.COMM_WORLD.size:
        raise YalisFailure(
            f"mpirun started {info.size} ranks, but mpi4py has {MPI.COMM_WORLD.size}: it was built for another MPI; "
            "reinstall it with `pip install --no-binary mpi4py mpi4py`"
        )
    return dict(MPI.COMM_WORLD.bcast(value, root=0))
