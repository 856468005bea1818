"""Selects an all-reduce backend by message size: from the tuning table of this group shape, else from a default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from yalis.comm.base import BACKENDS, CommBackend, Communicator
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.selection import unusable_on_any_rank
from yalis.comm.torch_dist import TorchGroup
from yalis.log import get_logger

log = get_logger(__name__)


class AutoGroup(CustomAllReduceGroup):
    """Dispatches each all-reduce to one of several groups of the same ranks."""

    def __init__(self, torch_group: TorchGroup, groups: dict[str, Communicator], pick: Callable[[int], str]) -> None:
        """`pick` returns the backend name for a message of that many bytes."""
        super().__init__(torch_group)
        self.groups, self.pick = groups, lru_cache(pick)
        self.capturable = all(group.capturable for group in groups.values())

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.groups[self.pick(x.nbytes)].all_reduce(x, out)

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.groups[self.pick(x.nbytes)].all_reduce_add_norm(x, residual, weight, eps)


class AutoBackend(CustomAllReduceBackend):
    name = "auto"

    def _initialize(self) -> None:
        self._candidates: dict[str, CommBackend] = {}
        for name in self._candidate_names():
            backend = BACKENDS.load(name)
            if (reason := unusable_on_any_rank(name, self.world, self.device)) is not None:
                log.info("auto does not use %s: %s", name, reason)
            elif issubclass(backend, CustomAllReduceBackend):
                self._candidates[name] = backend(self.world, self.device, self.topology, self.table, self.torch_backend)
            else:
                self._candidates[name] = backend(self.world, self.device, self.topology, self.table)

    def _candidate_names(self) -> list[str]:
        """Return the backends that are fastest in some tuned shape, plus the default for this device."""
        names = set().union(*(tuned.backends for tuned in self.table.shapes.values()))
        if self.device.type == "cpu":
            names.add("hierarchical")
        return [name for name in BACKENDS.names() if name in names - {"torch", "auto"}]

    def wrap_group(self, torch_group: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        nodes = self.topology.by_node(ranks)
        timings = self.table.for_nodes(nodes)
        # On CPUs, hierarchical was faster than gloo's ring from 64 KB to 8 MB and equal above (docs/nvrar.md).
        # On GPUs, use NCCL unless measurements show another backend to be faster.
        default = "hierarchical" if self.device.type == "cpu" and "hierarchical" in self._candidates else "torch"
        selected = timings.backends if timings.timings else {default}
        groups: dict[str, Communicator] = {"torch": torch_group}
        for backend_name, backend in self._candidates.items():
            if backend_name not in selected:
                continue
            if isinstance(backend, CustomAllReduceBackend):
                groups[backend_name] = backend.wrap_group(torch_group, name, ranks)
            else:
                groups[backend_name] = backend.group(name, ranks)

        def pick(size: int) -> str:
            choice = timings.best(size, groups.keys())
            return default if choice is None else choice.backend

        return AutoGroup(torch_group, groups, pick) if len(groups) > 1 else torch_group

    def check(self) -> None:
        for backend in self._candidates.values():
            backend.check()

    def close(self) -> None:
        for backend in self._candidates.values():
            backend.close()
        super().close()
