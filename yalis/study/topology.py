"""How the ranks of a measurement are placed on hosts and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from yalis.config import EngineConfig
from yalis.engine.expert_choice import split_of
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.launch.launchers import detect_launcher
from yalis.launch.world import World
from yalis.perfmodel.collectives import Shape
from yalis.spec import ModelSpec
from yalis.study import results


def llm_topology(llm: LLM) -> dict[str, Any]:
    """Return the topology of an LLM as result files store it: ranks, ranks per host and the launcher."""
    return results.make_topology(list(llm.topology.nodes), llm.topology.launcher)


def topology_of(world: World) -> dict[str, Any]:
    """Return the topology of ranks without an LLM, in the same form."""
    return results.make_topology([member.node for member in world.members], detect_launcher().launcher)


def shape_of(nodes: Sequence[Sequence[int]]) -> Shape:
    """Return the nodes and the ranks per node, of the ranks on each node; raises if the nodes differ."""
    counts = sorted({len(ranks) for ranks in nodes})
    if len(counts) != 1:
        raise YalisError(
            f"there are nodes with {' and '.join(map(str, counts))} ranks; start the same number on every node, such "
            "as with srun --ntasks-per-node"
        )
    return Shape(len(nodes), counts[0])


def has_floor(config: EngineConfig, device: torch.device) -> bool:
    """Return whether every rank has a device of its own, so that the rates of one device give a floor for all."""
    return split_of(config).size == 1 or (device.type == "cuda" and config.ranks_per_gpu == 1)


def note_routing(config: EngineConfig, spec: ModelSpec) -> list[str]:
    """Return a note for a mixture of experts: how tokens were routed, and what floors assume."""
    if spec.moe is None:
        return []
    if config.routing == "uniform":
        return ["--routing uniform: all experts were equally likely, whatever the routers computed"]
    floors = "floors assume that all experts are equally likely"
    if config.load == "random":
        return [f"random weights prefer a few experts, and {floors}; --routing uniform measures even routing"]
    return [f"experts were those that the model chose, and {floors}"]


def note_peer_devices(config: EngineConfig, names: Sequence[str]) -> list[str]:
    """Return a note if YALIS ran on more devices than its peers, which always use one."""
    ranks = split_of(config).size
    return [f"yalis ran on {ranks} ranks and {', '.join(names)} on one device"] if names and ranks > 1 else []
