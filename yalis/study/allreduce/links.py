"""Measure the latency and bandwidth of intra-node and inter-node links, the inputs of the all-reduce cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from yalis.comm.base import CommBackend, Communicator
from yalis.comm.topology import Topology
from yalis.launch.world import World
from yalis.perfmodel.collectives import Link, Load, fit
from yalis.study import bandwidth
from yalis.study.allreduce.cost_model import LL_FACTOR

if TYPE_CHECKING:
    from yalis.study.allreduce.timing import SynchronizedTimer

_PING_SIZES, _PING_REPEATS = (1 << 10, 32 << 10, 256 << 10, 1 << 20), 9
_PAIR_SIZES, _PAIR_REPEATS = (4 << 10, 32 << 10, 128 << 10, 512 << 10), 9
GRAPH_OPERATIONS = 64  # operations per CUDA graph, as many as a decode step of 32 layers has


def measure_by_ping(world: World, topology: Topology, group: Communicator) -> dict[str, Any]:
    """Measure links with ping-pong messages between rank 0 and a rank of its own node, and one of another node."""
    nodes = topology.by_node()
    peers = {"inside": nodes[0][1:2], "between": nodes[1][:1] if len(nodes) > 1 else ()}
    return {name: asdict(_ping(world, group, *peer)) for name, peer in peers.items() if peer}


def _ping(world: World, group: Communicator, peer: int) -> Link:
    measured = []
    for size in _PING_SIZES:
        x = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(_PING_REPEATS):
            begin = time.perf_counter()
            if world.rank == 0:
                group.send(x.clone(), peer)
                group.recv(x, peer)
            elif world.rank == peer:
                group.send(group.recv(x, 0), 0)
            times.append((time.perf_counter() - begin) / 2)
        measured.append((Load(1, 1, size), median(times)))
    link: dict[str, float] = world.all_gather_object(asdict(fit(measured)))[0]
    return Link(**link)


def measure_by_pairs(world: World, topology: Topology, nvrar: CommBackend, timer: SynchronizedTimer) -> dict[str, Any]:
    """Measure links on GPUs with all-reduces of pairs of ranks, which all run at once in CUDA graphs.

    Between two nodes nvrar takes one round, and a ring takes two rounds for the same bytes: the difference is the
    latency of a round. The remaining time without rounds and bytes is fixed, the launch and end of a kernel. Returns
    nothing on a single node, where the two cannot be separated, or if a rank would have no partner."""
    nodes = topology.by_node()
    ranks_per_node = len(nodes[0])
    uneven = any(len(ranks) != ranks_per_node for ranks in nodes)
    if uneven or len(nodes) % 2 or (ranks_per_node > 1 and ranks_per_node % 2):
        return {}
    node_pairs = zip(nodes[::2], nodes[1::2], strict=True)
    inter_pairs = [pair for one, other in node_pairs for pair in zip(one, other, strict=True)]
    times, ring = (_pair_times(world, inter_pairs, nvrar, timer, name) for name in ("nvrar", "ring"))
    latency = max(median(ring[size] - times[size] for size in _PAIR_SIZES), 0.0)
    total = fit([(Load(1, 1, LL_FACTOR * size), times[size]) for size in _PAIR_SIZES])
    fixed = max(total.latency - latency, 0.0)
    links: dict[str, Any] = {"fixed": fixed}
    links["between"] = asdict(Link(min(latency, total.latency), total.seconds_per_byte))
    if ranks_per_node > 1:
        intra_pairs = [ranks[first : first + 2] for ranks in nodes for first in range(0, ranks_per_node, 2)]
        times = _pair_times(world, intra_pairs, nvrar, timer, "nvrar")
        # Reduce-scatter and all-gather of half of the message each.
        rounds = [(Load(2, 2, LL_FACTOR * size), max(times[size] - fixed, 1e-9)) for size in _PAIR_SIZES]
        links["inside"] = asdict(fit(rounds))
    return links


def _pair_times(
    world: World, pairs: Sequence[Sequence[int]], nvrar: CommBackend, timer: SynchronizedTimer, algorithm: str
) -> dict[int, float]:
    """Return the seconds of an all-reduce within each pair, by message size in bytes."""
    pair = next(pair for pair in pairs if world.rank in pair)
    group: Any = nvrar.group(f"pair {list(pair)} by {algorithm}", pair)
    found = {}
    for size in _PAIR_SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=nvrar.device)
        all_reduce = partial(group.all_reduce_with, x, x, algorithm, protocol="ll")
        replay = capture_operations(all_reduce, nvrar.device)
        found[size] = median(timer.measure_paced(lambda: None, replay, 3, _PAIR_REPEATS)) / GRAPH_OPERATIONS
    return found


def capture_operations(operation: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Capture a CUDA graph of many operations. Returns a function that replays it and returns its seconds.

    The time is the device's. One more operation is replayed before it: when that is done, all ranks have started."""
    operation()
    bandwidth.synchronize(device)
    first, many = _capture(operation, 1), _capture(operation, GRAPH_OPERATIONS)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        first.replay()
        begin.record()
        many.replay()
        end.record()
        bandwidth.synchronize(device)
        return begin.elapsed_time(end) / 1e3

    return replay


def _capture(operation: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            operation()
    return graph
