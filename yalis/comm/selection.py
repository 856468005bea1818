"""Which backend joins the ranks of a world."""

from __future__ import annotations

import torch

from yalis.comm import tuning
from yalis.comm.base import BACKENDS, CommBackend
from yalis.comm.topology import Topology
from yalis.errors import YalisError
from yalis.launch.world import World


def check_backend_name(name: str) -> None:
    """Refuse a name that no backend has, before any rank is started."""
    if name not in BACKENDS.names():
        raise YalisError(f"unknown communication backend {name!r}; accepted: {', '.join(BACKENDS.names())}")


def open_backend(name: str, world: World, device: torch.device, topology: Topology | None = None) -> CommBackend:
    """The backend called `name`, started on all ranks; a sentence where one of them cannot. Every rank calls this."""
    check_backend_name(name)
    reason = unusable_on_any_rank(name, world, device)
    if reason is not None:
        # Asking a backend may start it (MPI), so the others are asked only now.
        usable = [
            other for other in BACKENDS.names() if other != name and unusable_on_any_rank(other, world, device) is None
        ]
        accepted = f"usable: {', '.join(usable)}" if usable else "no other one is usable"
        raise YalisError(f"communication backend {name!r} cannot be used here: {reason}; {accepted}")
    backend = BACKENDS.load(name)
    return backend(world, device, topology, tuning.load_on_all_ranks(world, device) if backend.uses_table else None)


def unusable_on_any_rank(name: str, world: World, device: torch.device) -> str | None:
    """Why a backend cannot be used, the same on every rank: one that misses mpi4py speaks for all."""
    told = world.all_gather_object({name: BACKENDS.load(name).unusable(world, device)})
    for rank, own in enumerate(told):
        if own[name] is not None:
            where = f" on rank {rank} ({world.members[rank].host})" if world.size > 1 else ""
            return f"{own[name]}{where}"
    return None
