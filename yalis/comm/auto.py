"""The fastest backend for every message: by what was measured on this shape of group, else by a rule of thumb."""

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
    """Hands each all-reduce to one of several groups of the same ranks."""

    def __init__(self, under: TorchGroup, groups: dict[str, Communicator], pick: Callable[[int], str]) -> None:
        super().__init__(under)
        self.groups, self.pick = groups, lru_cache(pick)
        self.capturable = all(group.capturable for group in groups.values())

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.groups[self.pick(x.nbytes)].all_reduce(x, out)


class AutoBackend(CustomAllReduceBackend):
    name = "auto"

    def _start(self) -> None:
        self._others: dict[str, CommBackend] = {}
        for name in self._wanted():
            backend = BACKENDS.load(name)
            if (reason := unusable_on_any_rank(name, self.world, self.device)) is not None:
                log.info("auto goes without %s: %s", name, reason)
            elif issubclass(backend, CustomAllReduceBackend):
                self._others[name] = backend(self.world, self.device, self.topology, self.table, self.torch_backend)
            else:
                self._others[name] = backend(self.world, self.device, self.topology, self.table)

    def _wanted(self) -> list[str]:
        """The backends worth asking for: those a measured shape is fastest with, else those of the defaults."""
        names = set().union(*(tuned.backends for tuned in self.table.shapes.values()))
        if self.device.type == "cpu":
            names.add("hierarchical")
        return [name for name in BACKENDS.names() if name in names - {"torch", "auto"}]

    def wrap_group(self, under: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        nodes = self.topology.by_node(ranks)
        tuned = self.table.for_nodes(nodes)
        # Between CPUs it was faster than gloo's ring at all sizes from 64 KB to 8 MB, and level above (docs/nvrar.md);
        # between GPUs NCCL has to be shown to be slower.
        default = "hierarchical" if self.device.type == "cpu" and "hierarchical" in self._others else "torch"
        wanted = tuned.backends if tuned.timings else {default}
        groups: dict[str, Communicator] = {"torch": under}
        for backend, other in self._others.items():
            if backend not in wanted:
                continue
            if isinstance(other, CustomAllReduceBackend):
                groups[backend] = other.wrap_group(under, name, ranks)
            else:
                groups[backend] = other.group(name, ranks)

        def pick(size: int) -> str:
            choice = tuned.best(size, groups.keys())
            return default if choice is None else choice.backend

        return AutoGroup(under, groups, pick) if len(groups) > 1 else under

    def check(self) -> None:
        for other in self._others.values():
            other.check()

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        super().close()
