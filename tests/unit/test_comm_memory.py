"""The in-memory communicator that other tests use."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.ranks import Memory, run_ranks


def test_collectives_in_memory() -> None:
    def use_all_collectives(rank: int, comm: Memory) -> None:
        x = torch.full((2, 4), float(rank + 1))
        out = torch.empty(2, 4)
        assert comm.all_reduce(x, out=out) is out
        assert torch.equal(out, torch.full((2, 4), 6.0))
        assert torch.equal(x, torch.full((2, 4), rank + 1.0))
        assert comm.all_reduce(x) is x
        assert torch.equal(x, out)
        gathered = comm.all_gather(torch.tensor([[rank], [rank + 10]]), dim=-1)
        assert gathered.tolist() == [[0, 1, 2], [10, 11, 12]]
        assert comm.broadcast(torch.tensor([rank]), source=2).item() == 2
        comm.send(torch.tensor([rank]), (rank + 1) % 3)
        assert comm.recv(torch.tensor([-1]), (rank - 1) % 3).item() == (rank - 1) % 3
        comm.barrier()
        assert comm.calls[0] == ("all_reduce", 8)

    run_ranks(3, use_all_collectives)


def test_low_precision_rounds_once() -> None:
    # 256 + 1 + 1 in bf16 is 256 when each sum is rounded, 258 when only the last is.
    sums = run_ranks(3, lambda rank, comm: comm.all_reduce(torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16()))
    assert [value.item() for value in sums] == [258.0] * 3


def test_error_of_the_failing_rank_is_raised() -> None:
    def fail_on_one(rank: int, comm: Memory) -> None:
        if rank == 1:
            raise KeyError("mine")
        if rank == 0:
            comm.recv(torch.empty(1), 1)
        comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, fail_on_one)


def test_mismatched_collectives_are_detected() -> None:
    with pytest.raises(AssertionError, match="different collectives"):
        run_ranks(2, lambda rank, comm: comm.all_reduce(torch.ones(1)) if rank else comm.all_gather(torch.ones(1)))
    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, lambda rank, comm: comm.barrier() if rank else None, timeout=0.1)
