"""Measures the machine one is on, as a machine file of the planner.

Device rates come from `bandwidth.py`, links and libraries from the all-reduce benchmark. What cannot be measured here,
such as a network with ranks on one host only, is taken from another machine, and the file says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from yalis import machine as software
from yalis.engine.device import resolve_device
from yalis.errors import YalisError
from yalis.kernels.gpu_limits import gpu_limits
from yalis.launch.launchers import detect_launcher
from yalis.perfmodel.collectives import Shape
from yalis.planner.machine import Gpu, Machine, load_machine
from yalis.planner.quantity import Quantity
from yalis.study import bandwidth
from yalis.study.allreduce import benchmark
from yalis.study.calibration import fit_libraries
from yalis.study.results.result import Result
from yalis.study.topology import shape_of

#: Where values come from that are not measured, if no machine is named.
_DEFAULT_BASE = {"cuda": "h200-ib", "cpu": "lab"}
#: Nodes that a plan may use if a network was measured.
_MAX_NODES = 128
_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
_REPEATS = 18


@dataclass(frozen=True)
class CalibrationPlan:
    name: str = "this-machine"
    base: str = ""  # the machine whose values are used where nothing can be measured
    ranks: int | None = None  # to start here; None: those of the launcher, or one
    device: str = "auto"
    ranks_per_node: int | None = None
    insecure_rendezvous: bool = False


def calibrate(
    plan: CalibrationPlan, result: Result | None, source: str, command: str, report: Callable[[str], None]
) -> Machine | None:
    """Measure this machine. Returns None on all ranks except rank 0.

    `result` is an all-reduce result that was measured before, and `source` names it; None: measure one, if there are
    several ranks."""
    device = resolve_device("cuda" if plan.device == "auto" and torch.cuda.is_available() else plan.device)
    base = load_machine(plan.base or _DEFAULT_BASE[device.type])
    ranks = plan.ranks if plan.ranks is not None else detect_launcher().size
    if ranks < 1:
        raise YalisError(f"--ranks is {ranks}; give a whole number of at least 1")
    if result is None and ranks > 1:
        allreduce = benchmark.AllReducePlan(
            sizes=_SIZES, repeats=_REPEATS, device=device.type, ranks_per_node=plan.ranks_per_node,
            equal_nodes=True,
        )  # fmt: skip
        result = benchmark.measure(allreduce, plan.ranks, command, report, plan.insecure_rendezvous)
        if result is None:
            return None
    report("rates of the device")
    rates = bandwidth.measure_rates(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return describe(plan, base, device, rates, result, source)


def describe(
    plan: CalibrationPlan,
    base: Machine,
    device: torch.device,
    rates: bandwidth.DeviceRates,
    result: Result | None,
    source: str,
) -> Machine:
    """Return the machine with these measurements; all other values are those of `base`."""
    group = shape_of(result.parameters["nodes"]) if result is not None else Shape(1, 1)
    reason = _reason(result, group)
    unmeasured = _Unmeasured(base, named=bool(plan.base), reason=reason)
    links = _first_links(result)
    several = bool(plan.base) or group.size > 1
    made = Machine(
        name=plan.name,
        description=f"{_device_name(device)}, measured by `yalis calibrate` on {group.nodes} x {group.ranks_per_node}",
        gpu=_gpu(base, device, rates, group),
        gpus_per_node=group.ranks_per_node if result is not None else base.gpus_per_node if plan.base else 1,
        max_nodes=_max_nodes(plan, base, group),
        intra_bytes_per_s=_rate(links, "inside", source) or unmeasured.quantity(base.intra_bytes_per_s),
        nic_bytes_per_s=_rate(links, "between", source) or unmeasured.quantity(base.nic_bytes_per_s),
        nics_per_node=_nics(base, device, group, named=bool(plan.base)),
        libraries={name: unmeasured.quantities(one) for name, one in base.libraries.items()} if several else {},
        host=unmeasured.quantities(base.host),
    )
    if result is None:
        return made
    delay = result.parameters["links"][0]["delay_us"] if result.parameters["links"] else None
    return replace(made, libraries={**made.libraries, **fit_libraries(result, made, source, delay)})


@dataclass(frozen=True)
class _Unmeasured:
    """Takes values from another machine, and says why they were not measured."""

    base: Machine
    named: bool  # whether the user named that machine
    reason: str

    def quantity(self, value: Quantity) -> Quantity:
        """Return a value of a named machine as it is, and that of the default one as an assumption."""
        if self.named:
            return replace(value, source=f"machine {self.base.name}: {value.source}")
        text = f"not measured ({self.reason}); the value of machine {self.base.name}"
        return replace(value, origin="assumed", source=text)

    def quantities(self, values: Mapping[str, Quantity]) -> dict[str, Quantity]:
        return {name: self.quantity(one) for name, one in values.items()}


def _reason(result: Result | None, group: Shape) -> str:
    if result is None:
        return "only one rank"
    return "only one node" if group.nodes == 1 else "the all-reduce benchmark does not show it"


def _gpu(base: Machine, device: torch.device, rates: bandwidth.DeviceRates, group: Shape) -> Gpu:
    """Return the device of one rank. The ranks of a node share a CPU, but have a GPU each."""
    text = f"`yalis calibrate`: {rates.read_by}"
    limits: dict[str, Any] = {}
    if device.type == "cuda":
        memory, share = torch.cuda.get_device_properties(device).total_memory, 1
        found = gpu_limits(device)
        limits = {"num_sms": found.num_sms, "has_tma": found.has_tma}
        limits["shared_memory_kib"] = found.max_shared_memory >> 10
    else:
        memory, share = int(software.host()["memory_gib"] * 2**30), group.ranks_per_node
        text += f", divided by {share} ranks of a node" if share > 1 else ""
    return Gpu(
        _device_name(device),
        memory_bytes=Quantity.of(memory / share, "measured", "`yalis calibrate`"),
        read_bytes_per_s=Quantity.of(rates.read_bytes_per_s / share, "measured", text),
        matmul_flops_per_s=Quantity.of(rates.matmul_flops_per_s / share, "measured", "`yalis calibrate`: large matmul"),
        efficiencies=base.gpu.efficiencies,
        **limits,
    )


def _device_name(device: torch.device) -> str:
    return str(bandwidth.describe_device(device)["name"])


def _max_nodes(plan: CalibrationPlan, base: Machine, group: Shape) -> int:
    if group.nodes > 1:
        return max(group.nodes, base.max_nodes if plan.base else _MAX_NODES)
    return base.max_nodes if plan.base else 1


def _nics(base: Machine, device: torch.device, group: Shape, named: bool) -> int:
    """Return the NICs of a node: those of the named machine, else one per GPU, and one for a CPU."""
    if named:
        return base.nics_per_node
    return group.ranks_per_node if device.type == "cuda" else 1


def _first_links(result: Result | None) -> dict[str, Any]:
    return result.parameters["links"][0] if result is not None and result.parameters["links"] else {}


def _rate(links: Mapping[str, Any], name: str, source: str) -> Quantity | None:
    """Return the bytes per second of a measured link; None if it was not measured or its bytes cost nothing."""
    seconds_per_byte = links.get(name, {}).get("seconds_per_byte", 0.0)
    return Quantity.of(1 / seconds_per_byte, "measured", source) if seconds_per_byte > 0 else None
