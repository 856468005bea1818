"""The all-reduce benchmark on the hosts of a lab, with every algorithm of Open MPI for comparison.

`python -m yalis.study.allreduce.in_lab PLAN FILE` runs one rank. Rank 0 prints its progress line by line, and writes
the result or the error to FILE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.launch.launchers import process_rank
from yalis.study import results
from yalis.study.allreduce.benchmark import AllReducePlan, Report, measure
from yalis.study.lab.hosts import Lab, missing
from yalis.study.lab.ranks import mpi_missing, mpi_version, running_ranks
from yalis.study.results import Row
from yalis.study.results.kinds.allreduce import PLAIN_GLOO, add_speedups

MODULE = "yalis.study.allreduce.in_lab"
#: Algorithms of Open MPI and their numbers in coll_tuned_allreduce_algorithm. Each needs its own mpirun.
MPI_ALGORITHMS = {"recursive doubling": 3, "ring": 4, "segmented ring": 5, "Rabenseifner": 6}


@dataclass(frozen=True)
class LabPlan:
    hosts: int = 4
    ranks_per_host: int = 2
    delays: tuple[float, ...] = (1e-3,)  # seconds, one-way; each is measured in its own lab
    rate: float | None = None  # bits per second

    def __post_init__(self) -> None:
        if self.hosts < 2 or self.ranks_per_host < 1:
            raise YalisError(
                f"--hosts is {self.hosts} and --ranks-per-host {self.ranks_per_host}; give at least 2 hosts and 1 rank"
            )


def measure_in_lab(plan: AllReducePlan, lab_plan: LabPlan, command: str, report: Report) -> results.Result:
    """Measure the plan once per delay. Returns all rows as one result."""
    if plan.tune and len(lab_plan.delays) > 1:
        raise YalisError("--tune saves the times of one network; give a single --delay")
    if plan.ranks_per_node is not None:
        raise YalisError(
            "--ranks-per-node divides the ranks of one machine, and --hosts creates hosts; give one of them"
        )
    if reason := missing():
        raise YalisError(reason)
    if plan.device not in ("auto", "cpu"):
        raise YalisError(f"--device is {plan.device}, but the hosts of a lab only use CPUs; leave it out")
    plan = replace(plan, device="cpu", backends=_choose_backends(plan))
    rows: list[Row] = []
    networks, notes, links, first = [], [], [], None
    for delay in lab_plan.delays:
        delay_rows: list[Row] = []
        with Lab(lab_plan.hosts, delay, lab_plan.rate) as lab:
            networks.append(lab.network)
            for algorithm, launch_plan in _list_launches(plan):
                found = _launch(lab, lab_plan.ranks_per_host, launch_plan, algorithm, report)
                first = first or found
                if not algorithm:
                    links += [{**link, "delay_us": 1e6 * delay} for link in found["parameters"]["links"]]
                for row in found["rows"]:
                    row["delay_us"] = 1e6 * delay
                    if algorithm:
                        row["options"] = {"algorithm": algorithm}
                delay_rows += found["rows"]
        # Keep all rows of one size together, whichever launch measured them.
        rows += sorted(delay_rows, key=lambda row: (plan.dtypes.index(row["dtype"]), plan.sizes.index(row["bytes"])))
        if lab.dropped:
            notes.append(f"the switch with {1e3 * delay:g} ms dropped {lab.dropped} frames, which TCP sent again")
    assert first is not None
    parameters = {**first["parameters"], **asdict(plan), "lab": {**asdict(lab_plan), "networks": networks}}
    parameters["links"] = links
    if "mpi" in plan.backends:
        parameters["mpi"] = mpi_version()
    rows = add_speedups(rows, plan.baseline)
    return results.new("allreduce", parameters, rows, command, first["devices"], notes, first["topology"])


def _choose_backends(plan: AllReducePlan) -> tuple[str, ...]:
    """Return the backends of the plan, by default all that work on the hosts of a lab."""
    if plan.backends:
        return plan.backends
    mpi = () if mpi_missing() else ("mpi",)
    return ("torch", "hierarchical", *mpi) if plan.tune else (PLAIN_GLOO, "torch", "hierarchical", *mpi, "auto")


def _list_launches(plan: AllReducePlan) -> list[tuple[str, AllReducePlan]]:
    """Return one launch with all backends, where MPI picks its algorithm, then one per algorithm of MPI."""
    launches = [("", plan)]
    if "mpi" in plan.backends and not plan.tune:
        launches += [(algorithm, replace(plan, backends=("mpi",))) for algorithm in MPI_ALGORITHMS]
    return launches


def _launch(lab: Lab, per_host: int, plan: AllReducePlan, algorithm: str, report: Report) -> dict[str, Any]:
    """Run the ranks of one launch. Returns the result as a JSON object."""
    mpi: Sequence[str] | None = () if "mpi" in plan.backends else None
    if algorithm:
        number = str(MPI_ALGORITHMS[algorithm])
        mpi = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", number]
    label = f"{1e3 * lab.delay:g} ms{algorithm and ', mpi ' + algorithm}"
    report(f"{label}: starting ranks")
    with TemporaryDirectory(prefix="yalis-lab-") as folder:
        result_file = Path(folder) / "result.json"
        command = [sys.executable, "-m", MODULE, json.dumps(asdict(plan)), str(result_file)]
        with running_ranks(lab, per_host, command, mpi) as (process, errors):
            assert process.stdout is not None
            for line in process.stdout:
                report(f"{label}: {line.strip()}")
            process.wait()
            if not result_file.exists():
                errors.seek(0)
                last = " / ".join([line.strip() for line in errors if line.strip()][-3:])
                raise YalisFailure(f"the ranks in the lab ended without a result: {last or 'no error output'}")
        found: dict[str, Any] = json.loads(result_file.read_text())
    if "error" in found:
        raise (YalisError if found["status"] == YalisError.exit_code else YalisFailure)(found["error"])
    return found


def main() -> int:
    plan, file = sys.argv[1:]
    try:
        result = measure(AllReducePlan.from_json(json.loads(plan)), None, "", _report)
        if result is not None:
            _write(Path(file), asdict(result))
    except YalisError as error:
        if process_rank() == 0:
            _write(Path(file), {"error": str(error), "status": error.exit_code})
        return error.exit_code
    return 0


def _write(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(values))
    partial.replace(path)


def _report(text: str) -> None:
    if process_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
