"""`yalis calibrate` with real ranks."""

from __future__ import annotations

import pytest

from yalis.perfmodel.collectives import Shape
from yalis.planner.communication import CommModel
from yalis.study import bandwidth, this_machine
from yalis.study.bandwidth import DeviceRates


def test_two_ranks_as_two_nodes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "_SIZES", (16 << 10, 1 << 20))
    monkeypatch.setattr(this_machine, "_REPEATS", 5)
    plan = this_machine.CalibrationPlan(ranks=2, device="cpu", ranks_per_node=1)
    monkeypatch.setattr(bandwidth, "measure_rates", lambda device, dtype: DeviceRates(2e10, 3e11, "torch.dot"))
    machine = this_machine.calibrate(plan, None, "`yalis calibrate`", "yalis calibrate", lambda text: None)
    assert machine is not None
    assert (machine.gpus_per_node, machine.max_nodes) == (1, 128)
    assert machine.nic_bytes_per_s.origin == "measured"
    assert machine.libraries["hierarchical"]["net_hop_s"].origin == "measured"
    assert machine.libraries["hierarchical"]["shared_machine"].value == 0
    assert 0 < CommModel(machine, "hierarchical").all_reduce(Shape(4, 1), 1 << 16) < 10
