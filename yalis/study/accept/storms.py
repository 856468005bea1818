"""The contract of a communicator, and storms of random all-reduces, on any device.

Inputs are small integers, whose sums are exact in every dtype, so a wrong element is an error and not rounding. Outputs
are filled with NaN before each operation, so one that does nothing is noticed.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.launch.world import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POOL = 1 << 18  # elements of a rank's inputs; an operation uses a slice of them
#: Mostly the sizes of decode steps, and a few that take several chunks or operations.
_SIZES = (1, 7, 64, 1000, 5000, 16384, 40001, 131072)
_WEIGHTS = (3, 3, 3, 8, 8, 8, 4, 2)
_EXACT_BFLOAT16 = 256  # up to here, every integer is a bfloat16
_GRAPH_OPERATIONS = 20


class Inputs:
    """The inputs of this rank and the sums over all ranks, whose inputs every rank can draw."""

    def __init__(self, world: World, device: torch.device) -> None:
        largest = max(1, min(4, _EXACT_BFLOAT16 // world.size))
        total = torch.zeros(_POOL, dtype=torch.int64)
        own = total
        for rank in range(world.size):
            noise = torch.Generator().manual_seed(rank + 1)
            drawn = torch.randint(-largest, largest + 1, (_POOL,), generator=noise)
            total = total + drawn
            own = drawn if rank == world.rank else own
        self.own = {dtype: own.to(device, dtype) for dtype in DTYPES}
        self.total = {dtype: total.to(device, dtype) for dtype in DTYPES}


class Storm:
    """Random all-reduces, the same on all ranks, with a pause of this rank alone now and then."""

    def __init__(self, world: World, comm: Communicator, inputs: Inputs, device: torch.device, seed: int) -> None:
        self._world, self._comm, self._inputs, self._device = world, comm, inputs, device
        self._random, self._pauses = random.Random(seed), random.Random(f"{seed} {world.rank}")
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._digest = torch.zeros((), dtype=torch.int64, device=device)

    def run(self, operations: int) -> dict[str, int]:
        """Run eager operations. Returns the wrong elements of all ranks, and how many digests the ranks have."""
        for _ in range(operations):
            if self._pauses.random() < 0.02:
                time.sleep(self._pauses.random() * 2e-3)
            self._step()
        return self._finish()

    def replay(self, operations: int) -> dict[str, int]:
        """Run operations from a CUDA graph that holds several of them; returns the same as `run`."""
        self._step()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_GRAPH_OPERATIONS):
                self._step()
        for _ in range(-(-operations // _GRAPH_OPERATIONS)):
            graph.replay()
        return self._finish()

    def _step(self) -> None:
        draw = self._random
        dtype = draw.choice(DTYPES)
        count = draw.choices(_SIZES, _WEIGHTS)[0] + draw.randrange(64)
        start = draw.randrange(_POOL - count)
        x, total = (pool[dtype][start : start + count] for pool in (self._inputs.own, self._inputs.total))
        # Also at addresses that are not aligned.
        out = torch.full((count + 1,), float("nan"), dtype=dtype, device=self._device)[draw.randrange(2) :][:count]
        if draw.random() < 0.5:
            result = self._comm.all_reduce(out.copy_(x))
        else:
            result = self._comm.all_reduce(x, out)
        self._wrong += (result != total).sum()
        bits = result.view(torch.int32 if dtype == torch.float32 else torch.int16).to(torch.int64)
        self._digest.mul_(31).add_((bits * 3 + 1).square_().sum())

    def _finish(self) -> dict[str, int]:
        found = self._world.all_gather_object([int(self._wrong), int(self._digest)])
        return {"wrong": sum(wrong for wrong, _ in found), "digests": len({digest for _, digest in found})}


def check_contract(world: World, comm: Communicator, inputs: Inputs, device: torch.device) -> tuple[int, list[str]]:
    """Call every collective. Returns the number of checks of a rank, and what was wrong on any rank."""
    checks = 0
    problems = []
    for what, holds in _run_contract(world, comm, inputs, device):
        checks += 1
        if not holds:
            problems.append(what)
    by_rank = world.all_gather_object(problems)
    return checks, [f"{what} on rank {rank}" for rank, found in enumerate(by_rank) for what in found]


def _run_contract(world: World, comm: Communicator, inputs: Inputs, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Yield a description of each check, and whether it held on this rank."""
    size, rank = world.size, world.rank
    for dtype in DTYPES:
        for count in (0, 1, 3, 1000, 65537):
            what = f"the sum of {count} elements of {dtype}"
            x, total = inputs.own[dtype][:count].clone(), inputs.total[dtype][:count]
            out = torch.full_like(x, float("nan"))
            yield f"{what} in another tensor", comm.all_reduce(x, out) is out and torch.equal(out, total)
            yield f"{what}: the input", torch.equal(x, inputs.own[dtype][:count])
            yield f"{what} in place", torch.equal(comm.all_reduce(x), total)
        yield from _sum_with_norm(world, comm, inputs, dtype)
        noise = torch.randn(4099, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        digests = world.all_gather_object(_digest(comm.all_reduce(noise)))
        yield f"the same bits of a sum of {dtype} as on rank 0", digests[rank] == digests[0]
    gathered = comm.all_gather(torch.full((2, 3), float(rank), device=device), 0)
    expected = torch.arange(size, device=device).repeat_interleave(2).float().view(-1, 1).expand(-1, 3)
    yield "all_gather", torch.equal(gathered, expected)
    for source in {0, size - 1}:
        sent = comm.broadcast(torch.full((1001,), float(rank), device=device), source)
        yield f"a broadcast from rank {source}", bool((sent == source).all())
    yield from _pass_around(comm, device)
    comm.barrier()


def _sum_with_norm(world: World, comm: Communicator, inputs: Inputs, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    """Check the all-reduce that adds a residual and norms the rows, in one kernel or in several."""
    rows, width = 3, 1000
    x, total = (pool[dtype][: rows * width].view(rows, width).clone() for pool in (inputs.own, inputs.total))
    residual, weight = torch.ones_like(total), torch.full_like(total[0], 0.5)
    normed, summed = comm.all_reduce_add_norm(x, residual, weight, 1e-5)
    yield f"the sum of {dtype} with a residual", torch.equal(summed, total + 1)
    kept = summed.float()
    expected = kept * torch.rsqrt(kept.pow(2).mean(-1, keepdim=True) + 1e-5) * 0.5
    close = torch.allclose(normed.float(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    yield f"the norm of a sum of {dtype}", close
    digests = world.all_gather_object(_digest(normed))
    yield f"the same bits of a norm of {dtype} as on rank 0", digests[comm.rank] == digests[0]


def _pass_around(comm: Communicator, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Send a message to the next rank of the group; rank 0 begins, so that no rank waits for itself."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own = torch.full((4097,), float(comm.rank), device=device)
    steps: list[Callable[[], Tensor | None]] = [
        lambda: comm.send(own, following),
        lambda: comm.recv(torch.full_like(own, float("nan")), previous),
    ]
    received = [step() for step in (steps if comm.rank == 0 else reversed(steps))]
    (message,) = (one for one in received if one is not None)
    yield f"a message of rank {previous}", bool((message == previous).all())


def _digest(x: Tensor) -> str:
    return hashlib.blake2b(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
