"""Detecting launchers from the environment variables they set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from yalis.errors import YalisError
from yalis.launch.endpoint import derive_endpoint, derive_ports, find_endpoint
from yalis.launch.join import join
from yalis.launch.launchers import LaunchInfo, detect_launcher, launch_command, process_rank
from yalis.launch.local import LocalRanks

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
BATCH = {  # a batch script: it has an allocation, but is not a rank
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
    "YALIS_SECRET": "0123456789abcdef",
    "YALIS_PARENT": "9",
}


def test_no_launcher() -> None:
    assert detect_launcher({}) == LaunchInfo() == detect_launcher({"RANK": "3"}) == detect_launcher({"WORLD_SIZE": "2"})
    assert LaunchInfo().size == 1


def test_torchrun() -> None:
    info = detect_launcher(TORCHRUN)
    assert info == LaunchInfo("torchrun", 5, 8, 1, 4, "node01", 29400, job="torchrun none restart 2", has_store=True)
    assert not info.single_host
    assert not detect_launcher({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).has_store


def test_torchrun_variables_set_by_hand() -> None:
    info = detect_launcher({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert (info.launcher, info.has_store, info.address, info.port) == ("torchrun", False, "10.0.0.1", 5000)
    endpoint, _ = find_endpoint(info, 1)
    assert (endpoint.host, endpoint.ports) == ("10.0.0.1", (5000,))
    assert not info.single_host  # with 2 ranks and no LOCAL_WORLD_SIZE, ranks 0 and 1 must come to the same result
    assert detect_launcher({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}).single_host
    with pytest.raises(YalisError, match="set MASTER_ADDR"):
        find_endpoint(detect_launcher({"RANK": "1", "WORLD_SIZE": "2"}), 1)


def test_srun() -> None:
    info = detect_launcher(SRUN)
    assert info == LaunchInfo("srun", 6, 8, 2, 4, "node01", None, job="srun 77.3", peer="node02")
    all_ranks = [detect_launcher({**SRUN, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 4)}) for r in range(8)]
    assert {derive_endpoint(info).ports for info in all_ranks} == {derive_ports("srun 77.3")}
    given = detect_launcher({**SRUN, "MASTER_ADDR": "ib-node01", "MASTER_PORT": "1234"})
    assert (given.address, given.port) == ("ib-node01", 1234)


def test_srun_on_one_node() -> None:
    step = {"SLURM_STEP_NODELIST": "node02", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    info = detect_launcher({**SRUN, **step, "SLURM_LOCALID": "6"})
    assert info.single_host
    assert info.address == "127.0.0.1"


def test_a_batch_script_is_not_a_launch() -> None:
    assert detect_launcher(BATCH) == LaunchInfo()
    assert detect_launcher({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "8"}) == LaunchInfo()


def test_open_mpi() -> None:
    info = detect_launcher(OPEN_MPI)
    assert info == LaunchInfo("mpirun", 3, 4, 1, 2, job="mpirun prterun-node01-99@1")
    given = detect_launcher({**OPEN_MPI, "MASTER_ADDR": "node01", "MASTER_PORT": "5000"})
    assert find_endpoint(given, 1)[0].ports == (5000,)


def test_open_mpi_on_one_host() -> None:
    info = detect_launcher({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    endpoint, _ = find_endpoint(info, 1)
    assert (endpoint.host, endpoint.ports) == ("127.0.0.1", derive_ports("mpirun prterun-node01-99@1"))


def test_open_mpi_on_several_hosts_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(YalisError, match="-x MASTER_ADDR=HOST -x MASTER_PORT=PORT"):
        find_endpoint(detect_launcher(OPEN_MPI), 1)


def test_mpich() -> None:
    assert detect_launcher(MPICH) == LaunchInfo("mpirun", 1, 2, 1, 2, job="mpirun kvs_1")


def test_srun_with_pmi_variables_is_srun() -> None:
    assert detect_launcher({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8"}) == detect_launcher(SRUN)


def test_ranks_started_by_rank_0() -> None:
    info = detect_launcher(OWN)
    assert info == LaunchInfo("yalis", 1, 3, 1, 3, "127.0.0.1", 4711, "yalis pid 9", parent_pid=9)
    assert OWN["YALIS_SECRET"] not in repr(info)


def test_the_innermost_launcher_is_detected() -> None:
    assert detect_launcher({**SRUN, **OPEN_MPI}).launcher == "mpirun"
    assert detect_launcher({**SRUN, **MPICH}).launcher == "mpirun"
    assert detect_launcher({**SRUN, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert detect_launcher({**SRUN, **OPEN_MPI, **TORCHRUN, **OWN}).launcher == "yalis"


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
    assert detect_launcher(variables) == LaunchInfo()


def test_impossible_ranks_are_refused() -> None:
    with pytest.raises(YalisError, match="rank 9 of 8"):
        detect_launcher({**TORCHRUN, "RANK": "9"})


def test_ports_are_derived_from_the_job_name() -> None:
    assert derive_ports("srun 1.0") == derive_ports("srun 1.0") != derive_ports("srun 1.1")
    assert len(set(derive_ports("srun 1.0"))) > 4
    assert all(20000 <= port < 32000 for port in derive_ports("srun 1.0"))


@pytest.mark.parametrize(
    ("launcher", "short", "placed"),
    [
        ("torchrun", "torchrun --nproc-per-node 6", "torchrun --nnodes 2 --nproc-per-node 4 --no-python"),
        ("mpirun", "mpirun -n 6", "mpirun -n 6"),
        ("srun", "srun -n 6", "srun -N 2 -n 6"),
        ("yalis", "", ""),
        ("", "", ""),
    ],
)
def test_launch_command(launcher: str, short: str, placed: str) -> None:
    assert " ".join(launch_command(launcher, 6)) == short
    assert " ".join(launch_command(launcher, 6, [4, 2])) == placed


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), (TORCHRUN, 5), (SRUN, 6), (OPEN_MPI, 3), (MPICH, 1), ({**SRUN, **OWN}, 1)]
)
def test_process_rank(variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**SRUN, **OPEN_MPI, **TORCHRUN, **OWN, **MPICH}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_rank() == rank


def test_a_wrong_size_is_refused_naming_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(YalisError, match=r"split over 4 ranks and srun started 8; type srun -n 4 .*product is 8"):
        join(4, ["unused"])


def test_a_single_process_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**SRUN, **OPEN_MPI, **TORCHRUN, **OWN, **MPICH}:
        monkeypatch.delenv(name, raising=False)
    world = join(1, ["unused"])
    assert (world.rank, world.size, world.failure, world.all_gather_object({"a": 1})) == (0, 1, None, [{"a": 1}])
    assert world.open_links(0) == {}
    assert world.explain(RuntimeError()) is None
    world.phase = "running"
    world.close()


def test_local_ranks_do_not_inherit_launcher_variables(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TORCHRUN, **OPEN_MPI}.items():
        monkeypatch.setenv(name, value)
    code = "import os; print(sorted(set(os.environ) & set(os.environ['NAMES'].split(','))), os.environ['YALIS_RANK'])"
    names = ",".join([*TORCHRUN, *OPEN_MPI])
    ranks = LocalRanks([sys.executable, "-c", code], [7], {"NAMES": names})
    assert ranks.exit_status(7, 20) == "exit status 0"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "['MASTER_ADDR', 'MASTER_PORT'] 7\n")  # not removed, because a user may have set them


def test_local_ranks_that_ignore_sigterm_are_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    ranks = LocalRanks([sys.executable, "-c", code], [1, 2], {})
    ranks.stop(0.5)
    assert {ranks.exit_status(1), ranks.exit_status(2)} <= {"killed by SIGKILL", "killed by SIGTERM"}
    for process in ranks.processes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        ("yalis.launch.join, yalis.launch.serving", {"torch"}),
        ("yalis.launch.join", {"ctypes", "dataclasses", "inspect", "logging", "traceback"}),
    ],
)
def test_slow_modules_are_not_imported(modules: str, slow: set[str]) -> None:
    code = f"import sys, {modules}; print(*{slow} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert loaded.stdout.split() == []
