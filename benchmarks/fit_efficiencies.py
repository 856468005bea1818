"""Fit yalis/planner/efficiencies/h200.json to the calibration rows named below, and print the errors of all rows.

usage: python benchmarks/fit_efficiencies.py [--write]
The other rows of the results are validation: they are predicted and printed, and never used for the fit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from yalis.kernels.gpu_limits import GpuLimits
from yalis.planner.efficiency import Efficiencies
from yalis.planner.kernel_times import KernelTimes
from yalis.planner.machine import Machine, load_machine
from yalis.study import planner_accuracy, results
from yalis.study.results import StoredResult

FOLDER = Path("benchmarks/results/h200")
TABLE = Path("yalis/planner/efficiencies/h200.json")
#: (result, split, workload): phases
CALIBRATION = {
    ("latency-llama-3.1-8b-alone", "1x1x1", "1x128x257"): ("first token", "decode step"),
    ("latency-llama-3.1-8b-alone", "1x1x1", "16x128x257"): ("decode step",),
    ("latency-llama-3.1-8b-alone", "1x1x1", "64x512x257"): ("first token", "decode step"),
    ("latency-llama-3.1-8b-batches", "1x1x1", "2x128x33"): ("first token",),
    ("latency-llama-3.1-8b-batches", "1x1x1", "8x128x33"): ("first token",),
    ("latency-llama-3.1-8b-batches", "1x1x1", "16x128x33"): ("first token",),
    ("latency-llama-3.1-8b-batches", "1x1x1", "96x128x33"): ("decode step",),
    ("latency-llama-3.1-8b-batches", "1x1x1", "128x128x33"): ("decode step",),
    ("latency-llama-3.1-8b-batches", "1x1x1", "256x128x33"): ("decode step",),
    ("latency-llama-3.1-8b-contexts", "1x1x1", "1x16384x33"): ("first token", "decode step"),
    ("latency-llama-3.1-8b-contexts", "1x1x1", "1x65536x33"): ("first token",),
    ("latency-llama-3.1-8b-contexts", "1x1x1", "16x4096x33"): ("decode step",),
    ("latency-llama-3.2-1b", "1x1x1", "16x128x129"): ("first token",),
    ("latency-qwen3-4b", "1x1x1", "1x128x129"): ("decode step",),
    ("slice-llama-3.1-70b", "4x1x1", "16x128x33"): ("decode step",),
    ("slice-llama-3.1-70b", "8x1x1", "16x128x33"): ("first token",),
    ("slice-llama-3.1-70b", "32x1x1", "1x128x33"): ("first token", "decode step"),
    ("slice-llama-3.1-70b", "32x1x1", "16x128x33"): ("first token",),
    ("slice-llama-3.1-70b", "32x1x1", "64x128x33"): ("decode step",),
    ("slice-llama-3.1-70b", "32x1x1", "16x2480x33"): ("first token",),
    ("slice-llama-3.1-405b", "8x1x1", "1x128x33"): ("first token", "decode step"),
    ("slice-llama-3.1-405b", "8x1x1", "64x128x33"): ("first token", "decode step"),
    ("slice-llama-3.1-405b", "8x1x1", "16x2480x33"): ("decode step",),
    ("slice-llama-3.1-405b", "32x1x1", "1x128x33"): ("decode step",),
}
#: Fitted to the host time of a throughput run instead, of which the rows above have no part.
FROM_THROUGHPUT = {"host_mixed_layer_s"}
KERNEL_WEIGHT = 0.5  # of a row of kernels.json, relative to a step
PRIOR = 0.02  # weight of the starting values: keeps parameters that the rows do not determine where they were


def calibration_rows() -> list[dict[str, str]]:
    return [
        {"source": source, "split": split, "workload": workload, "phase": phase}
        for (source, split, workload), phases in CALIBRATION.items()
        for phase in phases
    ]


def predict_kernel(row: dict, kernels: KernelTimes) -> float | None:
    """Predict a row of kernels.json; None for kernels that are parts of others here."""
    name, rows, shape = row["kernel"], row["rows"], row["shape"]
    if name.startswith("linear"):
        n, k = map(int, shape.split()[1].split("x"))
        gated = "gate" in name
        return None if "gate_up" in shape and not gated else kernels.linear(rows, n, k, gated)
    if name in ("norm", "add, norm"):
        return kernels.norm(rows, 4096, 2 if name == "norm" else 4)
    if name == "gate":
        return kernels.elementwise(rows, 28672 + 14336)
    if name == "rope, write":
        return kernels.elementwise(rows, 2 * 6144)
    if name == "attention":
        return kernels.decode_attention([(rows, 1024)], 32, 8, 128)
    if name == "prompt attention":
        return kernels.prefill_attention([(0, 2048)] * 4, 32, 8, 128)
    return None


class Fit:
    def __init__(self, table: Efficiencies, machine: Machine) -> None:
        stored = [
            StoredResult(FOLDER / f"{name}.json", results.read(FOLDER / f"{name}.json")) for name in table.results
        ]
        self.table, self.machine = table, machine
        self.points = planner_accuracy.read_points(stored)
        used = {tuple(row.values()) for row in calibration_rows()}
        self.calibration = [point for point in self.points if point.key in used]
        assert len(self.calibration) == len(used), "a calibration row is missing"
        self.kernels = results.read(FOLDER / "kernels.json")
        fitted = {name for name, one in table.parameters.items() if one.origin == "fitted"}
        self.names = sorted(fitted - FROM_THROUGHPUT)
        self.start = np.log([table[name] for name in self.names])

    def residuals(self, logs: np.ndarray) -> np.ndarray:
        table = self.table.with_values(dict(zip(self.names, np.exp(logs).tolist(), strict=True)))
        facts = self.kernels.parameters
        kernels = KernelTimes(
            table, facts["read_bytes_per_s"], facts["matmul_flops_per_s"], GpuLimits(132, 227 << 10, True), 2
        )
        errors = [
            KERNEL_WEIGHT * np.log(predicted * 1e6 / row["us"])
            for row in self.kernels.rows
            if (predicted := predict_kernel(row, kernels)) is not None
        ]
        errors += [
            np.log(planner_accuracy.predict(point, self.machine, table) / point.measured) for point in self.calibration
        ]
        return np.array([*errors, *(PRIOR * (logs - self.start))])

    def run(self, rounds: int = 25) -> Efficiencies:
        """Minimise the squared relative errors (Levenberg-Marquardt)."""
        logs, damping = self.start.copy(), 1e-2
        now = self.residuals(logs)
        for _ in range(rounds):
            jacobian = np.stack(
                [(self.residuals(logs + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(logs))], axis=1
            )
            for _ in range(6):
                normal = jacobian.T @ jacobian + damping * np.eye(len(logs))
                step = np.clip(np.linalg.solve(normal, -jacobian.T @ now), -0.5, 0.5)
                new = self.residuals(logs + step)
                if new @ new < now @ now:
                    break
                damping *= 4
            else:
                break
            gain = now @ now - new @ new
            logs, now, damping = logs + step, new, damping / 3
            if gain < 1e-6:
                break
        return self.table.with_values(dict(zip(self.names, np.exp(logs).tolist(), strict=True)))


def main() -> None:
    data = json.loads(TABLE.read_text()) | {"calibration": calibration_rows()}
    fit = Fit(Efficiencies.from_json(data, "h200"), load_machine("h200"))
    fitted = fit.run()
    predictions = planner_accuracy.predict_all(fit.points, fit.machine, fitted)
    rows = [planner_accuracy.make_row(one.point, one.seconds, "yalis", one.calibration) for one in predictions]
    result = results.new("accuracy", {"predictor": "fit", "machine": "h200"}, rows, "", fit.kernels.devices)
    lines = [*results.kind_of(result).text(result), *(f"{name:24} {fitted[name]:.4g}" for name in fit.names)]
    sys.stdout.write("\n".join(lines) + "\n")
    if "--write" in sys.argv:
        for name in fit.names:
            data["parameters"][name]["value"] = float(f"{fitted[name]:.4g}")
        chosen = [abs(one.error) for one in predictions if not one.calibration]
        data["error"] = round(sorted(chosen)[int(0.9 * len(chosen))], 3)
        TABLE.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
