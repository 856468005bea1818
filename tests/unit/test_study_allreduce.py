"""The all-reduce benchmark without ranks: its input, its rows, its summaries and its files."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yalis.cli.bench_allreduce import _sizes
from yalis.cli.main import main
from yalis.comm import tuning
from yalis.comm.tuning import Choice
from yalis.errors import YalisError, YalisFailure
from yalis.study import plots, results
from yalis.study.allreduce.benchmark import AllReducePlan, check_sums, make_row, save_table
from yalis.study.allreduce.cost_model import CostModel
from yalis.study.allreduce.in_lab import LabPlan
from yalis.study.allreduce.trial import ExpectedSum, start_trial
from yalis.study.results import Row
from yalis.study.results.kinds import allreduce


def row(backend: str, size: int, median: float, delay: float | None = None, **options: Any) -> Row:
    made = make_row(backend, options, "float32", size, "eager", 4, None, 4, [median * 1e-6] * 3)
    return {**made, "delay_us": delay}


HERE = tuning.TableKey("cpu", tuning.ONE_HOST)


def make_result(rows: list[Row], **parameters: Any) -> results.Result:
    nodes = [[0, 1], [2, 3]]
    facts = {
        "ranks": 4,
        "nodes": nodes,
        "shape": "2x2",
        "baseline": "",
        "dtypes": ["float32"],
        "links": [],
        "table_key": asdict(HERE),
        **parameters,
    }
    rows = allreduce.add_speedups(rows, "")
    return results.new("allreduce", facts, rows, "yalis bench allreduce", [{"type": "cpu", "name": "CPU"}])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--ranks 1", "an all-reduce needs at least 2 ranks; give --ranks 2 or more"),
        ("", "an all-reduce needs at least 2 ranks"),
        ("--ranks 2 --backends gloo,tree", "unknown backend 'tree'; accepted: torch, mpi, "),
        ("--ranks 2 --baseline tree", "unknown backend 'tree'"),
        ("--ranks 2 --dtypes int8", "unknown dtype 'int8'; accepted: float32, bfloat16, float16"),
        ("--ranks 2 --sizes 6", "a message of 6 bytes cannot be measured; accepted: multiples of 4 up to 1024M"),
        ("--ranks 2 --sizes 6k,no", "'6k,no' is not a list of sizes, such as 8K,64K,1M"),
        ("--ranks 2 --repeats 0", "repeats is 0; give a whole number of at least 1"),
        ("--ranks 2 --tune --backends auto", "--tune measures the backends that auto chooses from; leave auto out"),
        ("--ranks 2 --delay 1ms", "--delay needs --hosts; give it as well"),
        ("--ranks 2 --hosts 2", "--hosts starts its own ranks; run it without --ranks"),
        ("--hosts 1", "--hosts is 1 and --ranks-per-host 2; give at least 2 hosts"),
        ("--hosts 2 --delay 1", "'1' is not a link delay; give one such as 1ms, 200us or 0"),
        ("--hosts 2 --tune --delay 0,1ms", "--tune saves the times of one network; give a single --delay"),
        (
            "--hosts 2 --ranks-per-node 2",
            "--ranks-per-node divides the ranks of one machine, and --hosts creates hosts",
        ),
        ("--hosts 2 --rate fast", "'fast' is not a link rate; give one such as 10gbit"),
        ("--ranks 2 --sizes 100000M", "cannot be measured; accepted: multiples of 4 up to 1024M"),
        ("--ranks 2 --dtypes ,", "no dtypes given"),
        ("--ranks 2 --baseline mpi --backends torch", "the baseline mpi is not among the backends"),
        ("--ranks 2 --tune --backends gloo", "and gloo is not one"),
        ("--ranks 2 --join-timeout -1", "join_timeout is -1; give a number of seconds above 0"),
        ("--ranks 2 --plot /", "--plot is '/', which is not a file"),
        ("--ranks 2 --plot /not/there/a", "--plot is /not/there/a, but there is no folder /not/there"),
    ],
)
def test_bad_input_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "allreduce", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("yalis: error: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_sizes_and_plans() -> None:
    assert _sizes("8K, 1m,12") == (8192, 1 << 20, 12)
    plan = AllReducePlan()
    assert (plan.sizes[0], plan.sizes[-1], len(plan.sizes)) == (8 << 10, 64 << 20, 14)
    assert AllReducePlan(tune=True).sizes == plan.sizes[:10]
    assert [plan.repeats_of(size << 20) for size in (1, 4, 8, 16, 64)] == [30, 30, 15, 9, 9]
    assert AllReducePlan(repeats=50).repeats_of(64 << 20) == 50
    assert AllReducePlan.from_json({**vars(plan), "sizes": list(plan.sizes)}) == plan
    assert AllReducePlan(sizes=(6,), dtypes=("bfloat16",)).sizes == (6,)
    with pytest.raises(YalisError, match="at least 2 hosts"):
        LabPlan(hosts=2, ranks_per_host=0)


def test_rows_speedups_and_ratios() -> None:
    made = make_row("torch", {}, "float32", 4000, "eager", 4, None, 2, [n * 1e-6 for n in range(1, 12)])
    assert (made["median_us"], made["low_us"], made["high_us"]) == pytest.approx((6, 2, 10))
    assert made["repeats"] == 11
    assert made["bus_gb_per_s"] == pytest.approx(2 * 3 / 4 * 4000 / 6e-6 / 1e9)
    rows = [
        *(row("gloo", 64, 100), row("hierarchical", 64, 50), row("mpi", 64, 80), row("mpi", 64, 40, algorithm="ring")),
        *(row("gloo", 64, 900, 1000.0), row("hierarchical", 64, 250, 1000.0)),
    ]
    allreduce.add_speedups(rows, "")
    assert [one["speedup"] for one in rows] == pytest.approx([1, 2, 1.25, 2.5, 1, 3.6])
    allreduce.add_speedups(rows, "mpi")
    assert [one["speedup"] for one in rows[:4]] == pytest.approx([0.8, 1.6, 1, 2])
    found = [(allreduce.label(one.rival), one.ours["delay_us"], one.times_faster) for one in allreduce.ratios(rows)]
    assert [(other, delay) for other, delay, _ in found] == [("gloo", None), ("gloo", 1000.0), ("mpi ring", None)]
    assert [faster for *_, faster in found] == pytest.approx([2, 3.6, 0.8])


def test_time_added_by_the_delay() -> None:
    rows = [row("gloo", 64, 100, 0.0), row("gloo", 64, 950, 1000.0), row("torch", 64, 950, 1000.0)]
    ((found, extra),) = allreduce.added_by_delay(rows)
    assert (found["backend"], extra) == ("gloo", pytest.approx(850))


def test_wrong_sums_fail_after_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = make_row("torch", {}, "float32", 64, "eager", 4, "wrong: 1 of 16 elements are not the sum on rank 2", 1, [])
    result = make_result([row("gloo", 64, 100), {**wrong, "delay_us": None}])
    print("\n".join(results.kind_of(result).text(result)))
    assert "wrong: 1 of 16" in capsys.readouterr().out
    with pytest.raises(YalisFailure, match="1 of 2 settings gave wrong sums, the first torch with 64 bytes of float32"):
        check_sums(result.rows)


@pytest.mark.parametrize("kind", [YalisError, YalisFailure])
def test_a_backend_that_cannot_hold_a_message_is_a_row_but_a_lost_rank_fails(kind: type[YalisError]) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise kind("the message is too large")

    expected = ExpectedSum.draw("seed", 0, 2, 8, torch.float32)
    group: Any = SimpleNamespace(workspace=refuse)
    reason: Any = None
    with pytest.raises(YalisFailure) if kind is YalisFailure else nullcontext():
        reason = start_trial(None, None, group, expected, "eager", torch.device("cpu"), True)  # type: ignore[arg-type]
    assert reason == (None if kind is YalisFailure else "the message is too large")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_knows_the_expected_sum(dtype: torch.dtype) -> None:
    ranks = [ExpectedSum.draw("seed", rank, 5, 1000, dtype) for rank in range(5)]
    assert len({float(one.input[0]) for one in ranks}) == 5
    total = sum(one.input.double() for one in ranks)
    assert all(torch.equal(one.total, total) for one in ranks)
    rounded = torch.zeros(1000, dtype=dtype)
    for one in ranks:
        rounded += one.input  # rounded at every step, the largest error a backend may have
    assert ranks[0].find_error(rounded) is None
    incomplete = (total - ranks[3].input.double()).to(dtype)
    assert "elements are not the sum" in str(ranks[0].find_error(incomplete))
    assert ranks[0].find_error(torch.full((1000,), float("nan"))) == "1000 of 1000 elements are not the sum"


def test_a_result_is_written_and_plotted(tmp_path: Path) -> None:
    sizes = (8192, 65536)
    rows = [
        row(name, size, 100 + size / 100, delay) for delay in (0.0, 1e3) for name in ("gloo", "torch") for size in sizes
    ]
    slow, quick = {"latency": 1e-3, "seconds_per_byte": 1e-9}, {"latency": 1e-5, "seconds_per_byte": 1e-9}
    result = make_result(rows, links=[{"delay_us": 1e3, "inside": quick, "between": slow}])
    model = CostModel.of(result, 1e3)
    assert model is not None
    expected = model.expected_us(8192)
    assert expected["hierarchical"] == pytest.approx(
        1000 + 2 * 10 + 12.288
    )  # one exchange of half between nodes, two phases within
    # Each of six rounds waits for the receiver, then for the message.
    assert expected["gloo"] == pytest.approx(6 * (2 * 1000 + 8192 / 4 / 1e3))
    assert CostModel.of(result, 0.0) is None  # its links were not measured
    assert results.read(results.write(result, tmp_path)) == result
    old_row = {**result.rows[0], "options": {"between": "halving", "chunk": 1024}}
    upgraded = results.KINDS["allreduce"].upgrade({"rows": [old_row]}, 4)
    assert upgraded["rows"][0]["options"] == {"inter": "halving", "chunk": 1024}
    written = plots.write_plot(result, tmp_path / "plot")
    assert [path.name for path in written] == ["plot.png", "plot.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in written[1].read_text()
    with pytest.raises(YalisFailure, match="give another --plot"):
        plots.write_plot(result, tmp_path / "missing" / "plot")


def test_a_tuning_result_is_plotted_by_the_fastest_options(tmp_path: Path) -> None:
    sizes = (8192, 65536)
    tried = [
        ("nvrar", 30, {"blocks": 8}),
        ("nvrar", 50, {"blocks": 1}),
        ("ring", 90, {"blocks": 2}),
        ("torch", 400, {}),
    ]
    rows = [row(name, size, median, **options) for name, median, options in tried for size in sizes]
    dropped = make_row("nvrar", {"blocks": 2}, "float32", 8192, "eager", 4, None, 2, [20e-6])
    rows.append({**dropped, "delay_us": None})  # faster in a single repeat, and not continued
    near, far = {"latency": 1e-6, "seconds_per_byte": 1e-11}, {"latency": 2e-6, "seconds_per_byte": 1e-11}
    links = [{"delay_us": None, "inside": near, "between": far, "fixed": 3e-6}]
    result = make_result(rows, links=links, tune=True)
    assert [(one["backend"], one["median_us"]) for one in allreduce.fastest(result.rows) if one["bytes"] == 8192] == [
        ("nvrar", pytest.approx(30)), ("ring", pytest.approx(90)), ("torch", pytest.approx(400)),
    ]  # fmt: skip
    model = CostModel.of(result, None)
    assert model is not None
    expected = model.expected_us(8192)
    wire = 2 * 8192 / 2 * 1e-5  # us for a half, with the LL protocol
    assert expected["nvrar"] == pytest.approx(3 + 2 * (1 + wire) + 2 + wire)
    assert expected["ring"] == pytest.approx(3 + 6 * (2 + wire / 2))
    assert expected["oneshot"] == pytest.approx(3 + (1 + 2 * wire) + (2 + 4 * wire))
    assert results.read(results.write(result, tmp_path)) == result
    drawn = plots.write_plot(result, tmp_path / "plot")[1].read_text()
    assert "cost model, oneshot" in drawn
    assert "blocks=" not in drawn


def test_tuning_is_saved_for_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    fast, slow = {"inter": "halving", "chunk": 1 << 16}, {"inter": "doubling", "chunk": 1 << 16}
    rows = [
        *(row("torch", 8192, 10), row("hierarchical", 8192, 20, **fast)),
        *(
            row("torch", 1 << 20, 90),
            row("hierarchical", 1 << 20, 50, **fast),
            row("hierarchical", 1 << 20, 70, **slow),
        ),
    ]
    path, best = save_table(make_result(rows, sizes=[8192, 1 << 20]))
    assert path.parent.parent == tmp_path
    assert best == [(8192, Choice("torch")), (1 << 20, Choice("hierarchical", fast))]
    tuned = tuning.load(HERE).for_nodes([[0, 1], [2, 3]])
    assert tuned.best(2 << 20, ["torch", "hierarchical"]) == Choice("hierarchical", fast)
    assert tuned.best(2 << 20, "torch") == Choice("torch")
