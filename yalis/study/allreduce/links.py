"""What a message takes inside a node and between nodes: what the cost model of all-reduces is fed with."""

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
    from yalis.study.allreduce.rank import Start

PINGS, _PINGS_EACH = (1 << 10, 32 << 10, 256 << 10, 1 << 20), 9
PAIRED, _PAIRED_EACH = (4 << 10, 32 << 10, 128 << 10, 512 << 10), 9
IN_GRAPH = 64  # operations that a graph holds, as many as a decode step of 32 layers has


def links_of_messages(world: World, topology: Topology, group: Communicator) -> dict[str, Any]:
    """By the clock of who sends a message and has it sent back."""
    nodes = topology.by_node()
    peers = {"inside": nodes[0][1:2], "between": nodes[1][:1] if len(nodes) > 1 else ()}
    return {kind: asdict(_ping(world, group, *peer)) for kind, peer in peers.items() if peer}


def _ping(world: World, group: Communicator, peer: int) -> Link:
    measured = []
    for size in PINGS:
        x = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(_PINGS_EACH):
            begin = time.perf_counter()
            if world.rank == 0:
                group.send(x.clone(), peer)
                group.recv(x, peer)
            elif world.rank == peer:
                group.send(group.recv(x, 0), 0)
            times.append((time.perf_counter() - begin) / 2)
        measured.append((Load(1, 1, size), median(times)))
    told: dict[str, float] = world.all_gather_object(asdict(fit(measured)))[0]
    return Link(**told)


def links_of_pairs(world: World, topology: Topology, nvrar: CommBackend, start: Start) -> dict[str, Any]:
    """By nvrar itself, on GPUs: all ranks at once sum with one other each, over each kind of link, in graphs.

    Between two nodes nvrar takes one round, and a ring takes two for the same bytes: what it takes longer is a round's
    latency. What is left without rounds and bytes is fixed, the launch and end of a kernel. Nothing is measured where
    that cannot be told apart (on one node), or somebody would have no partner.
    """
    nodes = topology.by_node()
    width = len(nodes[0])
    if len(nodes) % 2 or any(len(ranks) != width for ranks in nodes) or (width > 1 and width % 2):
        return {}
    ours = zip(nodes[::2], nodes[1::2], strict=True)
    far = [pair for one, other in ours for pair in zip(one, other, strict=True)]
    times, ring = (_times_of_pairs(world, far, nvrar, start, how) for how in ("nvrar", "ring"))
    latency = max(median(ring[size] - times[size] for size in PAIRED), 0.0)
    whole = fit([(Load(1, 1, LL_FACTOR * size), times[size]) for size in PAIRED])
    fixed = max(whole.latency - latency, 0.0)
    links: dict[str, Any] = {"fixed": fixed}
    links["between"] = asdict(Link(min(latency, whole.latency), whole.seconds_per_byte))
    if width > 1:
        near = [ranks[first : first + 2] for ranks in nodes for first in range(0, width, 2)]
        times = _times_of_pairs(world, near, nvrar, start, "nvrar")
        # A half there, to be summed, and a half back.
        rounds = [(Load(2, 2, LL_FACTOR * size), max(times[size] - fixed, 1e-9)) for size in PAIRED]
        links["inside"] = asdict(fit(rounds))
    return links


def _times_of_pairs(
    world: World, pairs: Sequence[Sequence[int]], nvrar: CommBackend, start: Start, how: str
) -> dict[int, float]:
    """Seconds of an all-reduce within each of these pairs, by its bytes."""
    mine = next(pair for pair in pairs if world.rank in pair)
    group: Any = nvrar.group(f"pair {list(mine)} by {how}", mine)
    found = {}
    for size in PAIRED:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=nvrar.device)
        found[size] = _seconds_each(partial(group.all_reduce_with, x, x, how, protocol="ll"), start, nvrar.device)
    return found


def _seconds_each(act: Callable[[], object], start: Start, device: torch.device) -> float:
    """The slowest rank's seconds for one of many `act` in a graph."""
    return median(start.settled(lambda: None, record(act, device), 3, _PAIRED_EACH)) / IN_GRAPH


def record(act: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What replays a graph of many `act`, and returns the seconds that they took by the device's clock.

    One more goes before them: once it is done all ranks have come, however late their hosts let them start.
    """
    act()
    bandwidth.synchronize(device)
    first, many = _graph_of(act, 1), _graph_of(act, IN_GRAPH)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        first.replay()
        began.record()
        many.replay()
        ended.record()
        bandwidth.synchronize(device)
        return began.elapsed_time(ended) / 1e3

    return replay


def _graph_of(act: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            act()
    return graph
