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
    own = {candidate: BACKENDS.load(candidate).unusable(world, device) for candidate in PREFERENCE}
    refusals: dict[str, str] = {}
    for rank, told in enumerate(world.exchange(own)):
        for candidate, reason in told.items():
            if reason is not None:
                where = f" on rank {rank} ({world.members[rank].host})" if world.size > 1 else ""
                refusals.setdefault(candidate, reason + where)
    return refusals
