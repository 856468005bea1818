"""Environments as the launchers make them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from yalis.errors import YalisError
from yalis.launch.environment import Place, find_place
from yalis.launch.join import join
from yalis.launch.local import LocalRanks
from yalis.launch.meeting import _known_meeting, find_meeting, ports_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BATCH = {  # the shell of a batch script: an allocation, and no rank
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node01-99@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "kvs_1"}
OWN = {
    "YALIS_RANK": "1",
    "YALIS_SIZE": "3",
    "YALIS_ADDRESS": "127.0.0.1",
    "YALIS_PORT": "4711",
    "YALIS_JOB": "yalis pid 9",
    "YALIS_SECRET": "abc",
    "YALIS_PARENT": "9",
}


def test_no_launcher() -> None:
    assert find_place({}) == Place() == find_place({"RANK": "3"}) == find_place({"WORLD_SIZE": "2"})
    assert Place().size == 1


def test_torchrun() -> None:
    place = find_place(TORCHRUN)
    assert place == Place("torchrun", 5, 8, 1, 4, "node01", 29400, job="torchrun none restart 2", store=True)
    assert not place.one_machine
    assert not find_place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store


def test_torchruns_variables_set_by_hand() -> None:
    place = find_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert (place.launcher, place.store, place.address, place.port) == ("torchrun", False, "10.0.0.1", 5000)
    meeting = find_meeting(place, 1)
    assert (meeting.host, meeting.ports) == ("10.0.0.1", (5000,))
    with pytest.raises(YalisError, match="set MASTER_ADDR"):
        find_meeting(find_place({"RANK": "1", "WORLD_SIZE": "2"}), 1)


def test_srun() -> None:
    place = find_place(SRUN)
    assert place == Place("srun", 6, 8, 2, 4, "node01", None, job="srun 77.3")
    everyone = [find_place({**SRUN, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 4)}) for r in range(8)]
    assert {_known_meeting(other).ports for other in everyone} == {ports_of("srun 77.3")}
    given = find_place({**SRUN, "MASTER_ADDR": "ib-node01", "MASTER_PORT": "1234"})
    assert (given.address, given.port) == ("ib-node01", 1234)


def test_srun_on_one_node() -> None:
    step = {"SLURM_STEP_NODELIST": "node02", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    place = find_place({**SRUN, **step, "SLURM_LOCALID": "6"})
    assert place.one_machine
    assert place.address == "127.0.0.1"


def test_a_batch_script_is_no_launcher() -> None:
    assert find_place(BATCH) == Place()
    assert find_place({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "8"}) == Place()


def test_open_mpi() -> None:
    place = find_place(OPEN_MPI)
    assert place == Place("mpirun", 3, 4, 1, 2, job="mpirun prterun-node01-99@1")
    given = find_place({**OPEN_MPI, "MASTER_ADDR": "node01", "MASTER_PORT": "5000"})
    assert find_meeting(given, 1).ports == (5000,)


def test_open_mpi_on_one_machine() -> None:
    place = find_place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    meeting = find_meeting(place, 1)
    assert (meeting.host, meeting.ports) == ("127.0.0.1", ports_of("mpirun prterun-node01-99@1"))


def test_open_mpi_on_several_machines_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(YalisError, match="-x MASTER_ADDR=HOST -x MASTER_PORT=PORT"):
        find_meeting(find_place(OPEN_MPI), 1)


def test_mpich() -> None:
    assert find_place(MPICH) == Place("mpirun", 1, 2, 1, 2, job="mpirun kvs_1")


def test_srun_that_speaks_pmi_is_srun() -> None:
    assert find_place({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8"}) == find_place(SRUN)


def test_our_own_ranks() -> None:
    assert find_place(OWN) == Place("yalis", 1, 3, 1, 3, "127.0.0.1", 4711, "yalis pid 9", "abc", parent=9)


def test_the_inner_launcher_counts() -> None:
    assert find_place({**SRUN, **OPEN_MPI}).launcher == "mpirun"
    assert find_place({**SRUN, **MPICH}).launcher == "mpirun"
    assert find_place({**SRUN, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert find_place({**SRUN, **OPEN_MPI, **TORCHRUN, **OWN}).launcher == "yalis"


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a"},
    ],
)
def test_a_launcher_with_one_rank_counts_as_none(variables: dict[str, str]) -> None:
    assert find_place(variables) == Place()


def test_what_cannot_be() -> None:
    with pytest.raises(YalisError, match="rank 9 of 8"):
        find_place({**TORCHRUN, "RANK": "9"})


def test_ports_follow_from_the_job() -> None:
    assert ports_of("srun 1.0") == ports_of("srun 1.0") != ports_of("srun 1.1")
    assert len(set(ports_of("srun 1.0"))) > 4
    assert all(20000 <= port < 32000 for port in ports_of("srun 1.0"))


def test_the_wrong_size_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(YalisError, match=r"split over 4 ranks and srun started 8; type srun -n 4 .*product is 8"):
        join(4, ["unused"])


def test_a_world_of_one_has_no_socket_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**SRUN, **OPEN_MPI, **TORCHRUN, **OWN, **MPICH}:
        monkeypatch.delenv(name, raising=False)
    world = join(1, ["unused"])
    assert (world.rank, world.size, world.failure, world.exchange({"a": 1})) == (0, 1, None, [{"a": 1}])
    assert world.links(0) == {}
    assert world.explain(RuntimeError()) is None
    world.phase = "running"
    world.close()


def test_local_ranks_do_not_inherit_a_launchers_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TORCHRUN, **OPEN_MPI}.items():
        monkeypatch.setenv(name, value)
    code = "import os; print(sorted(set(os.environ) & set(os.environ['NAMES'].split(','))), os.environ['YALIS_RANK'])"
    names = ",".join([*TORCHRUN, *OPEN_MPI])
    ranks = LocalRanks([sys.executable, "-c", code], [7], {"NAMES": names})
    assert ranks.ended(7, 20) == "exit status 0"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "['MASTER_ADDR', 'MASTER_PORT'] 7\n")  # which a user may have set


def test_a_local_rank_that_does_not_want_to_end_is_ended() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ranks = LocalRanks([sys.executable, "-c", code], [1, 2], {})
    ranks.stop(0.5)
    assert {ranks.ended(1), ranks.ended(2)} <= {"killed by SIGKILL", "killed by SIGTERM"}
    for process in ranks.processes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_torch_is_not_imported() -> None:
    code = "import sys, yalis.launch.join, yalis.launch.serving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
