"""How the ranks of a measurement lie on hosts, and who started them."""

from __future__ import annotations

from typing import Any

from yalis import results
from yalis.launch.environment import find_place
from yalis.launch.world import World


def topology_of(world: World | None) -> dict[str, Any]:
    """As results tell it."""
    assert world is not None, "the engine is closed"
    return results.topology([member.node for member in world.members], find_place().launcher)
