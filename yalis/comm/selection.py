"""Opens a communication backend by name, with the same outcome on every rank."""

from __future__ import annotations

import torch

from yalis.comm import tuning
from yalis.comm.base import BACKENDS, CommBackend
from yalis.comm.topology import Topology
from yalis.errors import YalisError
from yalis.launch.world import World


def check_backend_name(name: str) -> None:
    """Raise a YalisError if there is no such backend. Called before any rank is started."""
    if name not in BACKENDS.names():
        raise YalisError(f"unknown communication backend {name!r}; accepted: {', '.join(BACKENDS.names())}")


def open_backend(name: str, world: World, device: torch.device, topology: Topology | None = None) -> CommBackend:
    """Open the backend `name`. Every rank calls this; all of them raise a YalisError if one cannot use the backend."""
    check_backend_name(name)
    reason = unusable_on_any_rank(name, world, device)
    if reason is not None:
        # Probing a backend may initialize it (MPI), so the alternatives are probed only now.
        others = [other for other in BACKENDS.names() if other != name]
        usable = [other for other in others if unusable_on_any_rank(other, world, device) is None]
        accepted = f"usable: {', '.join(usable)}" if usable else "no other backend is usable"
        raise YalisError(f"communication backend {name!r} cannot be used here: {reason}; {accepted}")
    backend = BACKENDS.load(name)
    return backend(world, device, topology, tuning.load_on_all_ranks(world, device) if backend.uses_table else None)


def unusable_on_any_rank(name: str, world: World, device: torch.device) -> str | None:
    """Return why a backend cannot be used on the first rank that cannot use it, or None. Every rank calls this."""
    reasons = world.all_gather_object({name: BACKENDS.load(name).unusable(world, device)})
    for rank, reported in enumerate(reasons):
        if reported[name] is not None:
            where = f" on rank {rank} ({world.members[rank].host})" if world.size > 1 else ""
            return f"{reported[name]}{where}"
    return None
