"""Times of MPI, NVRAR and the CPU backends, from the rounds, messages and bytes of their algorithms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import product
from typing import ClassVar

from yalis.perfmodel.collectives import Load, Shape, gloo_ring, hierarchical, rabenseifner
from yalis.planner.library import FullLibrary, Library
from yalis.planner.machine import Machine

_CHUNKS = (1, 2, 4, 8, 16, 32)  # numbers of chunks that a tuned all-reduce chooses from
_LL_FACTOR = 2.0  # LL sends a 4-byte flag with every 4 bytes of data
_DOUBLING_BYTES = 256 << 10  # up to here `hierarchical` uses recursive doubling between nodes


class _Links:
    """Bandwidth of the links of one rank, as a library reaches it."""

    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None:
        self.intra = float(machine.intra_bytes_per_s) * parameters["intra_efficiency"]
        share = machine.nics_per_node / machine.gpus_per_node  # the ranks of a node share its NICs evenly
        self.net = float(machine.nic_bytes_per_s) * share * parameters["net_efficiency"]


class Mpi(FullLibrary):
    """GPU-aware MPI: the host starts every message, and a kernel adds what a round has received.

    The host first waits for the stream, and the stream for the host at the end; both are `launch_s`."""

    required = ("launch_s", "intra_hop_s", "net_hop_s", "reduce_s", "net_efficiency", "intra_efficiency")

    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None:
        self._values, self._links = parameters, _Links(machine, parameters)

    def all_reduce(self, group: Shape, bytes: float) -> float:
        """Return the seconds of Rabenseifner's algorithm over all ranks, regardless of nodes."""
        rounds = rabenseifner(group, bytes)
        if not rounds:
            return 0.0
        adding = len(rounds) / 2  # the first half reduces, the second half gathers
        messages = sum(self._message(one.bytes, one.inter) for one in rounds)
        return self._values["launch_s"] + messages + adding * self._values["reduce_s"]

    def all_gather(self, group: Shape, bytes_per_rank: float) -> float:
        """Return the seconds of recursive doubling: the second half of the all-reduce."""
        rounds = rabenseifner(group, bytes_per_rank * group.size)
        if not rounds:
            return 0.0
        return self._values["launch_s"] + sum(self._message(one.bytes, one.inter) for one in rounds) / 2

    def send(self, bytes: float, same_node: bool) -> float:
        return self._values["launch_s"] + self._message(bytes, not same_node)

    def _message(self, bytes: float, inter: bool) -> float:
        if inter:
            return self._values["net_hop_s"] + bytes / self._links.net
        return self._values["intra_hop_s"] + bytes / self._links.intra


class Nvrar(Library):
    """NVSHMEM puts from a kernel: reduce-scatter in a node, recursive doubling between nodes, all-gather in a node.

    A put between nodes takes `put_s` until its data is visible, and each further put of the same rank `put_issue_s`:
    long through the one proxy thread of a rank (Slingshot, IBRC), short where the GPU writes to the NIC (IBGDA). A
    chunk is sent on as soon as it is reduced, so NVLink and network work at the same time, except for the first chunk.
    Between nodes LL doubles the bytes.

    One launch, and two buffers without acknowledgement, so that `ready_s`, the wait for the partner, is 0."""

    protocols: tuple[bool, ...] = (True, False)  # LL, or put-with-signal

    required = (
        "launches", "launch_s", "intra_hop_s", "put_s", "put_issue_s", "ready_s", "net_efficiency", "intra_efficiency",
        "intra_wire_factor",
    )  # fmt: skip

    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None:
        self._values, self._links = parameters, _Links(machine, parameters)

    def all_reduce(self, group: Shape, bytes: float) -> float:
        """Return the seconds with the best number of chunks and the better of LL and put-with-signal."""
        if group.size == 1:
            return 0.0
        return min(self.seconds(group, bytes, chunks, ll) for chunks, ll in product(_CHUNKS, self.protocols))

    def seconds(self, group: Shape, bytes: float, chunks: int, ll: bool) -> float:
        """Return the seconds of one all-reduce. Without LL a signal follows each put and takes as long again."""
        value = self._values
        cost = hierarchical(group, bytes)
        wire = _LL_FACTOR if ll else 1.0
        rounds, signals = cost.inter.rounds, 1 if ll else 2
        latency = cost.intra.rounds * value["intra_hop_s"] + rounds * (signals * value["put_s"] + value["ready_s"])
        issue = rounds * (signals * chunks - 1) * value["put_issue_s"]
        nvlink = cost.intra.bytes * value["intra_wire_factor"] / self._links.intra
        network = cost.inter.bytes * wire / self._links.net
        transfer = max(nvlink, network) + min(nvlink, network) / chunks
        return value["launches"] * value["launch_s"] + latency + issue + transfer


class PublishedNvrar(Nvrar):
    """NVRAR as published: six launches, LL only, and each round waits `ready_s` until its partner is ready."""

    protocols = (True,)


class CpuLibrary(FullLibrary):
    """A CPU backend over TCP: a cost per operation, a latency per round, and CPU time for each byte between hosts.

    With `shared_machine` 1 the hosts are network namespaces of one machine, a lab: its cores and its switch work for
    all ranks, so the bytes of all of them count. On hosts of their own (0) those of one rank count."""

    required: ClassVar[tuple[str, ...]] = (
        "launch_s", "net_hop_s", "byte_s", "intra_hop_s", "intra_byte_s", "shared_machine",
    )  # fmt: skip

    def __init__(self, machine: Machine, parameters: Mapping[str, float]) -> None:
        self._values = parameters

    @abstractmethod
    def load(self, group: Shape, bytes: float) -> tuple[Load, Load]:
        """Return the mean load of a rank on links inside a host and between hosts."""

    def all_reduce(self, group: Shape, bytes: float) -> float:
        return self._seconds(group, *self.load(group, bytes))

    def all_gather(self, group: Shape, bytes_per_rank: float) -> float:
        """Return the seconds of sending to every other rank at once."""
        near, far = group.ranks_per_node - 1, group.size - group.ranks_per_node
        intra, inter = (Load(int(count > 0), count, count * bytes_per_rank) for count in (near, far))
        return self._seconds(group, intra, inter)

    def send(self, bytes: float, same_node: bool) -> float:
        value = self._values
        if same_node:
            return value["launch_s"] + value["intra_hop_s"] + bytes * value["intra_byte_s"]
        return value["launch_s"] + value["net_hop_s"] + bytes * value["byte_s"]

    def inside_seconds(self, intra: Load) -> float:
        """Return the seconds of the load on links inside a host."""
        return intra.rounds * self._values["intra_hop_s"] + intra.bytes * self._values["intra_byte_s"]

    def _seconds(self, group: Shape, intra: Load, inter: Load) -> float:
        value = self._values
        sharing = group.size if value["shared_machine"] >= 0.5 else 1
        latency = value["launch_s"] + self.inside_seconds(intra) + inter.rounds * value["net_hop_s"]
        return latency + sharing * inter.bytes * value["byte_s"]


class Gloo(CpuLibrary):
    """gloo's own all-reduce: a ring in lock-step that waits for every receiver."""

    def load(self, group: Shape, bytes: float) -> tuple[Load, Load]:
        cost = gloo_ring(group, bytes)
        share = 1 / group.ranks_per_node  # only the last rank of a host sends to another host
        inter = cost.inter
        return cost.intra, Load(inter.rounds, inter.messages * share, inter.bytes * share)


class Hierarchical(CpuLibrary):
    """The `hierarchical` backend with the algorithms that it uses without a tuning table."""

    def load(self, group: Shape, bytes: float) -> tuple[Load, Load]:
        fewest_bytes = "halving" if group.nodes.bit_count() == 1 else "direct"
        cost = hierarchical(group, bytes, "doubling" if bytes <= _DOUBLING_BYTES else fewest_bytes)
        return cost.intra, cost.inter


class CpuMpi(CpuLibrary):
    """Open MPI over TCP: Rabenseifner's algorithm; a message above the eager limit first asks for its receive."""

    required = (*CpuLibrary.required, "eager_bytes", "rendezvous_hops")

    def load(self, group: Shape, bytes: float) -> tuple[Load, Load]:
        loads = {False: Load(), True: Load()}
        for one in rabenseifner(group, bytes):
            eager = one.bytes < self._values["eager_bytes"]
            loads[one.inter] += Load(1 if eager else int(self._values["rendezvous_hops"]), 1, one.bytes)
        return loads[False], loads[True]
