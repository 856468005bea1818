"""Parameters fitted to all-reduce results made from known parameters, and the machine file of `yalis calibrate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_planner_communication import CPU, with_values
from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.kernels.gpu_limits import GpuLimits
from yalis.perfmodel.collectives import Shape
from yalis.planner.communication import CommModel
from yalis.planner.machine import Machine, load_machine
from yalis.study import bandwidth, results, this_machine
from yalis.study.allreduce.benchmark import make_row
from yalis.study.bandwidth import DeviceRates
from yalis.study.calibration import compare, fit_libraries

LAB_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "lab-prediction"
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
PING = {"inside": {"latency": 1e-4, "seconds_per_byte": 1e-10}, "between": {"latency": 1e-3, "seconds_per_byte": 1e-9}}


def make_result(
    machine: Machine, backends: dict[str, str], group: Shape, delay: float | None, device: str, **parameters: Any
) -> results.Result:
    """Return a result in which each backend takes the time that the machine predicts for its library."""
    rows = []
    for library, backend in backends.items():
        for size in SIZES:
            seconds = CommModel(machine, library).all_reduce(group, size)
            row = make_row(backend, {}, "float32", size, "eager", group.size, None, 4, [seconds] * 3)
            rows.append({**row, "delay_us": delay})
    ranks = iter(range(group.size))
    nodes = [[next(ranks) for _ in range(group.ranks_per_node)] for _ in range(group.nodes)]
    facts = {"ranks": group.size, "shape": "test", "nodes": nodes, "links": [], "baseline": "", **parameters}
    devices = [{"type": device, "name": device}]
    topology = results.make_topology([0] * group.size)
    return results.new("allreduce", facts, rows, "yalis bench allreduce", devices, topology=topology)


def lab(library: str, **extra: float) -> Machine:
    return with_values(load_machine("lab"), library, **CPU, **extra)


@pytest.mark.parametrize("library", ["gloo", "hierarchical", "mpi"])
def test_a_lab_fitted_on_two_hosts_predicts_four(library: str) -> None:
    extra = {"eager_bytes": 65536.0, "rendezvous_hops": 3.0} if library == "mpi" else {}
    machine = lab(library, **extra)
    links = [{"delay_us": 1e3, **PING}]
    two = make_result(machine, {library: library}, Shape(2, 2), 1e3, "cpu", links=links, lab={"hosts": 2})
    fitted = fit_libraries(two, machine, "two.json", 1e3)[library]
    assert fitted["net_hop_s"].value == pytest.approx(1e-3, rel=0.02)
    assert fitted["byte_s"].value == pytest.approx(1e-9, rel=0.05)
    assert fitted["net_hop_s"].origin == "measured"
    assert fitted["net_hop_s"].source == "two.json"
    four = make_result(machine, {library: library}, Shape(4, 2), 1e3, "cpu", lab={"hosts": 4})
    found = compare(replace(machine, libraries={library: fitted}), four, 1e3)
    assert [one.bytes for one in found] == list(SIZES)
    assert max(abs(one.error) for one in found) < 0.03


def test_networks_of_gpus_are_fitted_through_nccl_mpi_and_puts() -> None:
    machine = load_machine("perlmutter")
    truth = machine.with_quantity("libraries.nccl.net_hop_extra_s", machine.libraries["mpi"]["net_hop_s"].scaled(3))
    truth = truth.with_quantity("libraries.mpi.net_hop_s", machine.libraries["mpi"]["net_hop_s"].scaled(2))
    links = {
        "fixed": 4e-6,
        "between": {"latency": 6e-6, "seconds_per_byte": 1 / 20e9},
        "inside": {"latency": 1e-6, "seconds_per_byte": 1 / 150e9},
    }
    backends = {"nccl": "torch", "mpi": "mpi"}
    result = make_result(truth, backends, Shape(2, 4), None, "cuda", links=[{"delay_us": None, **links}])
    found = fit_libraries(result, machine, "two.json")
    assert found["nccl"]["net_hop_extra_s"].value == pytest.approx(3 * 7.3e-6)
    assert found["mpi"]["net_hop_s"].value == pytest.approx(2 * 7.3e-6)
    nvrar = found["nvrar"]
    assert (nvrar["launch_s"].value, nvrar["put_s"].value, nvrar["intra_hop_s"].value) == (4e-6, 6e-6, 1e-6)
    assert nvrar["net_efficiency"].value == pytest.approx(20 / 25)
    assert nvrar["intra_efficiency"].value == pytest.approx(150 / 300)
    assert nvrar["ready_s"] == machine.libraries["nvrar"]["ready_s"]  # cannot be seen in the result
    assert max(abs(one.error) for one in compare(replace(machine, libraries=found), result)) < 1e-6


def test_unusable_results_get_a_sentence() -> None:
    machine = load_machine("perlmutter")
    shared = make_result(machine, {"nccl": "torch"}, Shape(2, 4), None, "cuda", ranks_per_gpu=4)
    with pytest.raises(YalisError, match="ranks share a GPU"):
        fit_libraries(shared, machine, "two.json")
    uneven = replace(shared, parameters={**shared.parameters, "nodes": [[0, 1], [2]]})
    with pytest.raises(YalisError, match="nodes with 1 and 2 ranks; start the same number on every node"):
        compare(machine, uneven)
    with pytest.raises(YalisError, match="a result of `yalis bench latency`; give one of `yalis bench allreduce`"):
        fit_libraries(replace(shared, kind="latency"), machine, "two.json")


@pytest.fixture
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure_rates", lambda device, dtype: DeviceRates(2e10, 3e11, "torch.dot"))


@pytest.mark.usefixtures("quick_rates")
def test_one_rank_writes_a_machine_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    assert main(["calibrate", "--device", "cpu", "--out", str(path)]) == 0
    assert "gpu.read_bytes_per_s" in capsys.readouterr().out
    machine = load_machine(str(path))
    assert (machine.gpus_per_node, machine.max_nodes, machine.libraries) == (1, 1, {})
    assert machine.gpu.read_bytes_per_s.value == 2e10
    assert machine.gpu.read_bytes_per_s.origin == "measured"
    assert machine.nic_bytes_per_s.origin == "assumed"
    assert "only one rank" in machine.nic_bytes_per_s.source


@pytest.mark.usefixtures("quick_rates")
def test_a_base_gives_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    arguments = ["calibrate", "--device", "cpu", "--out", str(path), "--base", "perlmutter", "--name", "mine", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"
    machine, base = load_machine(str(path)), load_machine("perlmutter")
    assert (machine.gpus_per_node, machine.max_nodes) == (4, 256)
    assert machine.nic_bytes_per_s.value == base.nic_bytes_per_s.value
    assert machine.nic_bytes_per_s.source.startswith("machine perlmutter: ")
    group, size = Shape(4, 4), 1 << 18
    assert CommModel(machine, "nccl").all_reduce(group, size) == CommModel(base, "nccl").all_reduce(group, size)


@pytest.mark.usefixtures("quick_rates")
def test_a_stored_result_gives_links_and_libraries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = lab("gloo")
    links = [{"delay_us": 1e3, **PING}]
    result = make_result(truth, {"gloo": "gloo"}, Shape(2, 2), 1e3, "cpu", links=links, lab={"hosts": 2})
    stored, path = results.write(result, tmp_path / "results"), tmp_path / "machine.json"
    assert main(["calibrate", "--device", "cpu", "--allreduce", str(stored), "--out", str(path)]) == 0
    machine = load_machine(str(path))
    assert (machine.gpus_per_node, machine.nics_per_node) == (2, 1)
    assert machine.nic_bytes_per_s.value == pytest.approx(1e9)
    assert machine.gpu.read_bytes_per_s.value == 1e10  # two ranks share the CPU of a node
    assert machine.libraries["gloo"]["byte_s"].source == stored.name
    assert machine.libraries["mpi"]["byte_s"].origin == "assumed"  # not in the result
    found = CommModel(machine, "gloo").all_reduce(Shape(4, 2), 1 << 20)
    assert found == pytest.approx(CommModel(truth, "gloo").all_reduce(Shape(4, 2), 1 << 20), rel=0.05)


def test_bad_flags_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--out", str(tmp_path)], "give a file in an existing folder"),
        (["--out", str(tmp_path / "missing" / "m.json")], "give a file in an existing folder"),
        (["--base", "summit", "--device", "cpu"], "unknown machine 'summit'"),
        (["--ranks", "0", "--device", "cpu"], "--ranks is 0"),
    ):
        assert main(["calibrate", "--out", str(tmp_path / "m.json"), *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_the_device_is_described(tmp_path: Path) -> None:
    base, rates = load_machine("lab"), DeviceRates(2e10, 3e11, "torch.dot")
    plan = this_machine.CalibrationPlan(base="lab")
    machine = this_machine.describe(plan, base, torch.device("cpu"), rates, None, "")
    assert "torch.dot" in machine.gpu.read_bytes_per_s.source
    assert machine.gpu.efficiencies == "cpu"


def test_the_limits_of_a_gpu_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(bandwidth, "describe_device", lambda device: {"name": "A100"})
    monkeypatch.setattr(this_machine, "gpu_limits", lambda device: GpuLimits(108, 163 << 10))
    base, rates = load_machine("h200-ib"), DeviceRates(2e12, 3e14, "sum")
    gpu = this_machine.describe(this_machine.CalibrationPlan(), base, torch.device("cuda"), rates, None, "").gpu
    assert (gpu.num_sms, gpu.shared_memory_kib, gpu.has_tma) == (108, 163, False)


@pytest.mark.parametrize("delay_ms", [1, 5])
def test_four_hosts_of_the_lab_are_predicted_from_two(delay_ms: int) -> None:
    """Recorded measurements: calibrated on 2 hosts, every size and library on 4 hosts within 30%."""
    lab, delay = load_machine("lab"), 1e3 * delay_ms
    two, four = (results.read(LAB_RESULTS / f"{hosts}x2-{delay_ms}ms.json") for hosts in (2, 4))
    fitted = fit_libraries(two, lab, "two hosts", delay)
    found = compare(replace(lab, libraries=fitted), four, delay)
    assert {(one.library, one.bytes) for one in found} == {
        (library, size) for library in ("gloo", "hierarchical", "mpi") for size in SIZES
    }
    assert max(abs(one.error) for one in found) < 0.30
    assert sum(abs(one.error) for one in found) / len(found) < 0.12
    if delay_ms == 1:  # the machine file has these values
        for library, parameters in fitted.items():
            for name, one in parameters.items():
                assert lab.libraries[library][name].value == pytest.approx(one.value, rel=1e-3), (library, name)
