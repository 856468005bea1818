"""The kernel benchmark on the CPU: what it measures, what it refuses, and that it notices a wrong kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.perfmodel.floors import ModelDims
from yalis.study import bandwidth
from yalis.study.kernels import benchmark, cases
from yalis.study.kernels.backends import Kernels, Native
from yalis.study.kernels.cases import KernelsPlan, list_trials, matrices

TINY = ModelDims(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300, tied=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_MOST_COPIES", 3)
    monkeypatch.setattr(benchmark, "_ENOUGH_S", 0.0)
    monkeypatch.setattr(bandwidth, "measure", lambda device, dtype: bandwidth.DeviceRates(1e9, 1e12))


def plan(**given: object) -> KernelsPlan:
    small = {"dims": TINY, "rows": (1, 5), "layers": 1, "prompts": 2, "prompt_len": 40, "repeats": 1, "device": "cpu"}
    return KernelsPlan(**{**small, **given})  # type: ignore[arg-type]


def test_every_operation_is_right_and_has_its_floor() -> None:
    heard: list[str] = []
    result = benchmark.measure(plan(), "yalis bench kernels", heard.append)
    found = {(row["kernel"], row["shape"].split()[0]) for row in result.rows}
    assert {kernel for kernel, _ in found} == {
        "linear", "linear, gate", "norm", "add, norm", "gate", "rope, write", "feed", "take", "argmax",
        "argmax, settle", "attention", "prompt attention", "step",
    }  # fmt: skip
    assert {shape for kernel, shape in found if kernel == "linear"} == set(matrices(TINY))
    assert len(result.rows) == 2 * (6 + 4 + 4 + 1 + 1) + 1
    assert len(heard) == 1 + len(result.rows)
    for row in result.rows:
        assert row["status"] == "ok"
        assert row["error"] < 1e-5
        assert 0 < row["us_low"] <= row["us"] <= row["us_high"]
        assert row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"])
    head = next(row for row in result.rows if row["shape"] == "head 300x64" and row["rows"] == 5)
    assert head["floor_us"] == pytest.approx(1e6 * 4 * (300 * 64 + 5 * 64 + 5 * 300) / 1e9)
    step = next(row for row in result.rows if row["kernel"] == "step" and row["rows"] == 1)
    numbers = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96 + 300 * 64
    assert step["floor_us"] == pytest.approx(1e6 * 4 * numbers / 1e9)
    # Two prompts fill three blocks each: token n sees n keys, and each costs two products of a head's size.
    prompt = next(row for row in result.rows if row["kernel"] == "prompt attention")
    assert (prompt["shape"], prompt["rows"]) == ("2 x 48 tokens", 96)
    assert prompt["gflop_per_s"] * prompt["us"] * 1e3 == pytest.approx(2 * 4 * 4 * 16 * sum(range(1, 49)))
    assert prompt["gb_per_s"] * prompt["us"] * 1e3 == pytest.approx(4 * 96 * 16 * (4 + 4 + 2 + 2))


class Unwritten(Native):
    """Leaves the last output as the memory was."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        y = super().gated(gate_up)
        out = torch.empty_like(y)
        out[:, :-1] = y[:, :-1]
        return out


class WrongSum(Native):
    def add_rms_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = super().add_rms_norm(x, branch, weight)
        return normed, x


class Off(Native):
    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return super().argmax(logits) + 1


def test_a_wrong_kernel_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "our_kits", lambda device: [("", Unwritten())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["gate"]["status"] == "wrong: off by nan"
    assert rows["gate"]["us"] is None
    assert rows["linear, gate"]["status"] == "wrong: off by nan"
    assert rows["linear"]["status"] == "ok"
    monkeypatch.setattr(benchmark, "our_kits", lambda device: [("", WrongSum())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["norm"]["status"] == "ok"
    assert rows["add, norm"]["status"].startswith("wrong: off by")
    monkeypatch.setattr(benchmark, "our_kits", lambda device: [("", Off())])
    rows = {row["kernel"]: row for row in benchmark.measure(plan(rows=(1,)), "").rows}
    assert rows["argmax"]["status"] == "wrong: off by 1.0e+00"
    monkeypatch.setitem(benchmark.DIMS, "cpu", TINY)
    words = f"bench kernels --device cpu --rows 1 --layers 1 --prompt-len 40 --repeats 1 --out {tmp_path}"
    assert main(words.split()) == 1
    out, err = capsys.readouterr()
    assert "wrong: off by 1.0e+00\n" in out
    assert "1 of 17 kernels did not give what their reference gives, the first argmax (300, 1 rows): off by" in err
    assert len(list(tmp_path.iterdir())) == 1


def test_a_kernel_is_told_by_what_it_is_bound_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(benchmark.DIMS, "cpu", TINY)
    words = "bench kernels --device cpu --rows 1 --layers 1 --prompts 1 --prompt-len 40 --repeats 1"
    for rates, ceilings, unit in (
        ((1e15, 1e12, "a kernel"), "read 1000.00 TB/s (a kernel), matmul 1.00 TFLOP/s", "FLOP/s"),
        ((1e9, 1e15, "another"), "read 1.0 GB/s (another), matmul 1000.00 TFLOP/s", "B/s"),
    ):
        monkeypatch.setattr(bandwidth, "measure", lambda *_, given=rates: bandwidth.DeviceRates(*given))
        assert main(words.split()) == 0
        told = capsys.readouterr().out.splitlines()
        assert told[1] == f"measured here: {ceilings}"
        speeds = {line[:26].rstrip(): line.split()[-2] for line in told[3:]}
        assert speeds["prompt attention"][1:] == speeds["linear"][1:] == unit
        assert speeds["argmax"].endswith("B/s")  # which multiplies nothing


def test_the_triton_kernels_pass_the_same_check() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    seen = set()
    for trial in list_trials(plan(rows=(3,), context=70), TINY, CPU, torch.float32):
        if trial.kernel not in seen:
            assert benchmark.find_error(trial, Kernels()) < 1e-5, trial.kernel
        seen.add(trial.kernel)


def test_a_rate_above_the_measured_one_is_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda device, dtype: bandwidth.DeviceRates(1.0, 1e12))
    monkeypatch.setitem(cases._SPREAD_BYTES, "cpu", 1)
    result = benchmark.measure(plan(rows=(1,)), "")
    assert max(row["share_of_floor"] for row in result.rows) <= 1.0 + 1e-9
    assert result.parameters["read_bytes_per_s"] > 1.0
    assert result.parameters["read_by"].endswith("1 rows")


def test_the_best_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, ours = bandwidth.DeviceRates(3.0, 5.0, "torch.sum"), bandwidth.DeviceRates(4.0, 2.0, "ours")
    assert torchs.best(ours) == ours.best(torchs) == bandwidth.DeviceRates(4.0, 5.0, "ours")
    # A GPU's readers, here on a CPU: what they tell is bytes a second.
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setattr(bandwidth, "_HEAD", (256, 1024))
    seconds = iter([4.0, 1.0, 2.0, 2.0, 0.5])
    monkeypatch.setattr(bandwidth, "_best_seconds", lambda kernel, device: next(seconds))
    found = bandwidth.torch_reads(CPU) | bandwidth.product_reads(CPU)
    assert list(found) == ["torch.sum", "torch.max", "torch.mv", "torch.dot", "linear, one row"]
    assert list(found.values()) == [2**20, 2**22, 2**21, 2**21, 2**23]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rows": (0,)}, "1 to 64"),
        ({"rows": (65,)}, "1 to 64, or 128"),
        ({"repeats": 0}, "at least 1"),
        ({"dtype": "f8"}, "f8"),
    ],
)
def test_refusals(given: dict[str, object], told: str) -> None:
    with pytest.raises(YalisError, match=told):
        plan(**given)
