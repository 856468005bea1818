"""The machines that come with yalis, and the sentences for files that are no machines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from yalis.errors import YalisError
from yalis.perfmodel.collectives import Shape
from yalis.planner.communication import CommModel
from yalis.planner.intervals import effects, interval
from yalis.planner.machine import Machine, load_machine, machine_names
from yalis.planner.published import COMMUNICATION, NVRAR_TIMES, STATEMENTS, evaluate_communication, statements
from yalis.planner.quantity import ORIGINS, Quantity

REPOSITORY = Path(__file__).parents[2]
MAX_FITTED = 5


def test_the_named_machines_exist() -> None:
    assert machine_names() == ["alps", "h100-ib", "h200", "h200-ib", "lab", "perlmutter"]


@pytest.mark.parametrize("name", machine_names())
def test_every_number_has_an_origin_and_few_are_fitted(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    quantities = machine.quantities()
    for path, one in quantities.items():
        assert one.origin in ORIGINS
        assert len(one.source) > 10, path
        files = [word.strip("(),;") for word in one.source.split() if word.startswith("benchmarks/")]
        assert all((REPOSITORY / file).is_file() for file in files), one.source
    assert sum(one.origin == "fitted" for one in quantities.values()) <= MAX_FITTED
    for library in machine.libraries:
        CommModel(machine, library)
    assert Machine.from_json(json.loads(json.dumps(machine.to_json())), name) == machine


def test_one_number_can_be_replaced() -> None:
    machine = load_machine("perlmutter")
    slow = machine.with_quantity("libraries.mpi.net_hop_s", Quantity.of(1.0, "assumed", "test"))
    assert slow.libraries["mpi"]["net_hop_s"].value == 1.0
    assert slow.libraries["nccl"] == machine.libraries["nccl"]


def test_bad_machines_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(YalisError, match=r"unknown machine 'summit'; give one of alps, .*`yalis calibrate`"):
        load_machine("summit")
    path = tmp_path / "machine.json"
    path.write_text("{")
    with pytest.raises(YalisError, match="not valid JSON"):
        load_machine(str(path))
    data = load_machine("perlmutter").to_json()
    data["libraries"]["nccl"]["net_efficiency"]["origin"] = "guessed"
    path.write_text(json.dumps(data))
    with pytest.raises(YalisError, match=r"libraries\.nccl\.net_efficiency: unknown origin 'guessed'; accepted"):
        load_machine(str(path))


NIC, NCCL = "nic_bytes_per_s", "libraries/nccl"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (NIC, 25e9, "nic_bytes_per_s is 25000000000.0; give an object such as"),
        (f"{NIC}/value", "25e9", "value is '25e9'; give a number of at least 0"),
        (f"{NIC}/value", None, "value is missing; give a number"),
        (f"{NIC}/value", float("nan"), "value is nan; give a number"),
        (f"{NIC}/value", float("inf"), "value is inf; give a number"),
        (f"{NIC}/value", 10**400, "value is 1000"),
        (f"{NIC}/value", -1, "value is -1; give a number of at least 0"),
        (f"{NIC}/low", 0, "is 2.5e+10 with the lower bound 0; give both above 0"),
        (f"{NIC}/low", 3e10, "give low <= value <= high"),
        (f"{NIC}/origin", ["measured"], "unknown origin"),
        (f"{NIC}/source", 3, "source is 3; give a text"),
        (f"{NIC}/unit", "B/s", "unknown field 'unit'; accepted: value, origin"),
        (f"{NCCL}/net_efficiency", {"value": 93, "origin": "measured", "source": "x"}, "is 93; give a share"),
        (f"{NCCL}", [], "libraries.nccl is no object"),
        ("nic_bytes", 1, "unknown field 'nic_bytes'; accepted: name, description"),
        ("gpu/has_tmas", True, "unknown field 'gpu.has_tmas'"),
        ("gpu/has_tma", 1, "gpu.has_tma is 1; give true or false"),
        ("gpu/num_sms", 0, "gpu.num_sms is 0; give a whole number"),
        ("host/hop_s", {}, "unknown field 'host.hop_s'; accepted: control_base_s"),
        ("gpus_per_node", 10**9, "gpus_per_node is 1000000000; give a whole number from 1 to 1024"),
        ("max_nodes", None, "max_nodes is missing; give a whole number"),
        ("description", None, "description is missing; give a text"),
    ],
)
def test_wrong_fields_of_a_machine_get_a_sentence(path: str, value: object, sentence: str, tmp_path: Path) -> None:
    data: Any = load_machine("perlmutter").to_json()
    *parents, name = path.split("/")
    target = data
    for parent in parents:
        target = target[parent]
    target[name] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(data))
    with pytest.raises(YalisError, match=re.escape(sentence)):
        load_machine(str(file))


def test_an_interval_combines_the_bounds_of_all_quantities() -> None:
    machine = load_machine("h200")

    def floor(one: Machine) -> float:
        return one.gpu.memory_bytes.value / one.gpu.read_bytes_per_s.value

    found = interval(machine, floor)
    assert found.low < found.value < found.high
    # Two independent changes of 5% each: their squares add up.
    assert found.high / found.value - 1 == pytest.approx((0.05**2 + (1 / 0.95 - 1) ** 2) ** 0.5)
    assert {one.path for one in effects(machine, floor)} == {"gpu.memory_bytes", "gpu.read_bytes_per_s"}
    (by_memory,) = effects(machine, floor, ["gpu.memory"], spread=0.3)
    assert by_memory.at_high / found.value == pytest.approx(1.3)


def test_statements_have_names_and_ranges() -> None:
    assert len({one.name for one in STATEMENTS}) == len(STATEMENTS)
    assert {one.name.split()[0] for one in STATEMENTS} == {
        "A1", "A2", "A3", "A5", "A6", "A7", "A9", "A11", "A12", "B7", "B8", "NVRAR",
    }  # fmt: skip
    assert all(one.low <= one.high for one in STATEMENTS)
    assert {one.machine for one in STATEMENTS} - {""} <= set(machine_names())


def test_published_statements_about_communication() -> None:
    """Guards the fitted statements, which are no evidence. The others are reported, whether they agree or not."""
    outcomes = {one.statement.name: one for one in evaluate_communication()}
    assert set(outcomes) == {one.name for one in statements(COMMUNICATION)}
    fitted = [one for one in outcomes.values() if one.statement.fitted]
    assert len(fitted) == len(NVRAR_TIMES)
    assert all(one.agrees for one in fitted)
    assert all(one.prediction.low <= one.prediction.value <= one.prediction.high for one in outcomes.values())


def test_the_fitted_values_are_the_best() -> None:
    """No value 5% higher or lower meets the published NVRAR times better."""
    machine = load_machine("perlmutter")

    def error(one: Machine) -> float:
        model, group = CommModel(one, "nvrar-published"), Shape(4, 4)
        return sum((1e6 * model.all_reduce(group, kib << 10) / time - 1) ** 2 for kib, time in NVRAR_TIMES.items())

    best = error(machine)
    for name in ("ready_s", "net_efficiency"):
        path = f"libraries.nvrar-published.{name}"
        value = machine.quantities()[path]
        assert value.origin == "fitted"
        for factor in (0.95, 1.05):
            assert error(machine.with_quantity(path, value.scaled(factor))) > best
