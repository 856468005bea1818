"""The kernel benchmark on the CPU: its cases, its input checks, and that it detects wrong kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.perfmodel.floors import ModelDims
from yalis.study import bandwidth, results
from yalis.study.kernels import benchmark, cases
from yalis.study.kernels.backends import NativeBackend, TritonBackend
from yalis.study.kernels.cases import KernelsPlan, list_cases, matrices

TINY = ModelDims(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=False,
    expert_layers=2, experts=6, top_k=2, expert_width=24,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_MAX_COPIES", 3)
    monkeypatch.setattr(benchmark, "_MIN_TIMING_S", 0.0)
    monkeypatch.setattr(bandwidth, "measure_rates", lambda device, dtype: bandwidth.DeviceRates(1e9, 1e12))


def plan(**fields: object) -> KernelsPlan:
    small = {"dims": TINY, "rows": (1, 5), "layers": 1, "prompts": 2, "prompt_len": 40, "repeats": 1, "device": "cpu"}
    return KernelsPlan(**{**small, **fields})  # type: ignore[arg-type]


def test_every_operation_matches_its_reference_and_has_a_floor() -> None:
    messages: list[str] = []
    result = benchmark.measure(plan(), "yalis bench kernels", messages.append)
    found = {(row["kernel"], row["shape"].split()[0]) for row in result.rows}
    assert {kernel for kernel, _ in found} == {
        "linear", "linear, gate", "norm", "add, norm", "gate", "rope, write", "use last tokens", "gather rows",
        "argmax", "pick greedy", "attention", "prefill attention", "step", "route", "experts",
    }  # fmt: skip
    assert {shape for kernel, shape in found if kernel == "linear"} == set(matrices(TINY))
    assert len(result.rows) == 2 * (6 + 4 + 4 + 1 + 1) + 1 + 3 * 2
    assert len(messages) == 1 + len(result.rows)
    for row in result.rows:
        assert row["status"] == "ok"
        assert row["error"] < 1e-5
        assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
        assert row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"])
    head = next(row for row in result.rows if row["shape"] == "head 300x64" and row["rows"] == 5)
    assert head["floor_us"] == pytest.approx(1e6 * 4 * (300 * 64 + 5 * 64 + 5 * 300) / 1e9)
    step = next(row for row in result.rows if row["kernel"] == "step" and row["rows"] == 1)
    num_weights = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96 + 300 * 64
    assert step["floor_us"] == pytest.approx(1e6 * 4 * num_weights / 1e9)
    # Two of six experts, three matrices each, and one row in and out.
    experts = next(row for row in result.rows if row["kernel"] == "experts")
    assert experts["floor_us"] == pytest.approx(1e6 * 4 * (2 * 3 * 24 * 64 + 2 * 64) / 1e9)
    # Two prompts of three blocks each: token n attends to n keys, at two multiply-adds per element of a head.
    prompt = next(row for row in result.rows if row["kernel"] == "prefill attention")
    assert (prompt["shape"], prompt["rows"]) == ("2 x 48 tokens", 96)
    assert prompt["gflop_per_s"] * prompt["us"] * 1e3 == pytest.approx(2 * 4 * 4 * 16 * sum(range(1, 49)))
    assert prompt["gb_per_s"] * prompt["us"] * 1e3 == pytest.approx(4 * 96 * 16 * (4 + 4 + 2 + 2))


def test_old_results_get_the_new_names_of_operations() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "kernels.json"
    old = {row["kernel"] for row in json.loads(path.read_text())["rows"]}
    new = {row["kernel"] for row in results.read(path).rows}
    assert {"take", "feed", "step, dependent launches"} <= old
    assert {"gather rows", "use last tokens", "step, PDL"} <= new
    assert not new & {"take", "feed", "argmax, settle", "prompt attention", "step, dependent launches"}


class MissingElement(NativeBackend):
    """Does not write the last output element."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        y = super().gated(gate_up)
        out = torch.empty_like(y)
        out[:, :-1] = y[:, :-1]
        return out


class WrongSum(NativeBackend):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = super().add_rms_norm(x, residual, weight)
        return normed, x


class WrongIndex(NativeBackend):
    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return super().argmax(logits) + 1


def test_wrong_kernels_are_reported_without_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "yalis_backends", lambda device: [("", MissingElement())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["gate"]["status"] == "wrong: off by nan"
    assert rows["gate"]["us"] is None
    assert rows["linear, gate"]["status"] == "wrong: off by nan"
    assert rows["linear"]["status"] == "ok"
    monkeypatch.setattr(benchmark, "yalis_backends", lambda device: [("", WrongSum())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["norm"]["status"] == "ok"
    assert rows["add, norm"]["status"].startswith("wrong: off by")
    monkeypatch.setattr(benchmark, "yalis_backends", lambda device: [("", WrongIndex())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["argmax"]["status"] == "wrong: off by 1.0e+00"
    monkeypatch.setitem(benchmark.DIMS, "cpu", TINY)
    monkeypatch.setitem(cases.EXPERT_DIMS, "cpu", TINY)
    args = f"bench kernels --device cpu --rows 1 --layers 1 --prompt-len 40 --repeats 1 --out {tmp_path}"
    assert main(args.split()) == 1
    out, err = capsys.readouterr()
    assert "wrong: off by 1.0e+00\n" in out
    assert "1 of 21 kernels differ from their reference, the first is argmax (300, 1 row): off by" in err
    assert len(list(tmp_path.iterdir())) == 1


def test_speed_is_shown_in_the_unit_that_bounds_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(benchmark.DIMS, "cpu", TINY)
    monkeypatch.setitem(cases.EXPERT_DIMS, "cpu", TINY)
    args = "bench kernels --device cpu --rows 1 --layers 1 --prompts 1 --prompt-len 40 --repeats 1"
    for rates, ceilings, unit in (
        ((1e15, 1e12, "a kernel"), "read 1000.00 TB/s (a kernel), matmul 1.00 TFLOP/s", "FLOP/s"),
        ((1e9, 1e15, "another"), "read 1.0 GB/s (another), matmul 1000.00 TFLOP/s", "B/s"),
    ):
        monkeypatch.setattr(bandwidth, "measure_rates", lambda *_, rates=rates: bandwidth.DeviceRates(*rates))
        assert main(args.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == f"measured here: {ceilings}"
        speeds = {line[:26].rstrip(): line.split()[-2] for line in lines[3:]}
        assert speeds["prefill attention"][1:] == speeds["linear"][1:] == unit
        assert speeds["argmax"].endswith("B/s")  # it has no FLOPs


def test_the_triton_kernels_pass_the_same_check() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    seen = set()
    for case in list_cases(plan(rows=(3,), context=70), TINY, CPU, torch.float32):
        if case.kernel not in seen:
            assert benchmark.find_error(case, TritonBackend()) < 1e-5, case.kernel
        seen.add(case.kernel)


def test_the_floor_uses_the_highest_bandwidth_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure_rates", lambda device, dtype: bandwidth.DeviceRates(1.0, 1e12))
    monkeypatch.setitem(cases._COPIES_BYTES, "cpu", 1)
    result = benchmark.measure(plan(rows=(1,)), "")
    assert max(row["share_of_floor"] for row in result.rows) <= 1.0 + 1e-9
    assert result.parameters["read_bytes_per_s"] > 1.0
    assert result.parameters["read_by"].endswith("1 row")


def test_the_fastest_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, ours = bandwidth.DeviceRates(3.0, 5.0, "torch.sum"), bandwidth.DeviceRates(4.0, 2.0, "ours")
    assert torchs.best(ours) == ours.best(torchs) == bandwidth.DeviceRates(4.0, 5.0, "ours")
    # The readers of a GPU, run on the CPU: they return bytes per second.
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setattr(bandwidth, "_LM_HEAD", (256, 1024))
    seconds = iter([4.0, 1.0, 2.0, 2.0, 0.5])
    monkeypatch.setattr(bandwidth, "_best_seconds", lambda kernel, device: next(seconds))
    found = bandwidth.torch_bandwidths(CPU) | bandwidth.gemv_bandwidth(CPU)
    assert list(found) == ["torch.sum", "torch.max", "torch.mv", "torch.dot", "linear, one row"]
    assert list(found.values()) == [2**20, 2**22, 2**21, 2**21, 2**23]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (0,)}, "1 to 64"),
        ({"rows": (65,)}, "1 to 64, and 128"),
        ({"repeats": 0}, "at least 1"),
        ({"dtype": "f8"}, "f8"),
    ],
)
def test_invalid_plans_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(YalisError, match=message):
        plan(**fields)
