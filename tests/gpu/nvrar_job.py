"""What ranks that share a GPU do with nvrar; rank 0 prints what came of it, as JSON.

Run as `python -m tests.gpu.nvrar_job JOB NODES [key=number ...]`; NODES, like 2+2, says how many ranks share each
logical node. Results are compared on the device, so that operations follow each other as fast as they can.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from yalis.comm.allreduce_op import AllReduceOp
from yalis.comm.base import CommBackend
from yalis.comm.nvrar.group import MAX_MESSAGE_BYTES, Launch, NvrarGroup
from yalis.comm.selection import open_backend
from yalis.comm.topology import Topology
from yalis.errors import first_line
from yalis.launch.join import join
from yalis.launch.serving import serving
from yalis.launch.world import World

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOL = 1 << 20  # elements from which operations take theirs
# Few elements mostly, as far as one operation goes sometimes, and rarely several operations for one message.
SIZES = (1, 7, 64, 1000, 5000, 16384, 40001, 131072, 262144, 600_001)
WEIGHTS = (3, 3, 3, 8, 8, 8, 8, 4, 2, 1)


class Pools:
    """Whole numbers, whose sum is exact, and random ones; any rank knows what the others bring."""

    def __init__(self, ranks: list[int], rank: int, device: torch.device) -> None:
        self.mine: dict[tuple[torch.dtype, bool], Tensor] = {}
        self.sums: dict[tuple[torch.dtype, bool], Tensor] = {}
        for whole in (True, False):
            total = torch.zeros(POOL, dtype=torch.float64)
            for other in ranks:
                noise = torch.Generator().manual_seed(other + 1)
                numbers = torch.randint(-4, 5, (POOL,), generator=noise).double()
                numbers = numbers if whole else torch.rand(POOL, generator=noise, dtype=torch.float64) - 0.5
                for dtype in DTYPES:
                    key = dtype, whole
                    drawn = numbers.to(dtype)
                    self.sums[key] = self.sums.get(key, total.clone()) + drawn.double()
                    if other == rank:
                        self.mine[key] = drawn.to(device)
        self.sums = {key: total.to(key[0] if key[1] else torch.float32).to(device) for key, total in self.sums.items()}


class Storm:
    """Operations of every kind in an order that all ranks draw alike."""

    def __init__(
        self, world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, seed: int
    ) -> None:
        self.world, self.groups, self.device = world, groups, device
        self.pools = [Pools(ranks, world.rank, device) for _, ranks in groups]
        self.random = random.Random(seed)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        # One for each group: ranks of different ones sum different numbers.
        self.digests = [torch.zeros((), dtype=torch.int64, device=device) for _ in groups]
        self.kept: list[Tensor] = []

    def step(self) -> None:
        """One operation with its check, all on the current stream; nothing waits for it."""
        draw = self.random
        which = draw.randrange(len(self.groups))
        group, ranks = self.groups[which]
        dtype, whole = draw.choice(DTYPES), draw.random() < 0.6
        count = draw.choices(SIZES, WEIGHTS)[0] + draw.randrange(64)
        start = draw.randrange(POOL - count)
        protocol = draw.choice(("ll", "signal"))
        how = Launch(protocol, draw.choice((1, 2, 4, 8, 16)), draw.choice((128, 2048, 8192, 65536)))
        how = Launch(how.protocol, min(how.blocks, group._session.max_blocks), how.chunk)
        pools, key = self.pools[which], (dtype, whole)
        x = pools.mine[key][start : start + count]
        out = torch.full((count + 1,), float("nan"), dtype=dtype, device=self.device)[draw.randrange(2) :][:count]
        if draw.random() < 0.5:
            out.copy_(x)
            group.launch(out, out, how)
        else:
            group.launch(x, out, how)
        right = pools.sums[key][start : start + count]
        if whole:
            self.wrong += (out != right).sum()
        else:
            bound = torch.finfo(dtype).eps * len(ranks) * 2
            self.wrong += (~((out.float() - right).abs() <= bound)).sum()
        bits = out.view(torch.int32 if dtype == torch.float32 else torch.int16).to(torch.int64)
        self.digests[which].mul_(31).add_(bits.sum() + (bits * 3 + 1).square_().sum())

    def settle(self) -> dict[str, object]:
        """What went wrong in all of it, over all ranks."""
        torch.cuda.synchronize(self.device)
        told = self.world.all_gather_object([int(self.wrong), [int(digest) for digest in self.digests]])
        alike = True
        for which, (_, ranks) in enumerate(self.groups):
            alike = alike and len({told[rank][1][which] for rank in ranks}) == 1
        return {"wrong": sum(one[0] for one in told), "alike": self.all_agree(alike)}

    def all_agree(self, mine: bool) -> bool:
        return all(self.world.all_gather_object(mine))


def beside(device: torch.device) -> Callable[[], None]:
    """A matmul on a stream of its own that takes the whole GPU for a while; call it again and again."""
    stream = torch.cuda.Stream(device)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def go() -> None:
        if stream.query():
            with torch.cuda.stream(stream):
                torch.mm(a, a)

    return go


def storm(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """Eager operations with random delays, and a large matmul beside."""
    weather = Storm(world, groups, device, seed=asked.get("seed", 1))
    mine = random.Random(world.rank)  # delays differ between ranks
    matmul = beside(device)
    ops = asked.get("ops", 20_000)
    for done in range(ops):
        if mine.random() < 0.02:
            torch.cuda._sleep(mine.randrange(2_000_000))  # on the stream, up to about a millisecond
        if mine.random() < 0.002:
            time.sleep(mine.random() * 0.02)
        if done % 16 == 0:
            matmul()
        if done % 512 == 0:
            torch.cuda.current_stream(device).synchronize()
        weather.step()
    return {"ops": ops, **weather.settle()}


def replay(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """The same in graphs, replayed in random order, with eager operations between."""
    weather = Storm(world, groups, device, seed=asked.get("seed", 2))
    each, ops = 50, asked.get("ops", 20_000)
    weather.step()
    torch.cuda.synchronize(device)
    graphs = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(each):
                weather.step()
        graphs.append(graph)
    order, mine, matmul = random.Random(5), random.Random(world.rank), beside(device)
    for turn in range(ops // each):
        if mine.random() < 0.2:
            torch.cuda._sleep(mine.randrange(2_000_000))
        matmul()
        graphs[order.randrange(4)].replay()
        if turn % 4 == 0:
            weather.step()
    return {"ops": ops, **weather.settle()}


def storms(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """Both, in one launch."""
    return {"eager": storm(world, groups, device, asked), "graphs": replay(world, groups, device, asked)}


def norm(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """The epilogue against plain torch."""
    group, worst, alike = groups[0][0], 0.0, True
    for dtype in DTYPES:
        for rows, width in ((1, 8), (1, 4096), (7, 576), (33, 1000), (16, 8192)):
            for wide in (False, True):
                noise = torch.Generator(device).manual_seed(rows + width)
                residual = torch.randn(rows, width, generator=noise, device=device).to(dtype)
                weight = torch.randn(width, generator=noise, device=device).to(torch.float32 if wide else dtype)
                x = torch.randn(rows, width, generator=noise, device=device).to(dtype) * (world.rank + 1)
                summed = group.all_reduce(x, torch.empty_like(x))
                kept = residual + summed
                scale = torch.rsqrt(kept.float().pow(2).mean(-1, keepdim=True) + 1e-5)
                right = (kept.float() * scale * weight.float()).to(dtype)
                normed = group.all_reduce_norm(x, residual, weight, 1e-5)
                assert torch.equal(residual, kept), f"{dtype} {rows}x{width}: another residual"
                apart = (normed.float() - right.float()).abs() / right.float().abs().clamp(min=0.1)
                worst = max(worst, float(apart.max()) / torch.finfo(dtype).eps)
                held = hashlib.sha256(normed.float().cpu().numpy().tobytes()).hexdigest()
                alike = alike and len(set(world.all_gather_object(held))) == 1
    return {"worst_ulps": worst, "alike": alike}


def compiled(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """torch.compile keeps the operation as one node, and gives what eager gives."""
    total = AllReduceOp(groups[0][0])
    names: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        names.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return total(x @ weight).relu() + 1

    x, weight = torch.ones(16, 64, device=device) * (world.rank + 1), torch.eye(64, device=device) * 2
    eager = layer(x, weight)
    torch.compile(layer, backend=keep, fullgraph=True)(x, weight)
    torch._dynamo.reset()
    inductor = torch.compile(layer, fullgraph=True)(x, weight)
    right = 2 * sum(range(1, world.size + 1)) + 1
    return {"nodes": names, "eager": bool((eager == right).all()), "compiled": bool((inductor == right).all())}


def long(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """More than is nvrar's elsewhere, in a graph, which could not hold what NCCL does between ranks of one GPU."""
    group = groups[0][0]
    x = torch.ones(MAX_MESSAGE_BYTES // 2 + 4097, dtype=torch.bfloat16, device=device) * (world.rank + 1)
    out = torch.zeros_like(x)
    group.all_reduce(x, out)
    torch.cuda.synchronize(device)
    eager, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.all_reduce(x, out)
    out.zero_()
    graph.replay()
    right = sum(range(1, world.size + 1))
    return {"eager": bool((eager == right).all()), "captured": bool((out == right).all())}


def small(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """A few of everything, to run under compute-sanitizer; with overrun=1 rank 1 first writes past a tensor's end."""
    if asked.get("overrun"):
        x, out = torch.ones(1 << 18, device=device), torch.zeros(1 if world.rank == 1 else 1 << 18, device=device)
        groups[0][0].launch(x, out, Launch("ll", 1, 8192))
    weather = Storm(world, groups, device, seed=3)
    for _ in range(asked.get("ops", 30)):
        weather.step()
    return weather.settle()


def leave(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, asked: dict[str, int]
) -> object:
    """The last rank is killed (how=0) or stands still (how=1) among operations; the others never finish theirs."""
    weather = Storm(world, groups, device, seed=4)
    for done in range(100_000):
        if done == 300 and world.rank == world.size - 1:
            torch.cuda.synchronize(device)
            print(json.dumps({"left": time.time()}), file=sys.stderr, flush=True)
            if asked["how"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(120)
        if done % 64 == 0:
            torch.cuda.current_stream(device).synchronize()
            world.all_gather_object(done)
        weather.step()
    return {}


JOBS = {"storms": storms, "norm": norm, "compiled": compiled, "long": long, "small": small, "leave": leave}


def make_groups(backend: CommBackend, world: World) -> list[tuple[NvrarGroup, list[int]]]:
    everyone = list(range(world.size))
    groups = [("all", everyone)]
    if world.size >= 4:  # the other kind of a 2D grid's groups: every second rank
        half = world.rank % 2
        groups.append((f"half {half}", [rank for rank in everyone if rank % 2 == half]))
    made = []
    for name, ranks in groups:
        group = backend.group(name, ranks)
        assert isinstance(group, NvrarGroup)
        made.append((group, ranks))
    return made


def main() -> int:
    """As the commands do it: a rank other than 0 serves, and rank 0 says what ended the job."""
    job, nodes, *rest = sys.argv[1:]
    asked = {key: int(number) for key, _, number in (word.partition("=") for word in rest)}
    counts = [int(count) for count in nodes.split("+")]
    world = join(sum(counts), [__spec__.name, *sys.argv[1:]])
    try:
        with serving(world) if world.rank else nullcontext():
            take_part(job, world, counts, asked)
    except Exception as error:
        explained = world.explain(error)
        if world.rank == 0:
            world.fail(first_line(error))
            print(f"yalis: {explained or first_line(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        world.close()
    return 0


def take_part(job: str, world: World, counts: list[int], asked: dict[str, int]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    topology = Topology(tuple(node for node, count in enumerate(counts) for _ in range(count)))
    for _ in range(asked.get("times", 1)):  # an engine after an engine
        backend = open_backend("nvrar", world, device, topology)
        found = JOBS[job](world, make_groups(backend, world), device, asked)
        if world.rank == 0:
            print(json.dumps(found), flush=True)
        backend.close()


if __name__ == "__main__":
    sys.exit(main())
