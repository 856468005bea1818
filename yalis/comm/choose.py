"""Which backend joins the ranks of a world."""

from __future__ import annotations

import torch

from yalis.comm.base import BACKENDS, CommBackend
from yalis.errors import YalisError
from yalis.launch.world import World

# Best first.
PREFERENCE = ("torch", "mpi")


def check_name(name: str) -> None:
    """Refuse a name that no backend has, before any rank is started."""
    if name != "auto" and name not in BACKENDS.names():
        raise YalisError(f"unknown communication backend {name!r}; accepted: auto, {', '.join(BACKENDS.names())}")


def choose_backend(name: str, world: World, device: torch.device) -> type[CommBackend]:
    """The backend called `name`, or with "auto" the best that every rank can use. Every rank calls this."""
    check_name(name)
    refusals: dict[str, str] = {}
    # Asking a backend may start it (MPI), so only those that are needed are asked.
    for candidate in PREFERENCE if name == "auto" else (name,):
        reason = _refusal(candidate, world, device)
        if reason is None:
            return BACKENDS.load(candidate)
        refusals[candidate] = reason
    if name == "auto":
        reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refusals.items())
        raise YalisError(f"no communication backend can join these ranks: {reasons}")
    usable = [other for other in PREFERENCE if other != name and _refusal(other, world, device) is None]
    accepted = f"usable: auto, {', '.join(usable)}" if usable else "no other one is usable"
    raise YalisError(f"communication backend {name!r} cannot be used here: {refusals[name]}; {accepted}")


def _refusal(candidate: str, world: World, device: torch.device) -> str | None:
    """Why a backend cannot be used, the same on every rank: one that misses mpi4py speaks for all."""
    told = world.exchange({candidate: BACKENDS.load(candidate).unusable(world, device)})
    for rank, own in enumerate(told):
        if own[candidate] is not None:
            where = f" on rank {rank} ({world.members[rank].host})" if world.size > 1 else ""
            return f"{own[candidate]}{where}"
    return None
