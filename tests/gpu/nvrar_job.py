"""Jobs that test nvrar between ranks that share a GPU; rank 0 prints the outcome as JSON.

Run as `python -m tests.gpu.nvrar_job JOB NODES [key=number ...]`. NODES, such as 2+2, gives the ranks of each logical
node. Results are compared on the device, so that operations run back to back.
"""

from __future__ import annotations

import ctypes
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
from yalis.comm.nvrar.group import MAX_MESSAGE_BYTES, LaunchConfig, NvrarGroup
from yalis.comm.nvrar.launch_config import schedules_for
from yalis.comm.selection import open_backend
from yalis.comm.topology import Topology
from yalis.errors import first_line
from yalis.launch.join import join
from yalis.launch.serving import serving
from yalis.launch.world import World

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOL = 1 << 20  # elements of the input pool; an operation uses a slice of it
# Mostly small messages, some as long as one operation allows, and few that take several operations.
SIZES = (1, 7, 64, 1000, 5000, 16384, 40001, 131072, 262144, 600_001)
WEIGHTS = (3, 3, 3, 8, 8, 8, 8, 4, 2, 1)


class Pools:
    """Inputs of one group: integers, whose sums are exact, and random floats. Every rank can compute the sums."""

    def __init__(self, ranks: list[int], rank: int, device: torch.device) -> None:
        self.own: dict[tuple[torch.dtype, bool], Tensor] = {}
        self.sums: dict[tuple[torch.dtype, bool], Tensor] = {}
        for integers in (True, False):
            total = torch.zeros(POOL, dtype=torch.float64)
            for other in ranks:
                noise = torch.Generator().manual_seed(other + 1)
                numbers = torch.randint(-4, 5, (POOL,), generator=noise).double()
                numbers = numbers if integers else torch.rand(POOL, generator=noise, dtype=torch.float64) - 0.5
                for dtype in DTYPES:
                    key = dtype, integers
                    drawn = numbers.to(dtype)
                    self.sums[key] = self.sums.get(key, total.clone()) + drawn.double()
                    if other == rank:
                        self.own[key] = drawn.to(device)
        self.sums = {key: total.to(key[0] if key[1] else torch.float32).to(device) for key, total in self.sums.items()}


class StressTest:
    """Random operations, in the same order on all ranks."""

    def __init__(
        self, world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, seed: int
    ) -> None:
        self.world, self.groups, self.device = world, groups, device
        # Lines too, if the tear test of every group allows them.
        tested = world.all_gather_object([group.lines_arrive_whole() for group, _ in groups])
        self.protocols = ("ll", "signal", "line") if all(map(all, tested)) else ("ll", "signal")
        self.pools = [Pools(ranks, world.rank, device) for _, ranks in groups]
        self.random = random.Random(seed)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        # One per group, because groups have different inputs.
        self.digests = [torch.zeros((), dtype=torch.int64, device=device) for _ in groups]

    def step(self) -> None:
        """Launch one operation and its check on the current stream, without synchronizing."""
        draw = self.random
        which = draw.randrange(len(self.groups))
        group, ranks = self.groups[which]
        dtype, integers = draw.choice(DTYPES), draw.random() < 0.6
        count = draw.choices(SIZES, WEIGHTS)[0] + draw.randrange(64)
        start = draw.randrange(POOL - count)
        protocol = draw.choice(self.protocols)
        config = LaunchConfig(protocol, draw.choice((1, 2, 4, 8, 16)), draw.choice((128, 2048, 8192, 65536)))
        schedule = draw.choice(schedules_for(group._nodes))
        blocks = min(config.blocks, group._session.max_blocks)
        config = LaunchConfig(config.protocol, blocks, config.chunk, schedule=schedule)
        pools, key = self.pools[which], (dtype, integers)
        x = pools.own[key][start : start + count]
        out = torch.full((count + 1,), float("nan"), dtype=dtype, device=self.device)[draw.randrange(2) :][:count]
        if draw.random() < 0.5:
            out.copy_(x)
            group.launch(out, out, config)
        else:
            group.launch(x, out, config)
        expected = pools.sums[key][start : start + count]
        if integers:
            self.wrong += (out != expected).sum()
        else:
            bound = torch.finfo(dtype).eps * len(ranks) * 2
            self.wrong += (~((out.float() - expected).abs() <= bound)).sum()
        bits = out.view(torch.int32 if dtype == torch.float32 else torch.int16).to(torch.int64)
        self.digests[which].mul_(31).add_(bits.sum() + (bits * 3 + 1).square_().sum())

    def finish(self) -> dict[str, object]:
        """Return the wrong elements over all ranks, and whether each group has identical bits on all ranks."""
        torch.cuda.synchronize(self.device)
        outcomes = self.world.all_gather_object([int(self.wrong), [int(digest) for digest in self.digests]])
        identical = True
        for which, (_, ranks) in enumerate(self.groups):
            identical = identical and len({outcomes[rank][1][which] for rank in ranks}) == 1
        return {"wrong": sum(wrong for wrong, _ in outcomes), "identical": self.all_agree(identical)}

    def all_agree(self, value: bool) -> bool:
        return all(self.world.all_gather_object(value))


def background_matmul(device: torch.device) -> Callable[[], None]:
    """Return a function that launches a matmul of the whole GPU on its own stream, unless one is still running."""
    stream = torch.cuda.Stream(device)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def launch() -> None:
        if stream.query():
            with torch.cuda.stream(stream):
                torch.mm(a, a)

    return launch


def stress_eager(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Eager operations with random delays, next to a large matmul."""
    test = StressTest(world, groups, device, seed=options.get("seed", 1))
    delays = random.Random(world.rank)  # differ between ranks
    matmul = background_matmul(device)
    ops = options.get("ops", 20_000)
    for done in range(ops):
        if delays.random() < 0.02:
            torch.cuda._sleep(delays.randrange(2_000_000))  # on the stream, up to about a millisecond
        if delays.random() < 0.002:
            time.sleep(delays.random() * 0.02)
        if done % 16 == 0:
            matmul()
        if done % 512 == 0:
            torch.cuda.current_stream(device).synchronize()
        test.step()
    return {"ops": ops, **test.finish()}


def stress_graphs(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Operations in CUDA graphs, replayed in random order, with eager operations in between."""
    test = StressTest(world, groups, device, seed=options.get("seed", 2))
    ops_per_graph, ops = 50, options.get("ops", 20_000)
    test.step()
    torch.cuda.synchronize(device)
    graphs = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(ops_per_graph):
                test.step()
        graphs.append(graph)
    order, delays, matmul = random.Random(5), random.Random(world.rank), background_matmul(device)
    for turn in range(ops // ops_per_graph):
        if delays.random() < 0.2:
            torch.cuda._sleep(delays.randrange(2_000_000))
        matmul()
        graphs[order.randrange(4)].replay()
        if turn % 4 == 0:
            test.step()
    return {"ops": ops, **test.finish()}


def stress(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Both stress tests, in one job."""
    return {
        "eager": stress_eager(world, groups, device, options),
        "graphs": stress_graphs(world, groups, device, options),
    }


def norm(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Compare the fused all-reduce with plain torch, and its bits with those of an all-reduce and a norm kernel."""
    group, worst, identical, fused = groups[0][0], 0.0, True, 0
    for dtype in DTYPES:
        for rows, width in ((1, 8), (1, 4096), (7, 576), (33, 1000), (16, 8192)):
            for fp32_weight in (False, True):
                noise = torch.Generator(device).manual_seed(rows + width)
                residual = torch.randn(rows, width, generator=noise, device=device).to(dtype)
                weight = torch.randn(width, generator=noise, device=device).to(torch.float32 if fp32_weight else dtype)
                x = torch.randn(rows, width, generator=noise, device=device).to(dtype) * (world.rank + 1)
                summed = group.all_reduce(x, torch.empty_like(x))
                kept = residual + summed
                scale = torch.rsqrt(kept.float().pow(2).mean(-1, keepdim=True) + 1e-5)
                expected = (kept.float() * scale * weight.float()).to(dtype)
                fused += group._norm_launch(x, residual, weight) is not None
                group._fuse_norm = False
                separate = group.all_reduce_add_norm(x.clone(), residual, weight, 1e-5)
                group._fuse_norm = True
                normed, total = group.all_reduce_add_norm(x, residual, weight, 1e-5)
                assert torch.equal(total, kept), f"{dtype} {rows}x{width}: wrong residual"
                assert torch.equal(normed, separate[0]), f"{dtype} {rows}x{width}: other bits than separate kernels"
                assert torch.equal(total, separate[1])
                error = (normed.float() - expected.float()).abs() / expected.float().abs().clamp(min=0.1)
                worst = max(worst, float(error.max()) / torch.finfo(dtype).eps)
                digest = hashlib.sha256(normed.float().cpu().numpy().tobytes()).hexdigest()
                identical = identical and len(set(world.all_gather_object(digest))) == 1
    return {"worst_ulps": worst, "identical": identical, "fused": fused}


def compiled(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """torch.compile keeps the operation as one node and returns the same result as eager mode."""
    all_reduce = AllReduceOp(groups[0][0])
    names: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        names.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return all_reduce(x @ weight).relu() + 1

    x, weight = torch.ones(16, 64, device=device) * (world.rank + 1), torch.eye(64, device=device) * 2
    eager = layer(x, weight)
    torch.compile(layer, backend=keep, fullgraph=True)(x, weight)
    torch._dynamo.reset()
    inductor = torch.compile(layer, fullgraph=True)(x, weight)
    expected = 2 * sum(range(1, world.size + 1)) + 1
    return {"nodes": names, "eager": bool((eager == expected).all()), "compiled": bool((inductor == expected).all())}


def long(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """A message longer than MAX_MESSAGE_BYTES in a CUDA graph, which cannot capture NCCL if ranks share a GPU."""
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
    expected = sum(range(1, world.size + 1))
    return {"eager": bool((eager == expected).all()), "captured": bool((out == expected).all())}


def small(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """A few operations, for compute-sanitizer. With overrun=1, rank 1 first writes past the end of a tensor."""
    if options.get("overrun"):
        x, out = torch.ones(1 << 18, device=device), torch.zeros(1 if world.rank == 1 else 1 << 18, device=device)
        groups[0][0].launch(x, out, LaunchConfig("ll", 1, 8192))
    test = StressTest(world, groups, device, seed=3)
    for _ in range(options.get("ops", 30)):
        test.step()
    return test.finish()


def leave(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """The last rank is killed (how=0) or hangs (how=1) between operations, so the others cannot finish theirs."""
    test = StressTest(world, groups, device, seed=4)
    for done in range(100_000):
        if done == 300 and world.rank == world.size - 1:
            torch.cuda.synchronize(device)
            print(json.dumps({"left": time.time()}), file=sys.stderr, flush=True)
            if options["how"] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(120)
        if done % 64 == 0:
            torch.cuda.current_stream(device).synchronize()
            world.all_gather_object(done)
        test.step()
    return {}


def puts(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Operations of one size with default parameters. Returns the puts that a rank of two nodes needs for them."""
    group, size, ops = groups[0][0], options.get("size", 1 << 20), options.get("ops", 100)
    x = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    config = group._launch(x.nbytes)
    for _ in range(ops):
        group.all_reduce(x, torch.empty_like(x))
    torch.cuda.synchronize(device)
    return {"protocol": config.protocol, "expected": ops * -(-size // config.chunk)}


def protocols(
    world: World, groups: list[tuple[NvrarGroup, list[int]]], device: torch.device, options: dict[str, int]
) -> object:
    """Return the median time in us of an eager operation with LL and with put-with-signal, in the same chunks."""
    group, size = groups[0][0], options.get("size", 128 << 10)
    x = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    out, medians = torch.empty_like(x), {}
    for protocol in ("ll", "signal"):
        config, times = LaunchConfig(protocol, 2, options.get("chunk", 16 << 10)), []
        for _ in range(options.get("ops", 40)):
            group.barrier()
            begin = time.perf_counter()
            group.launch(x, out, config)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
            assert bool((out == world.size).all())
        medians[protocol] = sorted(times)[len(times) // 2] * 1e6
    return medians


JOBS = {
    "puts": puts,
    "protocols": protocols,
    "stress": stress,
    "norm": norm,
    "compiled": compiled,
    "long": long,
    "small": small,
    "leave": leave,
}


def free_dirty_pinned_memory(value: int = 2, count: int = 20_000) -> None:
    """Write `value` to many small allocations of pinned memory and free them, as a long job may have done."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    addresses = [ctypes.c_void_p() for _ in range(count)]
    for address in addresses:
        assert runtime.cudaMallocHost(ctypes.byref(address), ctypes.c_size_t(4)) == 0
        assert address.value
        ctypes.c_int.from_address(address.value).value = value
    for address in addresses:
        assert runtime.cudaFreeHost(address) == 0


def make_groups(backend: CommBackend, world: World) -> list[tuple[NvrarGroup, list[int]]]:
    all_ranks = list(range(world.size))
    groups = [("all", all_ranks)]
    if world.size >= 4:  # every second rank, like the column groups of a 2D grid
        half = world.rank % 2
        groups.append((f"half {half}", [rank for rank in all_ranks if rank % 2 == half]))
    created = []
    for name, ranks in groups:
        group = backend.group(name, ranks)
        assert isinstance(group, NvrarGroup)
        created.append((group, ranks))
    return created


def main() -> int:
    """Run like a CLI command: ranks other than 0 serve, and rank 0 prints why the job ended."""
    job, nodes, *rest = sys.argv[1:]
    options = {key: int(number) for key, _, number in (argument.partition("=") for argument in rest)}
    counts = [int(count) for count in nodes.split("+")]
    world = join(sum(counts), [__spec__.name, *sys.argv[1:]])
    try:
        with serving(world) if world.rank else nullcontext():
            run_job(job, world, counts, options)
    except Exception as error:
        explained = world.explain(error)
        if world.rank == 0:
            world.fail(first_line(error))
            print(f"yalis: {explained or first_line(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        world.close()
    return 0


def run_job(job: str, world: World, counts: list[int], options: dict[str, int]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda:0")
    topology = Topology(tuple(node for node, count in enumerate(counts) for _ in range(count)))
    for _ in range(options.get("times", 1)):  # one backend after another
        if options.get("dirty"):
            free_dirty_pinned_memory()
        backend = open_backend("nvrar", world, device, topology)
        outcome = JOBS[job](world, make_groups(backend, world), device, options)
        if world.rank == 0:
            print(json.dumps(outcome), flush=True)
        backend.close()


if __name__ == "__main__":
    sys.exit(main())
