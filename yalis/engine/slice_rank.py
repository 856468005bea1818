"""One rank of a split model, run alone: the other ranks do not exist, and collectives return at once.

The rank loads its shards and runs the steps of a real job, so that the time of its computation can be measured on one
device. The tokens that it samples are wrong.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from yalis.checkpoint.base import Checkpoint
from yalis.comm.null import NullBackend
from yalis.config import EngineConfig
from yalis.engine.expert_choice import split_of
from yalis.engine.replica_ranks import RemoteStep, ReplicaRanks
from yalis.engine.runner import PendingStep, dummy_prompt
from yalis.launch.fan_out import FAN_OUT, FanOut
from yalis.launch.link import Link
from yalis.launch.rank_info import RankInfo
from yalis.launch.world import World
from yalis.scheduling.plan import StepOutput, StepPlan
from yalis.spec import ModelSpec


class SliceWorld(World):
    """The world of a rank whose peers do not exist. Every rank is on its own node and gathers this rank's values."""

    def __init__(self, rank: int, size: int) -> None:
        host, pid = socket.gethostname(), os.getpid()
        super().__init__(rank, tuple(RankInfo(peer, host, peer, 0, "127.0.0.1", pid) for peer in range(size)))

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_object(self, value: Any) -> Any:
        return value

    def open_links(self, leader: int | None) -> dict[int, Link]:
        return {}

    def open_fan_out(self, leader: int | None, fan_out: int = FAN_OUT) -> FanOut:
        return FanOut({}, None, ())


class StageStep(PendingStep):
    """A launched step of a pipeline stage that samples no tokens. `result()` waits for the device."""

    def __init__(self, plan: StepPlan, token: int, device: torch.device) -> None:
        """`token`: returned in place of every token that the last stage would sample."""
        super().__init__(plan, None)
        self._token, self._computed = token, None
        if device.type == "cuda":
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record()

    def result(self) -> StepOutput:
        if self._computed is not None:
            self._computed.synchronize()
        ids = [step.request_id for step in self._plan.sequences if step.samples]
        return StepOutput(self._plan.step_id, dict.fromkeys(ids, self._token))


class SliceRank(ReplicaRanks):
    """Rank `rank` of the split in `config`, run as the only rank and driver of its engine."""

    def __init__(self, rank: int, config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        world = SliceWorld(rank, split_of(config).size)
        super().__init__(world, config, spec, checkpoint, frozenset(), NullBackend)
        self._token = self.runner.vocabulary.start  # in this rank's shard, so that its embedding is not zero
        if not self.runner.stage.last:
            self.runner.last_tokens.fill_(self._token)

    def launch(self, plan: StepPlan) -> PendingStep | RemoteStep:
        pending = self.runner.launch(plan)
        return StageStep(plan, self._token, self.runner.device) if pending is None else pending

    def count_all_reduces(self) -> tuple[int, int]:
        """Return the number of all-reduces in the model for a decode step of one sequence, and their bytes.

        Runs such a step eagerly, which overwrites the first KV block. Collectives of the sampler are not counted.
        """
        groups = self._comm.groups if isinstance(self._comm, NullBackend) else []

        def total() -> tuple[int, int]:
            return sum(group.calls["all_reduce"] for group in groups), sum(group.reduced_bytes for group in groups)

        calls, size = total()
        runner = self.runner
        runner.executor.dry_run(runner.packer.pack([dummy_prompt(0, 1, runner.block_size)]))
        return total()[0] - calls, total()[1] - size
