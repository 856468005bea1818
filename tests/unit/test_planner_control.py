"""The cost model of the control plane, by hand and against the recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yalis.planner.control import DEFAULTS, control_time, plan_seconds
from yalis.planner.quantity import Quantity

RESULTS = Path(__file__).parents[2] / "benchmarks" / "reports" / "control"


def quantities(**values: float) -> dict[str, Quantity]:
    return {f"control_{name}_s": Quantity.of(value, "measured", "here") for name, value in values.items()}


HOST = quantities(base=100, per_sequence=1, send=10, hop=1000, decode_per_sequence=2, network=300)


@pytest.mark.parametrize(
    ("followers", "driver", "delivery"),
    [
        (0, 0, 0),
        (1, 100 + 5 + 10, 115 + 1300 + 10),
        (8, 100 + 5 + 80, 185 + 1300 + 10),
        (9, 185, 185 + 2 * 1300 + 80 + 10),  # two levels
        (511, 185, 185 + 3 * 1300 + 2 * 80 + 10),
        (1023, 185, 185 + 4 * 1300 + 3 * 80 + 10),
    ],
)
def test_times_by_hand(followers: int, driver: float, delivery: float) -> None:
    time = control_time(HOST, followers, sequences=5)
    assert (time.driver, time.delivery) == pytest.approx((driver, delivery))
    assert plan_seconds(HOST, followers, 5) == pytest.approx(driver)


def test_constants_of_a_machine_replace_the_defaults() -> None:
    assert plan_seconds({}, 8) == pytest.approx(plan_seconds(DEFAULTS, 8))
    slower = plan_seconds(quantities(send=1.0), 8)
    assert slower == pytest.approx(plan_seconds({}, 8) + 8 * (1 - DEFAULTS["control_send_s"].value))


def test_the_defaults_are_the_recorded_fit() -> None:
    fit = json.loads((RESULTS / "fit.json").read_text())["constants"]
    assert fit.keys() < DEFAULTS.keys()
    for name, one in fit.items():
        assert DEFAULTS[name].value == pytest.approx(one["value"], rel=0.02)


def test_the_driver_of_512_and_1024_ranks_takes_less_than_5_percent_of_a_10_ms_step() -> None:
    for followers in (511, 1023):
        for sequences in (16, 256):
            assert plan_seconds({}, followers, sequences) < 0.05 * 10e-3


def test_the_model_meets_the_measured_driver_times() -> None:
    """The rows were used for the fit: this guards the constants and the formula, and is no evidence."""
    rows = json.loads((RESULTS / "plans-after.json").read_text())["rows"]
    measured = [row for row in rows if row["scheme"] == "tree" and row["plan"].startswith("decode-")]
    assert {row["followers"] for row in measured} >= {2, 8, 32, 64, 128}
    errors = [
        abs(
            plan_seconds({}, row["followers"], int(row["plan"].removeprefix("decode-"))) * 1e6 / row["driver_cpu_us"]
            - 1
        )
        for row in measured
    ]
    assert sorted(errors)[len(errors) // 2] < 0.15
    assert max(errors) < 0.5


def test_the_tree_is_cheaper_for_the_driver_than_a_message_for_each_follower() -> None:
    """The recorded runs: before, with an encoded message for each follower, and after."""
    before, after = (
        {
            (row["plan"], row["followers"]): row["driver_cpu_us"]
            for row in json.loads((RESULTS / f"plans-{when}.json").read_text())["rows"]
            if row["scheme"] == scheme
        }
        for when, scheme in (("before", "each"), ("after", "tree"))
    )
    assert before[("decode-16", 128)] > 5 * after[("decode-16", 128)]
    assert before[("decode-256", 128)] > 20 * after[("decode-256", 128)]
    assert after[("decode-16", 128)] < 2 * after[("decode-16", 8)]
