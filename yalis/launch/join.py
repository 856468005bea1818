"""Connects this process with the other ranks of its job. Every rank calls `join`, however it was started.

Imports are most of the time of a join. So the modules of this package load no dataclasses (which load inspect), logging
or ctypes: their records are NamedTuples.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from yalis.errors import NotJoined, YalisError, YalisFailure, describe_error
from yalis.launch.auth import JobKey, Method
from yalis.launch.endpoint import find_endpoint, open_endpoint
from yalis.launch.launchers import YALIS, LaunchInfo, detect_launcher, launch_command, yalis_variables
from yalis.launch.link import listen
from yalis.launch.local import LocalRanks
from yalis.launch.rendezvous import CONTROL, LIVENESS, RankClient, RendezvousServer
from yalis.launch.secret import choose_method, find_secret, new_secret, published_secret
from yalis.launch.world import World, make_world
from yalis.log import get_logger

_persistent: World | None = None  # the ranks of an external launcher meet once; later engines use the same world


def join(size: int, worker: Sequence[str], timeout: float = 300, insecure: bool = False) -> World:
    """Return the world of `size` ranks that this process belongs to.

    Without a launcher, this process is rank 0 and starts the other ranks as `python -m WORKER`; WORKER calls `join`
    too. Under torchrun, srun or mpirun every rank calls it. Fails after `timeout` seconds, naming the missing ranks.
    `insecure` allows ranks that cannot authenticate each other.
    """
    global _persistent
    info = detect_launcher()
    if info.launcher and info.size != size:
        command = " ".join(launch_command(info.launcher, size)) or f"{size} ranks"
        raise YalisError(
            f"this model is split over {size} rank{'s' * (size > 1)} and {info.launcher} started {info.size}; type "
            f"{command} (over all nodes), or choose tp=, pp= and dp= whose product is {info.size}"
        )
    if _persistent:
        if _persistent.failure:
            raise YalisFailure(_persistent.failure)
        return _persistent
    if not info.launcher and size == 1:
        return World.single_process()
    try:
        if not info.launcher:
            return _start_ranks(size, worker, timeout)
        persistent = info.launcher != YALIS.name
        method = choose_method(info, insecure)
        timeout = info.join_timeout or timeout
        world = _join_rank0(info, method, timeout, persistent) if info.rank else _accept_ranks(info, method, timeout)
    except YalisError:
        raise
    except Exception as error:  # not connected, so this rank must print the error itself
        raise NotJoined(f"rank {info.rank} on {socket.gethostname()}: {describe_error(error)}") from error
    if persistent:
        _persistent = world
    return world


def _start_ranks(size: int, worker: Sequence[str], timeout: float) -> World:
    """Start the other ranks on this host and return the world as rank 0."""
    if choose_method(LaunchInfo(), insecure=False) is Method.GIVEN:
        get_logger(__name__).warning(
            "YALIS_SECRET and YALIS_SECRET_FILE are not used: without a launcher, the ranks get a random secret that "
            "only this job has"
        )
    server = listen("127.0.0.1", 0)
    key = JobKey(Method.GIVEN, f"yalis pid {os.getpid()}", new_secret().encode())
    port = server.getsockname()[1]
    variables = yalis_variables(size, "127.0.0.1", port, key.job, key.secret.decode(), timeout)
    try:
        local = LocalRanks(worker, range(1, size), variables)
    except BaseException:
        server.close()
        raise
    try:
        rendezvous = RendezvousServer(server, key, size, local)
        members = rendezvous.wait_for_ranks(timeout)
        return make_world(0, members, rendezvous.links[CONTROL], rendezvous.links[LIVENESS], key, local)
    except BaseException:
        local.stop(0.5)
        raise


def _accept_ranks(info: LaunchInfo, method: Method, timeout: float) -> World:
    """Wait for the other ranks of an external launcher and return the world as rank 0."""
    with published_secret(info, method) as secret:
        server, endpoint = open_endpoint(info, secret if method is Method.MPI else None, timeout)
        key = JobKey(method, endpoint.job, secret)
        rendezvous = RendezvousServer(server, key, info.size, None)
        members = rendezvous.wait_for_ranks(timeout)
    return make_world(0, members, rendezvous.links[CONTROL], rendezvous.links[LIVENESS], key, persistent=True)


def _join_rank0(info: LaunchInfo, method: Method, timeout: float, persistent: bool) -> World:
    """Connect to rank 0 and return the world as any other rank."""
    endpoint, secret = find_endpoint(info, timeout)
    client = RankClient(
        endpoint,
        method,
        lambda: _find_secret(info, method) if secret is None else secret,
        info.rank,
        info.size,
        timeout,
        info.parent_pid,
    )
    members, key = client.join()
    links = client.links
    return make_world(info.rank, members, {0: links[CONTROL]}, {0: links[LIVENESS]}, key, persistent=persistent)


def _find_secret(info: LaunchInfo, method: Method) -> bytes | None:
    try:
        return find_secret(info, method)
    except YalisError as error:
        if method is Method.GIVEN:
            raise  # rank 0 reports the same error
        raise NotJoined(f"rank {info.rank} on {socket.gethostname()}: {error}") from error
