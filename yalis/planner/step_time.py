"""The time of a step on a split model: compute of the slowest rank of each pipeline stage, communication, and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from yalis.parallel.dims import rank_dims
from yalis.parallel.plan import Split
from yalis.perfmodel.floors import ModelDims
from yalis.planner.collectives import Collective, StageGroups, collectives, same_node
from yalis.planner.communication import CommModel
from yalis.planner.compute import ComputeModel, ComputeTime
from yalis.planner.control import DEFAULTS, ControlTime, control_time
from yalis.planner.machine import Machine
from yalis.planner.step import StepShape, StepTime
from yalis.spec import ModelSpec

#: The library of a replica of one rank on a machine that has none.
NO_LIBRARY = "none"
#: Dimensions of a rank's slice that its compute time grows with.
_GROWING = (
    "layers", "heads", "kv_heads", "intermediate", "vocab", "expert_layers", "expert_width", "shared_width",
    "experts",
)  # fmt: skip


def with_control(machine: Machine) -> Machine:
    """Return the machine with the default times of the control plane where it has none of its own.

    They are then among its quantities, so that intervals and sensitivities take them into account.
    """
    return replace(machine, host={**DEFAULTS, **machine.host})


class StepTimeModel:
    """Predicts the steps of one replica. Ranks are placed on nodes in order, so that tensor-parallel ranks are near."""

    def __init__(
        self, machine: Machine, spec: ModelSpec, split: Split, itemsize: int, library: str,
        compute: Callable[..., ComputeModel] = ComputeModel,
    ) -> None:  # fmt: skip
        self.machine, self.spec, self.split, self.itemsize, self.library = machine, spec, split, itemsize, library
        self._comm = None if library == NO_LIBRARY else CommModel(machine, library)
        #: Stages with equal slices, placement and neighbours have equal times: the first equal one of each stage.
        first = slowest_placement(split, machine.gpus_per_node)
        self._same_as, self._layouts = _layouts(spec, replace(split, replicas=1), machine.gpus_per_node, first)
        self._compute = {
            stage: [compute(machine, spec, split, itemsize, rank) for rank in layout.ranks]
            for stage, layout in self._layouts.items()
        }
        self._communication = lru_cache(maxsize=4096)(self._communication_seconds)
        self._control = lru_cache(maxsize=4096)(self._control_time)

    def stages(self, shape: StepShape) -> list[StepTime]:
        """Return the time of each stage: its slowest rank, with communication and the send to the next stage."""
        times: dict[int, StepTime] = {}
        for stage in self._compute:
            one = self._slowest(stage, shape)
            communication = self._communication(stage, shape.tokens, shape.sampled)
            times[stage] = StepTime(one.matmul, one.attention, communication, one.other)
        return [times[stage] for stage in self._same_as]

    def host(self, shape: StepShape) -> float:
        """Return the seconds of the driver's host: scheduling, packing, sending the plan to all ranks, launching."""
        time = self._compute[0][0].step(shape)
        return time.host + time.host_mixed + self._control(shape.decodes + len(shape.chunks)).driver

    def replayed(self, shape: StepShape) -> bool:
        """Return whether the engine replays a recorded step."""
        return self._compute[0][0].step(shape).replayed

    def return_seconds(self, sequences: int) -> float:
        """Return the delay of a pipeline's control plane: a plan to the last rank, and its tokens to the driver.

        Without a pipeline it is 0: the plan of the next step is sent while this step runs.
        """
        if self.split.stages == 1:
            return 0.0
        time = self._control(sequences)
        host = {**DEFAULTS, **self.machine.host}
        return time.delivery - time.driver + float(host["control_hop_s"]) + float(host["control_network_s"])

    def _control_time(self, sequences: int) -> ControlTime:
        return control_time(self.machine.host, self.split.per_replica - 1, sequences)

    def all_reduces(self, tokens: int, sampled: int) -> list[Collective]:
        """Return the all-reduces of a step, over all stages."""
        found = [one for stage in self._same_as for one in self._collectives(stage, tokens, sampled)]
        return [one for one in found if one.operation == "all_reduce"]

    def _slowest(self, stage: int, shape: StepShape) -> ComputeTime:
        models = self._compute[stage]
        if len(models) == 1:
            return models[0].step(shape)
        times = [model.step(shape) for model in models]
        return max(times, key=lambda time: time.matmul + time.attention + time.other)

    def _collectives(self, stage: int, tokens: int, sampled: int) -> list[Collective]:
        groups = self._layouts[stage].groups
        return list(collectives(self.spec, self.split, groups, stage, self.itemsize, tokens, sampled))

    def _communication_seconds(self, stage: int, tokens: int, sampled: int) -> float:
        if self._comm is None:
            return 0.0
        total = 0.0
        for one in self._collectives(stage, tokens, sampled):
            operation = self._comm.all_reduce if one.operation == "all_reduce" else self._comm.all_gather
            total += one.count * max(operation(shape, one.bytes) for shape in one.shapes)
        if stage < self.split.stages - 1:
            hidden = self.spec.hidden_size // self.split.cols
            total += self._comm.send(tokens * hidden * self.itemsize, self._layouts[stage].near)
        return total


@dataclass(frozen=True)
class _Layout:
    """What the time of a pipeline stage depends on."""

    ranks: tuple[int, ...]  # with the largest slices
    groups: StageGroups
    near: bool  # whether the next stage is on the same node


@lru_cache(maxsize=4096)
def slowest_placement(split: Split, gpus_per_node: int) -> int:
    """Return where on its node the replica starts whose pipeline sends most often between nodes.

    Replicas that do not fill whole nodes start at different places. Those of the first replica are the best."""
    places = sorted({replica * split.per_replica % gpus_per_node for replica in range(split.replicas)})

    def sends_between_nodes(first: int) -> int:
        return sum(not same_node(split, gpus_per_node, stage, first) for stage in range(split.stages - 1))

    return max(places, key=sends_between_nodes)


@lru_cache(maxsize=4096)
def _layouts(spec: ModelSpec, split: Split, gpus_per_node: int, first: int) -> tuple[list[int], dict[int, _Layout]]:
    """Return for each stage the first one that is equal to it, and the layouts of those.

    `first`: the place on its node of the replica's first rank."""
    same_as: list[int] = []
    layouts: dict[int, _Layout] = {}
    known: dict[object, int] = {}
    for stage in range(split.stages):
        slices = largest_slices(spec, split, stage)
        groups = StageGroups.of(split, gpus_per_node, stage, first)
        last = stage == split.stages - 1
        near = not last and same_node(split, gpus_per_node, stage, first)
        equal = known.setdefault((tuple(slices.values()), groups, near, last), stage)
        same_as.append(equal)
        if equal == stage:
            layouts[stage] = _Layout(tuple(slices), groups, near)
    return same_as, layouts


@lru_cache(maxsize=65536)
def largest_slices(spec: ModelSpec, split: Split, stage: int) -> dict[int, ModelDims]:
    """Return ranks of a stage, of which one is the slowest at any step, with their dimensions.

    A rank is left out if another has as much of every dimension. Usually only the first remains.
    """
    first = stage * split.per_stage
    found: dict[int, ModelDims] = {}
    # Columns of a row differ only in their share of the vocabulary, which is largest in column 0.
    for rank in range(first, first + split.per_stage, split.cols):
        dims = rank_dims(spec, split, rank, 2.0, 2.0)
        dims = replace(dims, windows=tuple(sorted(dims.windows, key=lambda window: window or 0)))
        if not any(_covers(other, dims) for other in found.values()):
            found = {other: one for other, one in found.items() if not _covers(dims, one)}
            found[rank] = dims
    return found


def _covers(larger: ModelDims, smaller: ModelDims) -> bool:
    return all(getattr(larger, name) >= getattr(smaller, name) for name in _GROWING)
