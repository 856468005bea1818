"""A machine as data: GPUs, nodes, network and communication libraries, read from a JSON file.

Every number is a Quantity, so that each prediction can list what it rests on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from yalis.errors import YalisError
from yalis.planner.control import DEFAULTS
from yalis.planner.quantity import Quantity


@dataclass(frozen=True)
class Gpu:
    """One device that runs one rank: a GPU, or the CPU cores of one rank."""

    name: str
    memory_bytes: Quantity
    read_bytes_per_s: Quantity  # of the fastest kernel that only reads
    matmul_flops_per_s: Quantity  # of a large dense matmul in the compute dtype
    #: Measured efficiencies of the engine's kernels, a file of planner/efficiencies/ without its suffix. They are
    #: relative to the two rates above, so that a table measured on one GPU can be applied to another.
    efficiencies: str
    #: What launch configurations depend on; the defaults are those of H100, GH200 and H200.
    num_sms: int = 132
    shared_memory_kib: int = 227  # largest of a thread block
    has_tma: bool = True


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs. `libraries` maps the name of an all-reduce backend to its parameters (communication.py)."""

    name: str
    description: str
    gpu: Gpu
    gpus_per_node: int
    max_nodes: int
    intra_bytes_per_s: Quantity  # from one GPU to the others of its node, in one direction
    nic_bytes_per_s: Quantity  # of one network interface, in one direction
    nics_per_node: int
    libraries: Mapping[str, Mapping[str, Quantity]]
    host: Mapping[str, Quantity]  # times of the control plane, by names of control.DEFAULTS

    @classmethod
    def from_json(cls, data: Any, label: str) -> Machine:
        """Read a machine; `label` names the file in errors."""
        return _Reader(data, label).machine()

    def to_json(self) -> dict[str, Any]:
        gpu = self.gpu
        return {
            "name": self.name,
            "description": self.description,
            "gpu": {
                "name": gpu.name,
                "efficiencies": gpu.efficiencies,
                **{name: getattr(gpu, name) for name in _GPU_LIMITS},
                **{name: getattr(gpu, name).to_json() for name in _GPU_QUANTITIES},
            },
            **{name: getattr(self, name) for name in _COUNTS},
            **{name: getattr(self, name).to_json() for name in _QUANTITIES},
            "libraries": {
                library: {name: one.to_json() for name, one in parameters.items()}
                for library, parameters in self.libraries.items()
            },
            "host": {name: one.to_json() for name, one in self.host.items()},
        }

    def quantities(self) -> dict[str, Quantity]:
        """Return every number by its path, such as `libraries.nccl.net_hop_extra_s`."""
        found = {f"gpu.{name}": getattr(self.gpu, name) for name in _GPU_QUANTITIES}
        found |= {name: getattr(self, name) for name in _QUANTITIES}
        for library, parameters in self.libraries.items():
            found |= {f"libraries.{library}.{name}": one for name, one in parameters.items()}
        return found | {f"host.{name}": one for name, one in self.host.items()}

    def with_quantity(self, path: str, value: Quantity) -> Machine:
        """Return this machine with one number replaced; `path` is a key of quantities()."""
        data = self.to_json()
        *parents, name = path.split(".")
        target = data
        for parent in parents:
            target = target[parent]
        target[name] = value.to_json()
        return Machine.from_json(data, self.name)


_GPU_LIMITS = ("num_sms", "shared_memory_kib", "has_tma")  # optional
_GPU_QUANTITIES = ("memory_bytes", "read_bytes_per_s", "matmul_flops_per_s")
_QUANTITIES = ("intra_bytes_per_s", "nic_bytes_per_s")
#: Whole numbers, and the largest that is accepted: the search goes through all divisors of the GPUs.
_COUNTS = {"gpus_per_node": 1024, "max_nodes": 1_000_000, "nics_per_node": 1024}

#: Of an efficiency: a measured one may be a little above 1, percent are far above.
_MAX_SHARE = 2.0


class _Reader:
    """Reads the JSON object of a machine, with errors that name the field."""

    def __init__(self, data: Any, label: str) -> None:
        self.data, self.label = data, label

    def machine(self) -> Machine:
        gpu = self._object("gpu")
        self._refuse_unknown(gpu, ("name", "efficiencies", *_GPU_LIMITS, *_GPU_QUANTITIES), "gpu.")
        others = ("name", "description", "gpu", "libraries", "host")
        self._refuse_unknown(self.data, (*others, *_COUNTS, *_QUANTITIES), "")
        fields: dict[str, Any] = {name: self._quantity(gpu, name, f"gpu.{name}") for name in _GPU_QUANTITIES}
        fields |= {name: gpu[name] for name in _GPU_LIMITS if self._is_limit(gpu, name)}
        fields["efficiencies"] = self._text(gpu, "efficiencies", "gpu.efficiencies")
        device = Gpu(self._text(gpu, "name", "gpu.name"), **fields)
        libraries = {
            name: {key: self._quantity(one, key, f"libraries.{name}.{key}") for key in self._checked(one, name)}
            for name, one in self._object("libraries").items()
        }
        host = self._object("host")
        self._refuse_unknown(host, tuple(DEFAULTS), "host.")
        return Machine(
            self._text(self.data, "name", "name"),
            self._text(self.data, "description", "description"),
            device,
            gpus_per_node=self._count("gpus_per_node"),
            max_nodes=self._count("max_nodes"),
            nics_per_node=self._count("nics_per_node"),
            intra_bytes_per_s=self._quantity(self.data, "intra_bytes_per_s", "intra_bytes_per_s"),
            nic_bytes_per_s=self._quantity(self.data, "nic_bytes_per_s", "nic_bytes_per_s"),
            libraries=libraries,
            host={name: self._quantity(host, name, f"host.{name}") for name in host},
        )

    def _object(self, name: str) -> dict[str, Any]:
        if not isinstance(self.data, dict) or not isinstance(self.data.get(name), dict):
            raise YalisError(
                f"{self.label} is no machine: it has no object {name!r}; `yalis calibrate` writes such a file"
            )
        found: dict[str, Any] = self.data[name]
        return found

    def _refuse_unknown(self, data: dict[str, Any], known: Sequence[str], prefix: str) -> None:
        """Refuse fields that would have no effect, such as a misspelled optional one."""
        for name in data:
            if name not in known:
                raise YalisError(f"{self.label} has an unknown field {prefix + name!r}; accepted: {', '.join(known)}")

    def _checked(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise YalisError(f"{self.label}: libraries.{name} is no object; give one of parameters, or remove it")
        return value

    def _text(self, data: dict[str, Any], name: str, where: str) -> str:
        value = data.get(name)
        if not isinstance(value, str) or not value:
            given = "missing" if value is None else repr(value)
            raise YalisError(f"{self.label}: {where} is {given}; give a text")
        return value

    def _count(self, name: str) -> int:
        value = self.data.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _COUNTS[name]:
            given = "missing" if value is None else repr(value)
            raise YalisError(f"{self.label}: {name} is {given}; give a whole number from 1 to {_COUNTS[name]}")
        return value

    def _is_limit(self, gpu: dict[str, Any], name: str) -> bool:
        """Return whether this optional limit of the GPU is given; refuses one of the wrong type."""
        value = gpu.get(name)
        if value is None:
            return False
        if name == "has_tma":
            valid, accepted = isinstance(value, bool), "true or false"
        else:
            valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
            accepted = "a whole number of at least 1"
        if not valid:
            raise YalisError(f"{self.label}: gpu.{name} is {value!r}; give {accepted}, or leave it out")
        return True

    def _quantity(self, data: dict[str, Any], name: str, where: str) -> Quantity:
        return Quantity.from_json(data.get(name), f"{self.label}: {where}")


def machine_names() -> list[str]:
    """Return the names of the machines that come with yalis."""
    folder = resources.files("yalis.planner") / "machines"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def load_machine(name: str) -> Machine:
    """Return a machine by name, or from the JSON file at this path."""
    if name in machine_names():
        text, label = (resources.files("yalis.planner") / "machines" / f"{name}.json").read_text(), name
    else:
        try:
            text, label = Path(name).read_text(errors="replace"), name
        except OSError as error:
            raise YalisError(
                f"unknown machine {name!r}; give one of {', '.join(machine_names())}, or a file that "
                f"`yalis calibrate` has written ({error.strerror})"
            ) from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise YalisError(f"{label} is not valid JSON ({error}); `yalis calibrate` writes such a file") from None
    machine = Machine.from_json(data, label)
    _check_rates(machine, label)
    return machine


def _check_rates(machine: Machine, label: str) -> None:
    """Refuse rates that a prediction would divide by zero, and percent in place of a share."""
    for path, one in machine.quantities().items():
        share = path.endswith("_efficiency")
        if (share or path.endswith(("bytes_per_s", "flops_per_s", "memory_bytes"))) and one.low <= 0:
            raise YalisError(f"{label}: {path} is {one.value:g} with the lower bound {one.low:g}; give both above 0")
        if share and one.value > _MAX_SHARE:
            raise YalisError(f"{label}: {path} is {one.value:g}; give a share of the link's rate, such as 0.93")
