"""Time of the control plane: how long it takes to send the plan of a step from the driver to all ranks of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yalis.launch.fan_out import FAN_OUT, tree_depth
from yalis.planner.quantity import Quantity

_SOURCE = "benchmarks/results/control/"
#: Used where a machine's `host` section has no value of its own.
DEFAULTS: Mapping[str, Quantity] = {
    "control_base_s": Quantity.of(10e-6, "assumed", _SOURCE),
    "control_per_sequence_s": Quantity.of(1.5e-6, "assumed", _SOURCE),
    "control_send_s": Quantity.of(10e-6, "assumed", _SOURCE),
    "control_hop_s": Quantity.of(60e-6, "assumed", _SOURCE),
    "control_decode_per_sequence_s": Quantity.of(2.3e-6, "assumed", _SOURCE),
}


@dataclass(frozen=True)
class ControlTime:
    """Seconds of one step's plan: on the driver until its sends return, and until the last follower has decoded it."""

    driver: float
    delivery: float


def control_time(host: Mapping[str, Quantity], followers: int, sequences: int = 16) -> ControlTime:
    """Return the times of a decode plan; `host` is `Machine.host`, `followers` the other ranks of the replica."""
    if followers <= 0:
        return ControlTime(0.0, 0.0)

    def get(name: str) -> float:
        return float(host.get(f"control_{name}", DEFAULTS[f"control_{name}"]))

    sends = min(followers, FAN_OUT) * get("send_s")
    driver = get("base_s") + sequences * get("per_sequence_s") + sends
    hops = tree_depth(followers) * get("hop_s") + (tree_depth(followers) - 1) * sends
    return ControlTime(driver, driver + hops + sequences * get("decode_per_sequence_s"))


def plan_seconds(host: Mapping[str, Quantity], followers: int, sequences: int = 16) -> float:
    """Return the driver's host seconds to encode a step's plan and send it to its `followers`."""
    return control_time(host, followers, sequences).driver
