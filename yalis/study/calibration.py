"""Fits the parameters of communication libraries to results of `yalis bench allreduce`, and compares predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from yalis.errors import YalisError
from yalis.perfmodel.collectives import Link, Load, Shape, fit
from yalis.planner.collective_libraries import CpuLibrary, CpuMpi, Gloo, Hierarchical
from yalis.planner.communication import CommModel
from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity
from yalis.study.results.kinds.allreduce import fastest
from yalis.study.results.result import Result, Row
from yalis.study.topology import shape_of

Parameters = dict[str, Quantity]
#: Open MPI's default of btl_tcp_eager_limit, and the messages of a longer send: request, answer, data.
_EAGER_BYTES, _RENDEZVOUS_HOPS = 65536, 3
#: A median of a few dozen operations on a shared machine; the spread of runs is larger than that within a run.
_SPREAD = 0.15
_CPU_LIBRARIES: Mapping[str, type[CpuLibrary]] = {"gloo": Gloo, "hierarchical": Hierarchical, "mpi": CpuMpi}
#: Backends of the benchmark by the name of their library on GPUs.
_GPU_BACKENDS = {"nccl": "torch", "nvrar": "nvrar", "mpi": "mpi"}
#: The parameter of a GPU library that depends most on the network; it is fitted to the times of an all-reduce.
_NETWORK_PARAMETERS = {"nccl": "net_hop_extra_s", "mpi": "net_hop_s"}


@dataclass(frozen=True)
class Comparison:
    """One setting: the time that was measured, with its 10th and 90th percentile, beside the predicted one."""

    library: str
    delay_us: float | None
    bytes: int
    predicted_us: float
    measured_us: float
    low_us: float
    high_us: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_us / self.measured_us - 1


def fit_libraries(
    result: Result, machine: Machine, source: str, delay_us: float | None = None
) -> dict[str, Parameters]:
    """Return the parameters of every library that the result measured, for the links with this delay.

    `machine` has the bandwidth of links, and the parameters that the result cannot show. `source` names the result."""
    if result.kind != "allreduce":
        raise YalisError(f"{source} is a result of `yalis bench {result.kind}`; give one of `yalis bench allreduce`")
    if result.devices[0]["type"] == "cpu":
        return _fit_cpu(result, machine, source, delay_us)
    if result.parameters.get("ranks_per_gpu", 1) > 1:
        raise YalisError(f"in {source} ranks share a GPU, so its links are memory; measure with one rank on each GPU")
    return _fit_gpu(result, machine, source, delay_us)


def compare(machine: Machine, result: Result, delay_us: float | None = None) -> list[Comparison]:
    """Predict every row of a result with a machine that has the parameters of its libraries."""
    group = shape_of(result.parameters["nodes"])
    models = {name: CommModel(machine, name) for name in machine.libraries}
    return [
        Comparison(
            library, delay_us, row["bytes"], 1e6 * models[library].all_reduce(group, row["bytes"]), row["median_us"],
            row["low_us"], row["high_us"],
        )
        for library in models
        for row in _rows(result, _backend(result, library), delay_us)
    ]  # fmt: skip


def _rows(result: Result, backend: str, delay_us: float | None) -> list[Row]:
    """Return the rows of a backend with the algorithm that it chooses itself, preferably those of CUDA graphs."""
    found = [
        row
        for row in fastest([row for row in result.rows if "algorithm" not in row["options"]])
        if row["backend"] == backend and row["delay_us"] == delay_us
    ]
    graph = [row for row in found if row["mode"] == "graph"]
    return graph or found


def _backend(result: Result, library: str) -> str:
    return library if result.devices[0]["type"] == "cpu" else _GPU_BACKENDS.get(library, library)


def _links(result: Result, delay_us: float | None) -> dict[str, Any]:
    return next((one for one in result.parameters["links"] if one["delay_us"] == delay_us), {})


def _fit_cpu(result: Result, machine: Machine, source: str, delay_us: float | None) -> dict[str, Parameters]:
    """Fit the cost of an operation, the latency of a round and the cost per byte of each CPU backend.

    The ping of the benchmark gives the latency. Where an algorithm takes longer for short messages than its rounds, the
    rest is the cost of the operation; where it takes less, its rounds are faster than the ping."""
    group, links = shape_of(result.parameters["nodes"]), _links(result, delay_us)
    shared = bool(result.parameters.get("lab"))
    inside = links.get("inside", {"latency": 0.0, "seconds_per_byte": 0.0})
    common = {
        "intra_hop_s": _measured(inside["latency"], source),
        "intra_byte_s": _measured(inside["seconds_per_byte"], source),
        "shared_machine": _exact(float(shared), "1 if the hosts are those of a lab, on one machine"),
    }
    mpi = {
        "eager_bytes": _exact(_EAGER_BYTES, "Open MPI 4.1: btl_tcp_eager_limit"),
        "rendezvous_hops": _exact(_RENDEZVOUS_HOPS, "request, answer, data"),
    }
    found = {}
    for name, library in _CPU_LIBRARIES.items():
        rows = _rows(result, name, delay_us)
        known = {**common, **(mpi if name == "mpi" else {})}
        if group.nodes < 2 and rows and name in machine.libraries:
            found[name] = {**machine.libraries[name], **known}
        if group.nodes < 2 or len(rows) < 2:
            continue
        model = library(machine, {key: float(one) for key, one in known.items()})
        found[name] = {**known, **_fit_rounds(group, rows, model, links, shared, source)}
    return found


def _fit_rounds(
    group: Shape, rows: list[Row], model: CpuLibrary, links: dict[str, Any], shared: bool, source: str
) -> Parameters:
    sharing = group.size if shared else 1
    loads, seconds = [], []
    for row in rows:
        intra, inter = model.load(group, row["bytes"])
        loads.append(Load(inter.rounds, 0, sharing * inter.bytes))
        seconds.append(max(1e-6 * row["median_us"] - model.inside_seconds(intra), 1e-9))
    link, launch = fit(list(zip(loads, seconds, strict=True))), 0.0
    if "between" in links and (hop := links["between"]["latency"]) < link.latency:
        launch, byte = _fit_launch(loads, seconds, hop)
        link = Link(hop, byte)
    return {
        "launch_s": _measured(launch, source),
        "net_hop_s": _measured(link.latency, source),
        "byte_s": _measured(link.seconds_per_byte, source),
    }


def _fit_launch(loads: list[Load], seconds: list[float], hop: float) -> tuple[float, float]:
    """Return the costs per operation and byte for a known latency, by least squares of the relative error."""
    weights = 1 / np.array(seconds)
    costs = np.array([(1.0, load.bytes) for load in loads]) * weights[:, None]
    rest = (np.array(seconds) - [load.rounds * hop for load in loads]) * weights
    launch, byte = (float(one) for one in np.linalg.lstsq(costs, rest, rcond=None)[0])
    # Neither is negative. If noise makes one so, set it to 0 and fit the other alone.
    if launch < 0 or byte < 0:
        column = costs[:, 1 if launch < 0 else 0]
        alone = max(0.0, float(column @ rest / (column @ column)))
        launch, byte = (0.0, alone) if launch < 0 else (alone, 0.0)
    return launch, byte


def _fit_gpu(result: Result, machine: Machine, source: str, delay_us: float | None) -> dict[str, Parameters]:
    """Fit what pairs of ranks and the sizes of an all-reduce show; other parameters are those of the machine."""
    group, links = shape_of(result.parameters["nodes"]), _links(result, delay_us)
    found = {}
    for library, parameter in _NETWORK_PARAMETERS.items():
        rows = _rows(result, _GPU_BACKENDS[library], delay_us)
        if library in machine.libraries and rows and group.nodes > 1:
            fitted = _fit_one(machine, library, parameter, group, rows, source)
            found[library] = {**machine.libraries[library], parameter: fitted}
    if "nvrar" in machine.libraries and "between" in links:
        found["nvrar"] = {**machine.libraries["nvrar"], **_fit_nvrar(links, machine, source)}
    return found


def _fit_one(machine: Machine, library: str, parameter: str, group: Shape, rows: list[Row], source: str) -> Quantity:
    """Return the value of one parameter, on which times depend linearly: the median over all sizes."""
    path = f"libraries.{library}.{parameter}"
    at_zero, at_one = (CommModel(machine.with_quantity(path, _exact(x, source)), library) for x in (0.0, 1.0))
    values = []
    for row in rows:
        fixed = at_zero.all_reduce(group, row["bytes"])
        values.append((1e-6 * row["median_us"] - fixed) / (at_one.all_reduce(group, row["bytes"]) - fixed))
    value = max(0.0, median(values))
    return Quantity(value, "measured", source, max(0.0, min(values)), max(value, *values))


def _fit_nvrar(links: dict[str, Any], machine: Machine, source: str) -> Parameters:
    """Convert the links that `yalis bench allreduce` fits to pairs of ranks into costs of puts."""
    share = machine.nics_per_node / machine.gpus_per_node
    found = {"launch_s": _measured(links["fixed"], source), "put_s": _measured(links["between"]["latency"], source)}
    rates = {"net_efficiency": ("between", float(machine.nic_bytes_per_s) * share)}
    if "inside" in links:
        found["intra_hop_s"] = _measured(links["inside"]["latency"], source)
        rates["intra_efficiency"] = ("inside", float(machine.intra_bytes_per_s))
    for name, (link, rate) in rates.items():
        if seconds_per_byte := links[link]["seconds_per_byte"]:
            found[name] = _measured(1 / (seconds_per_byte * rate), source)
    return found


def _measured(value: float, source: str) -> Quantity:
    return Quantity(value, "measured", source, value * (1 - _SPREAD), value * (1 + _SPREAD))


def _exact(value: float, source: str) -> Quantity:
    return Quantity(value, "specification", source, value, value)
