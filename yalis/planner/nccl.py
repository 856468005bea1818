"""NCCL's collectives: its own cost model, which also decides which algorithm and protocol it runs.

The constants are those of src/graph/tuning.cc of NCCL (commit 5067397, 2026-06): latency of an operation and of a hop
by algorithm and protocol, and bandwidth by protocol. NCCL estimates every algorithm and protocol from them and runs the
fastest. They were made for InfiniBand, so the time that another network adds to each hop is a parameter of the machine
that NCCL does not know when it chooses. NVLS (reduction in the NVLink switch), CollNet and NVLS-tree are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from yalis.perfmodel.collectives import Shape
from yalis.planner.library import FullLibrary
from yalis.planner.machine import Machine

PROTOCOLS = ("LL", "LL128", "Simple")
#: Seconds by protocol: of an operation without hops (kernel launch included), and of a hop over NVLink or the network.
_BASE = {"tree": (6.8e-6, 14.0e-6, 8.4e-6), "ring": (6.6e-6, 14.0e-6, 8.4e-6)}
_NVLINK_HOP = {"tree": (0.6e-6, 1.25e-6, 4.0e-6), "ring": (0.6e-6, 1.9e-6, 3.4e-6)}
_NET_HOP = {"tree": (5.0e-6, 8.5e-6, 14.0e-6), "ring": (2.7e-6, 4.0e-6, 14.0e-6)}
#: Share of the links' bandwidth that carries data. LL sends a 4-byte flag with every 4 bytes.
_RING_SHARE = (0.5, 0.92, 1.0)
_TREE_SHARE = (0.92 / 3.8, 0.92 * 120 / 128, 0.92)
_TREE_SHARE_LL128_ONE_NODE = 0.92 * 7 / 9
#: Trees reach this share of their bandwidth for messages of 64 B, 128 B, ... 256 MB.
_TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}  # fmt: skip
_RING_PLATEAU = 1.4  # factor on the latency of rings with Simple between nodes, above 64 bytes per rank and channel
_CHANNELS = 16  # assumed where NCCL's plateau depends on their number
_LATENCY_OVERHEAD_FACTOR = {"LL": 1, "LL128": 1, "Simple": 3}  # network posts of a ring step


@dataclass(frozen=True)
class Estimate:
    """One way to run a collective. `own` is NCCL's estimate, `seconds` includes what it does not know."""

    algorithm: str
    protocol: str
    own: float
    seconds: float


class Nccl(FullLibrary):
    """Times of NCCL's collectives on a machine."""

    required = (
        "net_hop_extra_s", "net_overhead_s", "net_efficiency", "intra_efficiency", "ll_intra_bytes_per_s",
        "ll_two_nodes_bytes_per_s", "ll_bytes_per_s", "ll128_between_nodes",
    )  # fmt: skip

    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None:
        self._values = parameters
        self._intra = float(machine.intra_bytes_per_s) * parameters["intra_efficiency"]
        # The ranks of a node share its NICs evenly, also where they belong to different groups.
        share = machine.nics_per_node / machine.gpus_per_node
        self._nic = float(machine.nic_bytes_per_s) * share * parameters["net_efficiency"]

    def all_reduce(self, group: Shape, bytes: float) -> float:
        return self.choose(group, bytes).seconds

    def choose(self, group: Shape, bytes: float) -> Estimate:
        """Return the all-reduce that NCCL runs: the fastest by its own estimate."""
        return min(self.estimates(group, bytes), key=lambda one: one.own)

    def estimates(self, group: Shape, bytes: float) -> Iterator[Estimate]:
        """Yield ring and tree with every protocol that NCCL enables for this group."""
        for index, protocol in self._protocols(group):
            yield self._ring(group, bytes, 2 * (group.size - 1), 2 * (group.nodes - 1), index, protocol)
            yield self._tree(group, bytes, index, protocol)

    def all_gather(self, group: Shape, bytes_per_rank: float) -> float:
        """Return the seconds of a ring of size - 1 steps. The result has bytes_per_rank x size bytes."""
        total = bytes_per_rank * group.size
        ways = (
            self._ring(group, total, group.size - 1, group.nodes - 1, index, protocol)
            for index, protocol in self._protocols(group)
        )
        return min(ways, key=lambda one: one.own).seconds

    def send(self, bytes: float, same_node: bool) -> float:
        """Return the seconds of a send and its receive, by LL or Simple, over the links of one GPU."""
        hops, bandwidth = (_NVLINK_HOP, self._intra) if same_node else (_NET_HOP, self._nic)
        extra = 0.0 if same_node else self._values["net_hop_extra_s"]
        return min(
            _BASE["ring"][index] + hops["tree"][index] + extra + bytes / (bandwidth * _RING_SHARE[index])
            for index in (0, 2)
        )

    def _protocols(self, group: Shape) -> Iterator[tuple[int, str]]:
        for index, protocol in enumerate(PROTOCOLS):
            if protocol != "LL128" or group.nodes == 1 or self._values["ll128_between_nodes"] >= 0.5:
                yield index, protocol

    def _ring(self, group: Shape, bytes: float, steps: int, net_steps: int, index: int, protocol: str) -> Estimate:
        intra = _NVLINK_HOP["ring"][index]
        net = _NET_HOP["tree" if group.ranks_per_node == 1 else "ring"][index]
        if group.nodes > 1:  # the proxy thread posts every step of a ring between nodes
            intra = max(intra, self._values["net_overhead_s"] * _LATENCY_OVERHEAD_FACTOR[protocol])
        latency = _BASE["ring"][index] + (steps - net_steps) * intra + net_steps * net
        plateau = protocol == "Simple" and group.nodes > 1 and bytes / (_CHANNELS * group.size) >= 64
        latency *= _RING_PLATEAU if plateau and steps > group.size else 1.0  # of an all-reduce only
        bandwidth = self._bandwidth(group) * _RING_SHARE[index]
        if protocol == "LL":
            bandwidth = min(bandwidth, self._ll_limit(group))
        seconds = latency + (bytes / (bandwidth * group.size / steps) if steps else 0.0)
        return self._estimate("ring", protocol, seconds, net_steps)

    def _tree(self, group: Shape, bytes: float, index: int, protocol: str) -> Estimate:
        """Reduce up and broadcast down a double binary tree of nodes, with a chain in each node."""
        depth = group.nodes.bit_length() - 1
        chain = group.ranks_per_node - 1
        latency = _BASE["tree"][index] + 2 * (chain * _NVLINK_HOP["tree"][index] + depth * _NET_HOP["tree"][index])
        share = _TREE_SHARE_LL128_ONE_NODE if group.nodes == 1 and protocol == "LL128" else _TREE_SHARE[index]
        bandwidth = self._bandwidth(group) * share
        if protocol == "LL":
            bandwidth = min(bandwidth, self._ll_limit(group))
        table = _TREE_CORRECTION[protocol]
        power = (int(bytes) >> 6).bit_length() - 1
        bandwidth *= table[power] if 0 <= power < len(table) else 1.0
        return self._estimate("tree", protocol, latency + 2 * bytes / bandwidth, 2 * depth)

    def _estimate(self, algorithm: str, protocol: str, own: float, net_hops: int) -> Estimate:
        # Simple flushes the data after each hop, which crosses the same path again.
        crossings = net_hops * (2 if protocol == "Simple" else 1)
        return Estimate(algorithm, protocol, own, own + crossings * self._values["net_hop_extra_s"])

    def _bandwidth(self, group: Shape) -> float:
        """Return the bytes per second of all rings or trees together: NCCL spreads them over all NICs."""
        if group.nodes == 1:
            return self._intra
        return min(self._intra, self._nic * group.ranks_per_node)

    def _ll_limit(self, group: Shape) -> float:
        names = {1: "ll_intra_bytes_per_s", 2: "ll_two_nodes_bytes_per_s"}
        return self._values[names.get(group.nodes, "ll_bytes_per_s")]
