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
from yalis.study.lab.ranks import mpi_missing, mpi_version, started
from yalis.study.results import Row
from yalis.study.results.kinds.allreduce import PLAIN_GLOO, add_speedups

MODULE = "yalis.study.allreduce.in_lab"
#: Open MPI's own numbers for its ways of doing it. Each needs a launch of its own.
MPI_ALGORITHMS = {"recursive doubling": 3, "ring": 4, "segmented ring": 5, "Rabenseifner": 6}


@dataclass(frozen=True)
class LabPlan:
    hosts: int = 4
    ranks_per_host: int = 2
    delays: tuple[float, ...] = (1e-3,)  # seconds, one-way; a lab for each
    rate: float | None = None  # bits a second

    def __post_init__(self) -> None:
        if self.hosts < 2 or self.ranks_per_host < 1:
            raise YalisError(
                f"--hosts is {self.hosts} and --ranks-per-host {self.ranks_per_host}; give at least 2 hosts and 1 rank"
            )


def measure_in_lab(plan: AllReducePlan, lab_plan: LabPlan, command: str, report: Report) -> results.Result:
    if plan.tune and len(lab_plan.delays) > 1:
        raise YalisError("--tune keeps the times of one network; give one --delay")
    if plan.ranks_per_node is not None:
        raise YalisError("--ranks-per-node cuts one machine into nodes, and --hosts makes hosts; give one of them")
    if reason := missing():
        raise YalisError(reason)
    if plan.device not in ("auto", "cpu"):
        raise YalisError(f"--device is {plan.device}, and the hosts of a lab have CPUs; leave it out")
    plan = replace(plan, device="cpu", backends=_backends(plan))
    rows: list[Row] = []
    networks, notes, links, first = [], [], [], None
    for delay in lab_plan.delays:
        here: list[Row] = []
        with Lab(lab_plan.hosts, delay, lab_plan.rate) as lab:
            networks.append(lab.network)
            for algorithm, part in _launches(plan):
                found = _launch(lab, lab_plan.ranks_per_host, part, algorithm, report)
                first = first or found
                if not algorithm:
                    links += [{**link, "delay_us": 1e6 * delay} for link in found["parameters"]["links"]]
                for row in found["rows"]:
                    row["delay_us"] = 1e6 * delay
                    if algorithm:
                        row["options"] = {"algorithm": algorithm}
                here += found["rows"]
        # All ways of one setting together, in whichever launch they were measured.
        rows += sorted(here, key=lambda row: (plan.dtypes.index(row["dtype"]), plan.sizes.index(row["bytes"])))
        if lab.dropped:
            notes.append(f"the switch with {1e3 * delay:g} ms dropped {lab.dropped} frames, which were sent again")
    assert first is not None
    parameters = {**first["parameters"], **asdict(plan), "lab": {**asdict(lab_plan), "networks": networks}}
    parameters["links"] = links
    if "mpi" in plan.backends:
        parameters["mpi"] = mpi_version()
    rows = add_speedups(rows, plan.baseline)
    return results.new("allreduce", parameters, rows, command, first["devices"], notes, first["topology"])


def _backends(plan: AllReducePlan) -> tuple[str, ...]:
    """Those asked for, else those of the plan's kind that can be there."""
    if plan.backends:
        return plan.backends
    mpi = () if mpi_missing() else ("mpi",)
    return ("torch", "hierarchical", *mpi) if plan.tune else (PLAIN_GLOO, "torch", "hierarchical", *mpi, "auto")


def _launches(plan: AllReducePlan) -> list[tuple[str, AllReducePlan]]:
    """All backends in one job, MPI as it chooses; then MPI alone with each algorithm it has."""
    launches = [("", plan)]
    if "mpi" in plan.backends and not plan.tune:
        launches += [(algorithm, replace(plan, backends=("mpi",))) for algorithm in MPI_ALGORITHMS]
    return launches


def _launch(lab: Lab, per_host: int, plan: AllReducePlan, algorithm: str, report: Report) -> dict[str, Any]:
    mpi: Sequence[str] | None = () if "mpi" in plan.backends else None
    if algorithm:
        number = str(MPI_ALGORITHMS[algorithm])
        mpi = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", number]
    where = f"{1e3 * lab.delay:g} ms{algorithm and ', mpi ' + algorithm}"
    report(f"{where}: starting ranks")
    with TemporaryDirectory(prefix="yalis-lab-") as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", MODULE, json.dumps(asdict(plan)), str(told)]
        with started(lab, per_host, command, mpi) as (process, errors):
            assert process.stdout is not None
            for line in process.stdout:
                report(f"{where}: {line.strip()}")
            process.wait()
            if not told.exists():
                errors.seek(0)
                last = " / ".join([line.strip() for line in errors if line.strip()][-3:])
                raise YalisFailure(f"the ranks in the lab ended without a result: {last or 'they said nothing'}")
        found: dict[str, Any] = json.loads(told.read_text())
    if "error" in found:
        raise (YalisError if found["status"] == YalisError.exit_code else YalisFailure)(found["error"])
    return found


def main() -> int:
    plan, told = sys.argv[1:]
    try:
        result = measure(AllReducePlan.from_json(json.loads(plan)), None, "", _report)
        if result is not None:
            _write(Path(told), asdict(result))
    except YalisError as error:
        if process_rank() == 0:
            _write(Path(told), {"error": str(error), "status": error.exit_code})
        return error.exit_code
    return 0


def _write(path: Path, values: dict[str, Any]) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(values))
    whole.replace(path)


def _report(text: str) -> None:
    if process_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
