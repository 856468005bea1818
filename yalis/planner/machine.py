"""A machine as data: GPUs, nodes, network and communication libraries, read from a JSON file.

Every number is a Quantity, so that each prediction can list what it rests on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from yalis.errors import YalisError
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
    host: Mapping[str, Quantity]  # times of the host and of the control plane; names in step_time.py

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
        """Return every number by its path, such as `libraries.nccl.inter_hop_s`."""
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
_COUNTS = ("gpus_per_node", "max_nodes", "nics_per_node")


class _Reader:
    """Reads the JSON object of a machine, with errors that name the field."""

    def __init__(self, data: Any, label: str) -> None:
        self.data, self.label = data, label

    def machine(self) -> Machine:
        gpu = self._object("gpu")
        fields: dict[str, Any] = {name: self._quantity(gpu, name, f"gpu.{name}") for name in _GPU_QUANTITIES}
        fields |= {name: gpu[name] for name in _GPU_LIMITS if self._is_limit(gpu, name)}
        fields["efficiencies"] = self._text(gpu, "efficiencies", "gpu.efficiencies")
        device = Gpu(self._text(gpu, "name", "gpu.name"), **fields)
        libraries = {
            name: {key: self._quantity(one, key, f"libraries.{name}.{key}") for key in self._checked(one, name)}
            for name, one in self._object("libraries").items()
        }
        host = self._object("host")
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

    def _checked(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise YalisError(f"{self.label}: libraries.{name} must be an object")
        return value

    def _text(self, data: dict[str, Any], name: str, where: str) -> str:
        value = data.get(name)
        if not isinstance(value, str) or not value:
            raise YalisError(f"{self.label}: {where} must be a text")
        return value

    def _count(self, name: str) -> int:
        value = self.data.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise YalisError(f"{self.label}: {name} must be a whole number of at least 1")
        return value

    def _is_limit(self, gpu: dict[str, Any], name: str) -> bool:
        """Return whether this optional limit of the GPU is given; refuses one of the wrong type."""
        value = gpu.get(name)
        if name == "has_tma":
            valid = value is None or isinstance(value, bool)
        else:
            valid = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        if not valid:
            raise YalisError(
                f"{self.label}: gpu.{name} is {value!r}; give a whole number, or true or false for has_tma"
            )
        return value is not None

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
        path = Path(name)
        if not path.is_file():
            raise YalisError(
                f"unknown machine {name!r}; give one of {', '.join(machine_names())}, or a file that "
                "`yalis calibrate` has written"
            )
        text, label = path.read_text(errors="replace"), str(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise YalisError(f"{label} is not valid JSON ({error}); `yalis calibrate` writes such a file") from None
    return Machine.from_json(data, label)
