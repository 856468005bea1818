"""The norm after attention and MLP sums over the ranks through one method, which a communicator may fuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Board, Memory, run_ranks
from tests.unit.test_engine_slice_rank import CONFIG, CPU, PLANS, SPEC, engine_config
from yalis.checkpoint.random import RandomCheckpoint
from yalis.comm.base import Communicator, SingleRank
from yalis.engine.runner import Runner
from yalis.family import SANDWICH_NORMS
from yalis.kernels import ops
from yalis.parallel.norm import norm_reduces
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split

LAYERS = SPEC.num_layers


class Fused(Memory):
    """A communicator whose all-reduce with norm is one message of its own, and leaves x unsummed."""

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(self._sum("all_reduce_add_norm", x), residual, weight, eps)


class ThreadBackend:
    def __init__(self, kind: type[Memory], rank: int, boards: dict[Any, Board], lock: Lock) -> None:
        self.kind, self.rank, self.boards, self.lock, self.groups = kind, rank, boards, lock, list[Memory]()

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        with self.lock:
            board = self.boards.setdefault((name, tuple(ranks)), Board(len(ranks), 30))
        self.groups.append(self.kind(board, list(ranks).index(self.rank)))
        return self.groups[-1]


def run_job(split: Split, kind: type[Memory]) -> tuple[list[list[Tensor]], list[str]]:
    """Run PLANS on all ranks; returns the outputs of every rank's steps, and the collectives of rank 0."""
    boards: dict[Any, Board] = {}
    lock = Lock()

    def run(rank: int, _: Memory) -> tuple[list[Tensor], list[str]]:
        backend: Any = ThreadBackend(kind, rank, boards, lock)
        grid, stage = Grid.open(split, rank, backend), Stage.open(split, rank, backend)
        runner = Runner(engine_config(split), SPEC, RandomCheckpoint(CONFIG, 0, "tiny"), frozenset(), CPU, grid, stage)
        outputs: list[Tensor] = []
        execute = runner.executor.run

        def keep(*args: Any) -> Any:
            result = execute(*args)
            outputs.append(result.out.clone())
            return result

        runner.executor.run = keep  # type: ignore[method-assign]
        for plan in PLANS:
            if (pending := runner.launch(plan)) is not None:
                pending.result()
        return outputs, [name for group in backend.groups for name, _ in group.calls]

    results = run_ranks(split.size, run)
    return [outputs for outputs, _ in results], results[0][1]


@pytest.mark.parametrize("split", [Split(3), Split(2, stages=2), Split(2, 2)], ids=str)
def test_fused_and_separate_steps_have_the_same_bits(split: Split) -> None:
    separate, calls = run_job(split, Memory)
    fused, fused_calls = run_job(split, Fused)
    for expected, outputs in zip(separate, fused, strict=True):
        for one, other in zip(expected, outputs, strict=True):
            assert torch.equal(one, other)
    layers = len(range(LAYERS)[: -(-LAYERS // split.stages)])  # of the first stage, which has the larger half
    sums_in_norms = 2 * layers - (split.stages > 1)  # the last sum of a stage is sent on without a norm
    assert fused_calls.count("all_reduce_add_norm") == (len(PLANS) * sums_in_norms if split.cols == 1 else 0)
    assert "all_reduce_add_norm" not in calls
    assert len(calls) == len(fused_calls)


def test_which_norms_sum() -> None:
    grid = Grid(rows=2)
    assert norm_reduces(SPEC, grid)
    assert not norm_reduces(SPEC, Grid(rows=2, cols=2))
    assert not norm_reduces(SPEC, Grid())
    assert not norm_reduces(replace(SPEC, block_norms=SANDWICH_NORMS), grid), "another norm comes between"
    assert not norm_reduces(replace(SPEC, residual_multiplier=0.2), grid), "a product comes between"
