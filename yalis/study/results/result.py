"""The `Result` record: what was run, where, with which versions, and a table of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from yalis.errors import count_of
from yalis.launch.launchers import SRUN

SCHEMA = "yalis-result"
#: 2 added `topology`; 5 renamed a column of scaling and a parameter of profile. Added columns: see `Column.since`.
VERSION = 7

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One measurement, as stored in a JSON file. Host names are left out because results are published."""

    kind: str
    parameters: dict[str, Any]
    rows: list[Row]
    command: str
    devices: list[dict[str, Any]]
    topology: dict[str, Any] | None  # see `make_topology`; None in files of schema version 1
    created: str  # ISO 8601 with a time zone
    versions: dict[str, str | None]
    host: dict[str, Any]
    revision: str | None  # git commit, with "-dirty" if the checkout was modified
    schema: str = SCHEMA
    schema_version: int = VERSION
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StoredResult:
    """A result and the file it was read from."""

    path: Path
    result: Result


def age_key(source: StoredResult) -> tuple[datetime, int, str]:
    """Return a sort key from oldest to newest. Within one second, `write` numbers the names in order."""
    return datetime.fromisoformat(source.result.created), len(source.path.name), source.path.name


def make_topology(nodes: Sequence[int], launcher: str = "") -> dict[str, Any]:
    """Describe where ranks run.

    `nodes` has the host index of each rank in rank order. `launcher` is empty if rank 0 started the others itself."""
    return {"ranks": len(nodes), "ranks_per_host": list(Counter(nodes).values()), "launcher": launcher}


def machine_of(result: Result) -> dict[str, Any]:
    """Return the hardware a result was measured on. Results of different hardware are never divided by each other."""
    names = ("type", "name", "memory_gib", "capability")
    devices = [{name: device[name] for name in names if name in device} for device in result.devices]
    machine = {"cpu": result.host.get("cpu"), "machine": result.host.get("machine"), "devices": devices}
    if any(device.get("type") == "cpu" for device in devices):  # a GPU job may have any share of the cores
        machine["cores"] = result.host.get("cores")
    return machine


def machine_name(machine: dict[str, Any]) -> str:
    """Return a line such as "NVIDIA H200 · Intel(R) Xeon(R) ..." for the value of `machine_of`."""
    names = [str(device.get("name", device.get("type"))) for device in machine.get("devices", [])]
    devices = ", ".join(dict.fromkeys(names))
    cores = f", {count_of(machine['cores'], 'core')}" if "cores" in machine else ""
    return " · ".join(filter(None, [devices, f"{machine.get('cpu')}{cores}"]))


def model_name(result: Result) -> str:
    """Return model and dtype, such as "smollm2-135m, float32"."""
    name = Path(result.parameters["engine"]["model"]).name.removesuffix(".json")
    return ", ".join(filter(None, [name, result.parameters.get("dtype", "")]))


def describe_split(result: Result) -> str:
    """Return ", tp 2x2, nvrar" for a model that was split by tensor parallelism, else nothing."""
    engine = result.parameters["engine"]
    grid = engine.get("tp", [1])
    if max(grid) == 1:
        return ""
    return f", tp {'x'.join(str(count) for count in grid if count > 1)}, {engine.get('allreduce', 'auto')}"


def ranks_per_gpu(result: Result, allowed: int) -> int:
    """Return how many ranks share a GPU, where up to `allowed` may: at most the ranks of the fullest host."""
    return min(allowed, max(result.topology["ranks_per_host"])) if result.topology else allowed


def describe_oversubscription(result: Result) -> str:
    """Describe how ranks share cores or a GPU, such as "4 ranks on 2 cores"; empty if each has its own."""
    topology = result.topology or make_topology([0])
    ranks = max(topology["ranks_per_host"])
    if result.devices[0]["type"] == "cpu":
        # srun binds each rank to its own cores, so rank 0 sees only a part of the host's.
        too_few = ranks > result.host["cores"] and topology.get("launcher") != SRUN.name
        return f"{ranks} ranks on {count_of(result.host['cores'], 'core')}" if too_few else ""
    shared = min(ranks, result.parameters["engine"]["ranks_per_gpu"])
    return f"{shared} ranks on a GPU" if shared > 1 else ""
