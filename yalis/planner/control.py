"""Time of the control plane: sending the plan of a step from the driver of a replica to its other ranks.

The driver encodes a plan once and sends it to at most `FAN_OUT` ranks, which forward it (launch/fan_out.py). So its own
time does not grow beyond that number of followers; the time until the last rank has the plan grows with the depth of
the tree. On a GPU the plan of step k + 1 is sent while step k runs, so that the delivery is hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yalis.launch.fan_out import FAN_OUT, tree_depth
from yalis.planner.quantity import Quantity

_FIT = "benchmarks/reports/control/fit.json: loopback links of a host with 2 cores"
#: Used where a machine's `host` section has no value of its own. Seconds; measured values of another host's CPU.
DEFAULTS: Mapping[str, Quantity] = {
    # On the driver: for a plan, for each sequence that decodes, and for each link it sends to.
    "control_base_s": Quantity.of(1.126e-4, "measured", _FIT),
    "control_per_sequence_s": Quantity.of(5.53e-7, "measured", _FIT),
    "control_send_s": Quantity.of(1.03e-5, "measured", _FIT),
    # On the way: to wake up a rank and receive, and to decode each sequence.
    "control_hop_s": Quantity.of(3.49e-4, "measured", _FIT),
    "control_decode_per_sequence_s": Quantity.of(1.725e-6, "measured", _FIT),
    "control_network_s": Quantity.of(
        30e-6, "assumed", "one way of a small TCP message between nodes, above loopback", 10e-6, 100e-6
    ),
}


@dataclass(frozen=True)
class ControlTime:
    """Seconds of one step's plan: on the driver until its sends return, and until the last rank has decoded it."""

    driver: float
    delivery: float


def control_time(host: Mapping[str, Quantity], followers: int, sequences: int = 16) -> ControlTime:
    """Return the times of a decode plan; `host` is `Machine.host`, `followers` the other ranks of the replica."""
    if followers <= 0:
        return ControlTime(0.0, 0.0)
    base, per_sequence, send, hop, decode, network = (float(host.get(name, one)) for name, one in DEFAULTS.items())
    sends = min(followers, FAN_OUT) * send
    driver = base + sequences * per_sequence + sends
    levels = tree_depth(followers)
    return ControlTime(driver, driver + levels * (hop + network) + (levels - 1) * sends + sequences * decode)


def plan_seconds(host: Mapping[str, Quantity], followers: int, sequences: int = 16) -> float:
    """Return the driver's host seconds to encode a step's plan and send it to its `followers`."""
    return control_time(host, followers, sequences).driver
