"""Fits the efficiency table of a CPU to latency results, so that predictions can follow the machine at hand.

The table that comes with yalis was measured on another CPU. A few latency points (prompts of several lengths; decode
steps of one and of many sequences, with short and long contexts) determine its main parameters in a minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from yalis.errors import YalisError
from yalis.planner.efficiency import Efficiencies, load_efficiencies
from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity
from yalis.study.planner_accuracy import Point, predict, read_points
from yalis.study.results import StoredResult

#: Parameters of planner/cpu_times.py that latency points show. The others keep their values.
_FITTED = (
    "linear_eff", "native_eff", "gemm_eff", "attention_eff", "prefill_attention_eff", "layer_s", "eager_layer_s",
)  # fmt: skip
#: Weight of a parameter's distance to its start, against 1 of a relative error: it decides what points do not show.
_PRIOR = 0.02
_ROUNDS = 30


def fit_cpu(sources: Sequence[StoredResult], machine: Machine) -> tuple[Machine, Efficiencies]:
    """Return the machine with the rates of the first result, and its efficiency table fitted to all of them."""
    table = load_efficiencies(machine.gpu.efficiencies)
    if table.device != "cpu":
        raise YalisError(
            f"--calibration fits the table of a CPU, but {machine.name} has GPUs, whose table is fitted by "
            "benchmarks/fit_efficiencies.py; omit --calibration"
        )
    points = [point for point in read_points(sources) if not point.excluded]
    rates: dict[str, Any] = {
        name: Quantity.of(getattr(points[0], name), "measured", points[0].source)
        for name in ("read_bytes_per_s", "matmul_flops_per_s")
    }
    # All shares are relative to the same rates, whatever each result measured.
    points = [replace(point, **{name: one.value for name, one in rates.items()}) for point in points]
    return replace(machine, gpu=replace(machine.gpu, **rates)), _fit(points, machine, table)


def _fit(points: Sequence[Point], machine: Machine, table: Efficiencies) -> Efficiencies:
    """Minimise the squared relative errors, with parameters as logarithms (Levenberg-Marquardt)."""
    import numpy as np

    start = np.log([table[name] for name in _FITTED])

    def with_logs(logs: Any) -> Efficiencies:
        return table.with_values(dict(zip(_FITTED, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: Any) -> Any:
        fitted = with_logs(logs)
        errors = [math.log(predict(point, machine, fitted) / point.measured) for point in points]
        return np.array([*errors, *(_PRIOR * (logs - start))])

    logs, now, damping = start, residuals(start), 1e-2
    for _ in range(_ROUNDS):
        jacobian = np.stack([(residuals(logs + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(logs))], axis=1)
        normal = jacobian.T @ jacobian + damping * np.eye(len(logs))
        step = np.clip(np.linalg.solve(normal, -jacobian.T @ now), -0.5, 0.5)
        new = residuals(logs + step)
        if new @ new < now @ now:
            logs, now, damping = logs + step, new, damping / 3
        else:
            damping *= 4
    return with_logs(logs)
