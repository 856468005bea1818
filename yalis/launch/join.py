"""Becoming one of a job's ranks, whoever started them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from yalis.errors import YalisError, YalisFailure
from yalis.launch.environment import Place, find_place
from yalis.launch.link import listen
from yalis.launch.local import LocalRanks
from yalis.launch.meeting import Meeting, find_meeting, open_meeting
from yalis.launch.rendezvous import Reception, visit
from yalis.launch.world import World, make_world

_HOW = {"torchrun": "torchrun --nproc-per-node {}", "srun": "srun -n {}", "mpirun": "mpirun -n {}"}

_kept: World | None = None  # a launcher's ranks meet once, and stay together for the next engine


def join(size: int, worker: Sequence[str], timeout: float = 300) -> World:
    """The world of `size` ranks that this process belongs to.

    Without a launcher this process is rank 0 and starts the others: `python -m WORKER`, which come here too. Under
    torchrun, srun or mpirun all ranks come here. Gives up after `timeout` seconds, naming the ranks that are missing.
    """
    global _kept
    place = find_place()
    if place.launcher and place.size != size:
        how = _HOW.get(place.launcher, "{} ranks").format(size)
        raise YalisError(
            f"this model is split over {size} rank{'s' * (size > 1)} and {place.launcher} started {place.size}; type "
            f"{how} (over all nodes), or choose --tp, --pp and --dp whose product is {place.size}"
        )
    if _kept:
        if _kept.failure:
            raise YalisFailure(_kept.failure)
        return _kept
    if not place.launcher:
        return World.alone() if size == 1 else _start(size, worker, timeout)
    kept = place.launcher != "yalis"
    world = _visit(place, timeout, kept) if place.rank else _receive(place, timeout)
    if kept:
        _kept = world
    return world


def _start(size: int, worker: Sequence[str], timeout: float) -> World:
    """Rank 0 of ranks that it starts itself, on this machine."""
    server = listen("127.0.0.1", 0)
    meeting = Meeting("127.0.0.1", (server.getsockname()[1],), f"yalis pid {os.getpid()}", secrets.token_hex(16))
    place = {
        "YALIS_SIZE": str(size),
        "YALIS_ADDRESS": meeting.host,
        "YALIS_PORT": str(meeting.ports[0]),
        "YALIS_JOB": meeting.job,
        "YALIS_SECRET": meeting.secret,
        "YALIS_PARENT": str(os.getpid()),
    }
    try:
        local = LocalRanks(worker, range(1, size), place)
    except BaseException:
        server.close()
        raise
    try:
        reception = Reception(server, meeting, size, local)
        members = reception.receive_all(timeout)
        return make_world(0, members, reception.links["control"], reception.links["watch"], local)
    except BaseException:
        local.stop(0.5)
        raise


def _receive(place: Place, timeout: float) -> World:
    """Rank 0 of a launcher's ranks."""
    server, meeting = open_meeting(place, timeout)
    reception = Reception(server, meeting, place.size, None)
    members = reception.receive_all(timeout)
    return make_world(0, members, reception.links["control"], reception.links["watch"], kept=True)


def _visit(place: Place, timeout: float, kept: bool) -> World:
    """Any other rank."""
    members, links = visit(find_meeting(place, timeout), place.rank, place.size, timeout, place.parent)
    return make_world(place.rank, members, {0: links["control"]}, {0: links["watch"]}, kept=kept)
