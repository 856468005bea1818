"""Seconds of collectives and sends on a machine, by communication library.

Each library has its own algorithms, costs per hop and protocols: an all-reduce of NCCL and one of NVSHMEM take
different times over the same wire. A machine file gives the parameters of the libraries that can be used on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from yalis.errors import YalisError
from yalis.perfmodel.collectives import Shape
from yalis.planner.collective_libraries import CpuMpi, Gloo, Hierarchical, Mpi, Nvrar, PublishedNvrar
from yalis.planner.library import FullLibrary, Library
from yalis.planner.machine import Machine
from yalis.planner.nccl import Nccl

#: Libraries by name; where there are several models, the machine's parameters decide. `nccl` is `--allreduce torch` on
#: GPUs, `gloo` is torch's own all-reduce on CPUs. nvrar-published is the published algorithm; no backend runs it.
LIBRARIES: Mapping[str, tuple[type[Library], ...]] = {
    "nccl": (Nccl,),
    "mpi": (Mpi, CpuMpi),
    "nvrar": (Nvrar,),
    "nvrar-published": (PublishedNvrar,),
    "gloo": (Gloo,),
    "hierarchical": (Hierarchical,),
}


class CommModel:
    """Times of one library's operations on a machine, in seconds."""

    def __init__(self, machine: Machine, library: str) -> None:
        if library not in LIBRARIES:
            raise YalisError(f"unknown communication library {library!r}; accepted: {', '.join(LIBRARIES)}")
        if library not in machine.libraries:
            known = ", ".join(libraries_of(machine)) or "none"
            raise YalisError(
                f"machine {machine.name} has no parameters of {library}; it has: {known}; measure them with "
                f"`yalis calibrate` on that machine, or copy a libraries.{library} section into a machine file"
            )
        _refuse_unknown(machine)
        given = machine.libraries[library]
        usable = [one for one in LIBRARIES[library] if set(one.required) <= set(given)]
        if not usable:
            lacking = next(name for name in LIBRARIES[library][0].required if name not in given)
            raise YalisError(
                f"machine {machine.name} has no libraries.{library}.{lacking}; add it to the machine file, or measure "
                "it with `yalis calibrate`"
            )
        self.machine, self.name = machine, library
        self.library = usable[0](machine, {name: float(one) for name, one in given.items()})
        others = full_library_of(library)
        full = self.library if others == library else CommModel(machine, others).library
        assert isinstance(full, FullLibrary)
        self._others = full  # gathers and sends

    def all_reduce(self, group: Shape, bytes: float) -> float:
        """Return the seconds until every rank of the group has the sum of messages of `bytes` bytes."""
        return self.library.all_reduce(group, bytes) if group.size > 1 else 0.0

    def all_gather(self, group: Shape, bytes_per_rank: float) -> float:
        """Return the seconds until every rank of the group has all parts."""
        return self._others.all_gather(group, bytes_per_rank) if group.size > 1 else 0.0

    def send(self, bytes: float, same_node: bool) -> float:
        """Return the seconds of one message between two ranks, as between pipeline stages."""
        return self._others.send(bytes, same_node)


def full_library_of(library: str) -> str:
    """Return the library that gathers and sends when this one reduces: NCCL, as in the engine, if it only reduces."""
    return library if issubclass(LIBRARIES[library][0], FullLibrary) else "nccl"


def libraries_of(machine: Machine) -> list[str]:
    """Return the libraries that the machine has parameters of, in a fixed order."""
    return [name for name in LIBRARIES if name in machine.libraries]


def _refuse_unknown(machine: Machine) -> None:
    """Refuse libraries and parameters that would have no effect, such as misspelled ones."""
    for library, parameters in machine.libraries.items():
        if library not in LIBRARIES:
            raise YalisError(
                f"machine {machine.name} has an unknown section libraries.{library}; accepted: {', '.join(LIBRARIES)}"
            )
        known = [name for model in LIBRARIES[library] for name in model.required]
        for name in parameters:
            if name not in known:
                raise YalisError(
                    f"machine {machine.name} has an unknown parameter libraries.{library}.{name}; accepted: "
                    f"{', '.join(dict.fromkeys(known))}"
                )
