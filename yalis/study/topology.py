"""How the ranks of a measurement lie on hosts and devices, and who started them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from yalis import results
from yalis.config import EngineConfig
from yalis.engine.replica_ranks import split_of
from yalis.launch.launchers import SRUN, detect_launcher
from yalis.launch.world import World


def topology_of(world: World | None) -> dict[str, Any]:
    """As results tell it."""
    assert world is not None, "the engine is closed"
    return results.topology([member.node for member in world.members], detect_launcher().launcher)


def has_floor(config: EngineConfig, device: torch.device) -> bool:
    """Whether every rank has a device to itself, so that what one can do tells what all can."""
    return split_of(config).size == 1 or (device.type == "cuda" and config.ranks_per_gpu == 1)


def unlike_peers(config: EngineConfig, names: Sequence[str]) -> list[str]:
    """What must be told beside a ratio: peers take one device, whatever ours take."""
    ranks = split_of(config).size
    return [f"yalis ran on {ranks} ranks and {', '.join(names)} on one device"] if names and ranks > 1 else []


def crowding(result: results.Result) -> str:
    """How ranks share what each should have for itself; empty where they do not."""
    topology = result.topology or results.topology([0])
    most = max(topology["ranks_per_host"])
    if result.devices[0]["type"] == "cpu":
        cores = result.host["cores"]
        # Slurm gives every rank cores of its own, and the first sees only those.
        return f"{most} ranks on {cores} cores" if most > cores and topology.get("launcher") != SRUN.name else ""
    shared = min(most, result.parameters["engine"]["ranks_per_gpu"])
    return f"{shared} ranks on a GPU" if shared > 1 else ""
