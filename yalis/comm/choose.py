"""Which backend joins the ranks of a world."""

from __future__ import annotations

import torch

from yalis.comm.base import BACKENDS, CommBackend
from yalis.errors import YalisError
from yalis.launch.world import World

# Best first.
PREFERENCE = ("torch", "mpi")


def choose_backend(name: str, world: World, device: torch.device) -> type[CommBackend]:
    """The backend called `name`, or with "auto" the best that every rank can use. Every rank calls this."""
    if name != "auto" and name not in BACKENDS.names():
        raise YalisError(f"unknown communication backend {name!r}; accepted: auto, {', '.join(BACKENDS.names())}")
    refusals = _refusals(world, device)
    usable = [candidate for candidate in PREFERENCE if candidate not in refusals]
    if name == "auto" and usable:
        return BACKENDS.load(usable[0])
    if name in usable:
        return BACKENDS.load(name)
    if name != "auto":
        accepted = f"usable: auto, {', '.join(usable)}" if usable else "no other one is usable"
        raise YalisError(f"communication backend {name!r} cannot be used here: {refusals[name]}; {accepted}")
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refusals.items())
    raise YalisError(f"no communication backend can join these ranks: {reasons}")


def _refusals(world: World, device: torch.device) -> dict[str, str]:
    """Why some backends cannot be used, the same on every rank: one that misses mpi4py speaks for all."""
    told = world.exchange({candidate: BACKENDS.load(candidate).unusable(world, device) for candidate in PREFERENCE})
    refusals: dict[str, str] = {}
    for candidate in PREFERENCE:
        reasons = [reason[candidate] for reason in told]
        rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if rank is not None:
            where = "" if len(set(reasons)) == 1 else f" on rank {rank} ({world.members[rank].host})"
            refusals[candidate] = reasons[rank] + where
    return refusals
