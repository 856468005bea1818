"""Checks of a communication backend, run by the ranks of a real job; rank 0 prints the outcome as JSON.

Run as `python -m tests.multiprocess.comm_checks (all|death) BACKEND SIZE DEVICE [NODES]`, with or without a launcher.
NODES, such as 2+2+1, gives the ranks of each node.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch
from torch import Tensor

from yalis.comm.base import CommBackend, Communicator
from yalis.comm.selection import open_backend
from yalis.comm.topology import Topology
from yalis.launch.join import join
from yalis.launch.world import World

SIZES = (0, 1, 3, 1000, 65537)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Checks:
    def __init__(self, world: World, backend: CommBackend, device: torch.device) -> None:
        self.world, self.backend, self.device = world, backend, device
        self.all = backend.group("all", range(world.size))
        self.done = 0
        # Hierarchical and nvrar round once per node and once per inter-node exchange, of which there are about log2(n).
        self.rounds_once = device.type == "cpu" and (backend.name != "hierarchical" or backend.topology.nodes == 1)

    def draw(self, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the input of `rank`. Every rank can compute the inputs of all ranks."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * rank + sum(shape)))
        return (numbers * (1 if dtype.is_floating_point else 1e5)).to(dtype).to(self.device)

    def require(self, condition: bool, what: str) -> None:
        self.done += 1
        if not condition:
            raise AssertionError(what)

    def same_bits(self, x: Tensor, what: str) -> None:
        """Require that all ranks of the world have the same bytes in `x`."""
        digest = hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        self.require(len(set(self.world.all_gather_object(digest))) == 1, f"{what}: ranks have different bits")

    def all_reduces(self) -> None:
        ranks = range(self.world.size)
        for dtype in DTYPES:
            for size in SIZES:
                what = f"sum of {size} {dtype}"
                own = self.draw(self.world.rank, size, dtype=dtype)
                exact = torch.stack([self.draw(rank, size, dtype=dtype) for rank in ranks])
                exact = exact.double().sum(0) if dtype.is_floating_point else exact.sum(0)
                out = torch.full_like(own, 7)
                self.require(self.all.all_reduce(own, out=out) is out, f"{what}: not in `out`")
                self.require(torch.equal(own, self.draw(self.world.rank, size, dtype=dtype)), f"{what}: input written")
                if dtype.is_floating_point:
                    # On CPUs, low precisions are rounded once at the end. Otherwise every addition rounds.
                    once = dtype.itemsize == 2 and self.rounds_once
                    bound = 0.5 * exact.abs() + 1e-4 if once else self.world.size * (exact.abs() + 4)
                    self.require(bool(((out.double() - exact).abs() <= torch.finfo(dtype).eps * bound).all()), what)
                else:
                    self.require(torch.equal(out, exact.to(dtype)), what)
                self.same_bits(out, what)
                self.require(self.all.all_reduce(own) is own and torch.equal(own, out), f"{what}: in place")

    def integers_as_floats(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x = (torch.arange(4097, device=self.device) % 16 + self.world.rank).to(dtype)
            n = self.world.size
            exact = torch.arange(4097, device=self.device) % 16 * n + n * (n - 1) // 2
            self.require(torch.equal(self.all.all_reduce(x), exact.to(dtype)), f"sums of integers in {dtype}")
        if self.rounds_once:
            # 256 + 1 + 1 + ... stays 256 in bfloat16 if every addition is rounded.
            x = torch.tensor([1.0 if self.world.rank else 256.0], dtype=torch.bfloat16)
            once = torch.tensor([255.0 + self.world.size]).bfloat16()
            self.require(torch.equal(self.all.all_reduce(x), once), "low precision was rounded more than once")

    def strided(self) -> None:
        n, rank = self.world.size, self.world.rank
        whole = torch.zeros(6, 8, device=self.device)
        part = whole[:, ::2]
        part += rank + 1
        total = n * (n + 1) / 2
        self.require(self.all.all_reduce(part) is part and bool((whole[:, ::2] == total).all()), "strided sum")
        self.require(bool((whole[:, 1::2] == 0).all()), "strided sum wrote outside of its tensor")
        out = torch.zeros(8, 6, device=self.device).t()[:, ::2]
        self.require(bool((self.all.all_reduce(part, out=out) == total * n).all()), "strided out")
        self.require(bool((self.all.broadcast(part.fill_(rank), source=n - 1) == n - 1).all()), "strided broadcast")
        self.require(bool((whole[:, 1::2] == 0).all()), "strided broadcast wrote outside of its tensor")

    def gathers(self) -> None:
        ranks = range(self.world.size)
        for dtype in DTYPES:
            for shape in ((3,), (2, 3), (2, 3, 5), (0, 4), (1, 70001)):
                drawn = [self.draw(rank, *shape, dtype=dtype) for rank in ranks]
                for dim in range(-1, len(shape)):
                    what = f"all_gather of {dtype} {shape} along {dim}"
                    joined = self.all.all_gather(drawn[self.world.rank], dim)
                    self.require(torch.equal(joined, torch.cat(drawn, dim)), what)
        transposed = [self.draw(rank, 5, 3).t() for rank in ranks]
        joined = self.all.all_gather(transposed[self.world.rank], 0)
        self.require(torch.equal(joined, torch.cat(transposed, 0)), "strided all_gather")

    def broadcasts(self) -> None:
        for source in range(self.world.size):
            for dtype in (*DTYPES, torch.uint8, torch.bool):
                for size in SIZES:
                    x = self.draw(self.world.rank, size, dtype=torch.int64).to(dtype)
                    got = self.all.broadcast(x, source)
                    expected = self.draw(source, size, dtype=torch.int64).to(dtype)
                    self.require(got is x and torch.equal(x, expected), f"broadcast of {size} {dtype} from {source}")

    def messages(self) -> None:
        n, rank = self.world.size, self.world.rank
        following, previous = (rank + 1) % n, (rank - 1) % n
        if self.device.type == "cuda":  # both ranks of a channel take part in its creation
            if rank == 0:
                self.all.send(torch.zeros(1, device=self.device), following)
            self.all.recv(torch.zeros(1, device=self.device), previous)
            if rank != 0:
                self.all.send(torch.zeros(1, device=self.device), following)
        # All ranks send first, more than any buffer holds. This must not deadlock.
        for size in (*SIZES, 1 << 20):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                self.all.send(self.draw(rank, size, dtype=dtype), following)
                got = self.all.recv(torch.empty(size, dtype=dtype, device=self.device), previous)
                self.require(torch.equal(got, self.draw(previous, size, dtype=dtype)), f"message of {size} {dtype}")
        # Several messages in flight keep their order, also if they are strided.
        for i in range(6):
            self.all.send(torch.full((3, 4), float(10 * rank + i), device=self.device).t(), following)
        for i in range(6):
            got = self.all.recv(torch.empty(6, 4, device=self.device)[::2].t(), previous)
            self.require(bool((got == 10 * previous + i).all()), f"message {i} of several")

    def long_backlog(self) -> None:
        """A sender far ahead of its receiver is throttled, and everything arrives."""
        if self.world.rank == 0:
            for i in range(50):
                self.all.send(torch.full((30000,), float(i), device=self.device), 1)
        elif self.world.rank == 1:
            time.sleep(0.2)
            for i in range(50):
                got = self.all.recv(torch.empty(30000, device=self.device), 0)
                self.require(bool((got == i).all()), f"message {i} of a long backlog")
        self.all.barrier()

    def delivery_without_help(self) -> None:
        """A large message arrives although its sender makes no further call."""
        if self.world.rank == 0:
            self.all.send(torch.ones(1 << 21, device=self.device), 1)
        elif self.world.rank == 1:
            got = self.all.recv(torch.empty(1 << 21, device=self.device), 0)
            self.require(bool((got == 1).all()), "a large message")
        self.world.all_gather_object(None)

    def grid(self) -> None:
        """Interleaved calls on the row, column and whole group of a 2 x 2 grid."""
        if self.world.size != 4:
            return
        row, col = divmod(self.world.rank, 2)
        across = self.backend.group(f"row {row}", [2 * row, 2 * row + 1])
        down = self.backend.group(f"column {col}", [col, col + 2])
        for turn in range(20):
            x = torch.full((257,), float(self.world.rank + turn), device=self.device)
            self.require(bool((across.all_reduce(x.clone()) == 4 * row + 1 + 2 * turn).all()), "sum over a row")
            self.require(bool((down.all_reduce(x.clone()) == 2 * col + 2 + 2 * turn).all()), "sum over a column")
            self.require(bool((self.all.all_reduce(x.clone()) == 6 + 4 * turn).all()), "sum over all, interleaved")
            self.require(down.all_gather(x[:1]).tolist() == [col + turn, col + 2 + turn], "gather over a column")
        self.require((across.rank, across.size, down.rank) == (col, 2, row), "ranks in a row and a column")
        reordered = self.backend.group("reversed", [3, 2, 1, 0])
        self.require(reordered.rank == 3 - self.world.rank, "rank in a reordered group")
        gathered = reordered.all_gather(torch.tensor([self.world.rank], device=self.device))
        self.require(gathered.tolist() == [3, 2, 1, 0], "order of a reordered group")

    def captured(self) -> None:
        """Every replay of a captured all-reduce sums again."""
        if not self.all.capturable:
            return
        x = torch.ones(1000, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.all.all_reduce(x)
        x.fill_(1)
        for _ in range(3):
            graph.replay()
        self.require(bool((x == self.world.size**3).all()), "replayed sums")
        if not self.all.gather_capturable:
            return
        x = torch.zeros(3, 5, dtype=torch.bfloat16, device=self.device)
        self.all.all_gather(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            joined = self.all.all_gather(x)
        for turn in range(3):
            x.fill_(self.world.rank + turn)
            graph.replay()
            expected = torch.arange(self.world.size, device=self.device).repeat_interleave(5) + turn
            self.require(bool((joined == expected).all()), "replayed gathers")

    def alone(self) -> None:
        one: Communicator = self.backend.group(f"alone {self.world.rank}", [self.world.rank])
        self.require(one.size == 1 and one.all_reduce(torch.ones(2)).tolist() == [1, 1], "a group of one")

    def no_default_group(self) -> None:
        self.require(not torch.distributed.is_initialized(), "torch.distributed has a default group")


def lose_a_rank(checks: Checks) -> None:
    """Kill the last rank during collectives. Rank 0 prints the error, the seconds until it came, and its cause."""
    x = torch.ones(1000)
    checks.all.all_reduce(x)
    start = time.monotonic()
    if checks.world.rank == checks.world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            checks.all.all_reduce(x)
    except Exception as error:
        outcome = {
            "raised": type(error).__name__,
            "after": time.monotonic() - start,
            "cause": str(checks.world.explain(error)),
        }
    if checks.world.rank == 0:
        print(json.dumps(outcome), flush=True)


def run_all(checks: Checks) -> None:
    times = {}
    for check in (
        checks.no_default_group,
        checks.all_reduces,
        checks.integers_as_floats,
        checks.strided,
        checks.gathers,
        checks.broadcasts,
        checks.messages,
        checks.long_backlog,
        checks.delivery_without_help,
        checks.grid,
        checks.captured,
        checks.alone,
    ):
        start = time.monotonic()
        check()
        times[check.__name__] = round(time.monotonic() - start, 2)
    done = checks.world.all_gather_object(checks.done)
    if checks.world.rank == 0:
        print(json.dumps({"backend": checks.backend.name, "checks": done, "seconds": times}), flush=True)


def main() -> None:
    job, name, size, device_name, *counts = sys.argv[1:]
    torch.set_num_threads(1)
    world = join(int(size), [__spec__.name, *sys.argv[1:]])
    # A rank whose check fails exits with an exception, and the liveness check ends the others.
    device = torch.device(device_name)
    nodes = [node for node, ranks in enumerate(counts[0].split("+")) for _ in range(int(ranks))] if counts else None
    backend = open_backend(name, world, device, Topology(tuple(nodes)) if nodes else None)
    {"all": run_all, "death": lose_a_rank}[job](Checks(world, backend, device))
    backend.close()
    world.close()


if __name__ == "__main__":
    main()
