"""A pairwise cover of the fault matrix, and some other cases. `make faults` runs all cases."""

from __future__ import annotations

import pytest

from tests.faults.cases import HOSTS, Case, cover
from tests.faults.run import Limits, Outcome, Runner
from tests.launchers.launch import make_model
from yalis.study.lab.hosts import missing

# Not in the cover: ranks that rank 0 started, and network faults.
OTHERS = [
    Case("kill", "decode", "tp2", 0),
    Case("sigstop", "decode", "tp2", 1),
    Case("silent-host", "decode", "tp2-hosts", 1),
    Case("link-down", "load", "tp2-hosts", 0),
]
CASES = [*cover(), *OTHERS]
LIMITS = Limits(step_timeout=6, join_timeout=5)
NO_HOSTS = missing()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Return the outcome of every case, run in parallel because most of them wait for a timeout."""
    folder = tmp_path_factory.mktemp("faults")
    runner = Runner(folder, make_model(folder), LIMITS, report=lambda outcome: None)
    chosen = [case for case in CASES if not (NO_HOSTS and case.start == HOSTS)]
    return {outcome.case: outcome for outcome in runner.run(chosen, jobs=6)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_job_ends_and_names_the_culprit(case: Case, outcomes: dict[Case, Outcome]) -> None:
    if NO_HOSTS and case.start == HOSTS:
        pytest.skip(NO_HOSTS)
    outcome = outcomes[case]
    assert not outcome.problems, f"{outcome.seconds} s after the fault; printed:\n{outcome.errors}"


def test_the_cover_has_every_fault_in_every_phase() -> None:
    faults = {case.fault for case in CASES}
    assert len(faults) == 8
    assert len({(case.fault, case.phase) for case in cover()}) == 6 * 5 + 4 * 2
