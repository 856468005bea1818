"""The compute model of the planner: kernels, steps, and its error on recorded results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.kernels.gpu_limits import GpuLimits
from yalis.parallel.plan import Split
from yalis.perfmodel.experts import distinct_experts
from yalis.planner import kernel_times
from yalis.planner.compute import ComputeModel
from yalis.planner.efficiency import Efficiencies, load_efficiencies
from yalis.planner.expert_times import ASSUMPTIONS, ExpertLoad, expert_load
from yalis.planner.kernel_times import KernelTimes, plan_splits
from yalis.planner.machine import Machine, load_machine
from yalis.planner.quantity import Quantity
from yalis.planner.step import StepShape
from yalis.scheduling.plan import StepOutput
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.spec import read_spec
from yalis.study import planner_accuracy, results
from yalis.types import SamplingParams
from yalis.workloads import Workload

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks/results/h200"
GB = 1e9


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # results name their models relative to it


def model(name: str, split: Split, machine: str = "h200", **settings: object) -> ComputeModel:
    spec = planner_accuracy.read_model(f"benchmarks/shapes/{name}.json")
    return ComputeModel(load_machine(machine), spec, split, 2, **settings)  # type: ignore[arg-type]


def decode(batch: int, context: int) -> StepShape:
    return StepShape(batch, batch * context, (), batch)


@pytest.fixture(scope="module")
def predictions() -> list[planner_accuracy.Prediction]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        machine = load_machine("h200")
        return planner_accuracy.predict_all(
            planner_accuracy.read_points(planner_accuracy.read_files([H200], machine)), machine
        )


def test_validation_on_the_h200(predictions: list[planner_accuracy.Prediction]) -> None:
    validation = [one for one in predictions if not one.calibration]
    summary = planner_accuracy.summarize(validation)
    assert summary.count >= 100
    assert summary.mean <= 0.03
    assert summary.worst <= 0.20
    for source in ("latency-llama-3.2-1b", "latency-qwen2.5-32b", "slice-llama-3.1-70b", "slice-llama-3.1-405b"):
        chosen = [one for one in validation if one.point.source == source and one.point.phase == "decode step"]
        assert chosen, source
        assert planner_accuracy.summarize(chosen).mean <= 0.06, source


def test_calibration_rows_exist_and_the_rest_is_larger(predictions: list[planner_accuracy.Prediction]) -> None:
    table = load_efficiencies("h200")
    assert sum(one.calibration for one in predictions) == len(table.calibration)
    assert len(predictions) > 4 * len(table.calibration)
    for row in table.excluded:
        assert row["reason"]
        assert row not in table.calibration


def test_cold_first_tokens_are_left_out() -> None:
    points = planner_accuracy.read_points(
        planner_accuracy.read_files([H200 / "latency-llama-3.1-8b-contexts.json"], load_machine("h200"))
    )
    cold = [(str(point.case), point.phase) for point in points if point.excluded]
    assert cold == [("1x1024x33", "first token")]


def test_committed_accuracy_result_is_current(predictions: list[planner_accuracy.Prediction]) -> None:
    stored = {
        (row["source"], row["tp"], row["batch"], row["prompt_len"], row["output_len"], row["phase"]): row
        for row in results.read(H200 / "accuracy.json").rows
    }
    assert len(stored) == len(predictions)
    for one in predictions:
        point = one.point
        case = point.case
        row = stored[point.source, point.split.per_stage, case.batch, case.prompt_len, case.output_len, point.phase]
        assert row["predicted_ms"] == pytest.approx(1e3 * one.seconds, rel=1e-3)


def table_of_ones() -> Efficiencies:
    """Efficiencies of 1 and no fixed times, so that times are plain quotients."""
    table = load_efficiencies("h200")
    fixed = {name: 1.0 if name.endswith("_eff") else 0.0 for name in table.parameters}
    return table.with_values(fixed | {"attention_merge_wide": 1.0})


def test_times_without_overheads_are_rooflines() -> None:
    kernels = KernelTimes(table_of_ones(), 1000 * GB, 1e15, GpuLimits(132, 227 << 10, True), 2)
    # 128256 x 4096 weights of two bytes at 1000 GB/s
    assert kernels.linear(1, 128256, 4096) == pytest.approx(128256 * 4096 * 2 / 1e12)
    assert kernels.elementwise(64, 8192) == pytest.approx(64 * 8192 * 2 / 1e12)
    # 132 tiles of 192 x 192 outputs fill the SMs once. Reading takes less than a tenth of the time.
    kernels = replace(kernels, read=20_000 * GB)
    assert kernels.gemm(192 * 12, 192 * 11, 8192) == pytest.approx(2 * 2304 * 2112 * 8192 / 1e15, rel=1e-3)
    # one token more than a wave of tiles needs another wave
    assert kernels.gemm(192 * 12 + 1, 192 * 11, 8192) > 1.05 * kernels.gemm(192 * 12, 192 * 11, 8192)


def test_split_plan_matches_the_kernel() -> None:
    # min(1024 * 528 / (1024 * 8), sqrt(1024) / 2, 1024 / 32) = 16 splits of 64 keys
    assert plan_splits(1024, 1024 * 8, 528) == (16, 64)
    # 2496 * 528 / (16 * 2496) = 33, sqrt(2496) / 2 = 24; 2496 / 24 = 104 keys become 128, so 20 splits
    assert plan_splits(2496, 16 * 2496, 528) == (20, 128)
    assert plan_splits(1, 1, 528) == (1, 32)


def test_constants_are_those_of_the_attention_kernels() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from yalis.kernels import paged_attention

    limits = GpuLimits(132, 227 << 10, True)
    assert paged_attention.decode_config(4, 128, torch.bfloat16).block_n == kernel_times.ATTENTION_BLOCK
    assert paged_attention.prefill_config(4, 128, torch.bfloat16, limits).block_m == kernel_times.PREFILL_ROWS
    assert paged_attention.PROGRAMS_PER_SM == kernel_times.PROGRAMS_PER_SM
    assert paged_attention._MERGE_ELEMENTS == kernel_times.MERGE_ELEMENTS


@pytest.mark.parametrize(
    ("shape", "replayed"),
    [
        (decode(16, 200), True),
        (decode(512, 200), True),
        (decode(513, 200), False),
        (StepShape(chunks=((0, 512),), sampled=1), True),
        (StepShape(chunks=((0, 513),), sampled=1), False),
        (StepShape(chunks=((0, 100),), sampled=0), False),  # a chunk of a longer prompt
        (StepShape(chunks=((0, 100), (0, 100)), sampled=2), False),
        (StepShape(4, 400, ((0, 100),), 5), False),
    ],
)
def test_which_steps_are_replayed(shape: StepShape, replayed: bool) -> None:
    assert model("llama-3.1-8b", Split()).step(shape).replayed == replayed


def test_padding_to_captured_sizes() -> None:
    """9 sequences are padded to 16, with the work of 16 except for attention."""
    nine, sixteen = (model("llama-3.1-8b", Split()).step(decode(batch, 200)) for batch in (9, 16))
    assert nine.matmul == sixteen.matmul
    assert nine.attention < sixteen.attention
    # The largest captured size is max_num_seqs.
    assert not model("llama-3.1-8b", Split(), max_num_seqs=8).step(decode(9, 200)).replayed


def test_more_work_takes_longer() -> None:
    rank = model("llama-3.1-70b", Split(8))
    times = [rank.step(decode(batch, 1000)).device for batch in (1, 2, 16, 32, 64, 96, 256, 512)]
    assert times == sorted(times)
    times = [rank.step(decode(16, context)).device for context in (128, 1000, 4000, 16000, 64000)]
    assert times == sorted(times)
    times = [rank.step(StepShape(chunks=((0, count),), sampled=1)).device for count in (16, 128, 512, 2048, 8192)]
    assert times == sorted(times)
    times = [rank.step(StepShape(chunks=((first, 2048),), sampled=1)).attention for first in (0, 2048, 8192)]
    assert times == sorted(times)
    assert (
        rank.step(StepShape(chunks=((0, 2048),), sampled=0)).matmul
        < rank.step(StepShape(chunks=((0, 2048),), sampled=1)).matmul
    )


def test_repeated_kv_heads_cost_memory_traffic() -> None:
    """70B has 8 KV heads: a rank of tp 16 or 32 holds one, as a rank of tp 8 does, and reads as much of the cache."""
    long = decode(64, 16000)
    eight, sixteen, four = (model("llama-3.1-70b", Split(tp)).step(long).attention for tp in (8, 16, 4))
    assert sixteen == pytest.approx(eight, rel=0.05)
    assert four == pytest.approx(2 * eight, rel=0.15)


def test_slowest_rank_of_an_uneven_split() -> None:
    """64 heads over 3 ranks: 22, 21 and 21."""
    first, last = (model("llama-3.1-70b", Split(3), rank=rank).step(decode(16, 500)) for rank in (0, 2))
    assert first.device > last.device


def test_pipeline_stages_share_layers_and_the_last_has_the_head() -> None:
    whole = model("llama-3.1-70b", Split(8)).step(decode(16, 500)).device
    first, last = (model("llama-3.1-70b", Split(8, 1, 2), rank=rank).step(decode(16, 500)).device for rank in (0, 8))
    assert first < last
    assert first + last == pytest.approx(whole, rel=0.03)


def test_other_gpus_scale_by_their_rates() -> None:
    machine = load_machine("h200")
    half = machine.with_quantity(
        "gpu.read_bytes_per_s", Quantity.of(machine.gpu.read_bytes_per_s.value / 2, "assumed", "a test")
    )
    spec = planner_accuracy.read_model("benchmarks/shapes/llama-3.1-8b.json")
    fast, slow = (ComputeModel(one, spec, Split(), 2).step(decode(1, 200)) for one in (machine, half))
    assert 1.8 < slow.matmul / fast.matmul < 2.0  # fixed times do not grow
    # An A100 has 108 SMs and no TMA.
    assert load_machine("perlmutter").gpu.num_sms == 108
    assert not load_machine("perlmutter").gpu.has_tma


def test_eager_steps_wait_for_their_host() -> None:
    short = model("llama-3.1-8b", Split()).step(StepShape(chunks=((0, 128), (0, 128)), sampled=2))
    assert short.alone == pytest.approx(short.host)
    assert short.host > short.device
    long = model("llama-3.1-8b", Split()).step(StepShape(chunks=((0, 8000), (0, 8000)), sampled=2))
    assert long.alone == pytest.approx(long.device + long.host_ahead)
    assert long.back_to_back == long.device


@pytest.mark.parametrize(("case", "limit"), [((16, 2480), 16384), ((16, 2480), 40960), ((3, 500), 700), ((4, 64), 64)])
def test_prefill_steps_are_those_of_the_scheduler(case: tuple[int, int], limit: int) -> None:
    batch, prompt_len = case
    scheduler = Scheduler(SchedulerConfig(64, limit, 4096, 64, prefix_reuse=False), num_blocks=4096)
    for index in range(batch):
        scheduler.add(Request(index, [1] * prompt_len, SamplingParams(max_tokens=100, ignore_eos=True, seed=0)))
    expected: list[StepShape] = []
    done = 0
    while done < batch:
        plan = scheduler.schedule()
        assert plan is not None
        expected.append(StepShape.of(plan))
        done += sum(step.samples and step.start + step.num_tokens == prompt_len for step in plan.sequences)
        tokens = {step.request_id: 1 for step in plan.sequences if step.samples}
        scheduler.commit(StepOutput(plan.step_id, tokens))
    assert planner_accuracy.prefill_shapes(Workload(batch, prompt_len, 100), limit) == expected


def test_cpu_table_repeats_its_calibration() -> None:
    data = load_machine("h200").to_json()
    data["gpu"] |= {"efficiencies": "cpu", "name": "two cores"}
    machine = Machine.from_json(data, "cpu")
    source = planner_accuracy.read_files([ROOT / "benchmarks/results/cpu/latency-smollm2-135m-fp32.json"], machine)
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
             "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
             "rms_norm_eps": 1e-5}  # fmt: skip
    for point in planner_accuracy.read_points(source):
        spec = read_spec(shape, "smollm2")
        local = replace(
            machine,
            gpu=replace(
                machine.gpu,
                read_bytes_per_s=Quantity.of(point.read_bytes_per_s, "measured", "file"),
                matmul_flops_per_s=Quantity.of(point.matmul_flops_per_s, "measured", "file"),
            ),
        )
        rank = ComputeModel(local, spec, Split(), 4)
        if point.phase == "decode step":
            seconds = rank.step(planner_accuracy.decode_shape(point.case)).back_to_back
        else:
            (prefill,) = planner_accuracy.prefill_shapes(point.case, point.max_batch_tokens)
            seconds = rank.step(prefill).alone
        assert seconds == pytest.approx(point.measured, rel=0.05)


def test_bench_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(H200 / "slice-llama-3.1-70b.json")
    assert main(["bench", "accuracy", file, "--machine", "h200", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "decode step, not fitted: " in shown
    (written,) = tmp_path.glob("accuracy-*.json")
    result = results.read(written)
    assert len(result.rows) == 32
    kind = results.kind_of(result)
    pytest.importorskip("matplotlib")
    assert kind.plot(result) is not None
    assert kind.plot(results.read(H200 / "aiconfigurator.json")) is not None


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", "missing.json"]) != 0
    assert "there is no missing.json; give results of" in capsys.readouterr().err
    assert main(["bench", "accuracy", str(H200 / "kernels.json")]) != 0
    assert "there is no latency or slice result" in capsys.readouterr().err
    with pytest.raises(YalisError, match=r"unknown efficiency table 'h300'; set gpu\.efficiencies"):
        load_efficiencies("h300")
    with pytest.raises(YalisError, match="device is 'tpu'"):
        Efficiencies.from_json({"device": "tpu", "parameters": {}}, "x")
    data = load_machine("h200").to_json()
    data["gpu"]["num_sms"] = "many"
    with pytest.raises(YalisError, match=r"gpu\.num_sms is 'many'"):
        Machine.from_json(json.loads(json.dumps(data)), "x")


def without_overheads(name: str, split: Split = Split(), **assumed: float) -> ComputeModel:  # noqa: B008  it is frozen
    """A model with efficiencies of 1, no fixed times, and instant matmuls."""
    machine = load_machine("h200")
    machine = machine.with_quantity("gpu.matmul_flops_per_s", Quantity.of(1e30, "assumed", "a test"))
    values = {"expert_read_eff": 1.0, "expert_matmul_eff": 1.0, "expert_s": 0.0, "route_s": 0.0, **assumed}
    assumptions = {**ASSUMPTIONS, **{name: Quantity.of(value, "assumed", "") for name, value in values.items()}}
    spec = planner_accuracy.read_model(f"benchmarks/shapes/{name}.json")
    return ComputeModel(machine, spec, split, 2, efficiencies=table_of_ones(), assumptions=assumptions)


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_step_reads_the_experts_that_it_reaches(batch: int) -> None:
    """Only the time of reading is left, which is at least that of the floor, and more by what matmuls write."""
    rank = without_overheads("qwen3-30b-a3b")
    read = 2 * (rank.dims.read_params(batch) + rank.dims.head_params)
    seconds = read / load_machine("h200").gpu.read_bytes_per_s.value
    assert seconds < rank.step(decode(batch, 100)).matmul < 1.1 * seconds
    collapsed = without_overheads("qwen3-30b-a3b", experts_reached=0.0)  # then all tokens reach the same experts
    assert collapsed.step(decode(batch, 100)).matmul < (1.05 if batch == 1 else 0.5) * seconds


def test_sliced_and_whole_experts() -> None:
    """Slices share the work evenly. Of whole experts one rank has most, and the others wait for it."""
    whole = without_overheads("qwen3-30b-a3b")
    slices = without_overheads("qwen3-30b-a3b", Split(8))
    assert slices.dims.expert_width == 768 // 8
    layer = ExpertLoad(16 * 8, distinct_experts(128, 8, 16))
    assert expert_load(whole.dims, 1, 16) == expert_load(slices.dims, 8, 16) == layer
    dims = replace(slices.dims, experts=16, top_k=1.0, expert_width=768)  # 16 of 128 experts, each whole
    own = expert_load(dims, 8, 16)
    assert layer.reached / 8 * 1.2 < own.reached <= 16
    assert layer.pairs / 8 * 1.2 < own.pairs < layer.pairs
    worse = expert_load(dims, 8, 16, {**ASSUMPTIONS, "expert_imbalance": Quantity.of(1.5, "assumed", "")})
    assert worse.reached == 16  # all that it has
    assert worse.pairs == pytest.approx(1.5 * own.pairs)
    times = []
    for one in (slices.dims, dims):
        slices.dims = one
        times.append(slices.step(decode(16, 100)).matmul)
    assert 1.1 < times[1] / times[0] < 1.5
    assert own.reached / layer.reached * 8 == pytest.approx(1.25, abs=0.1)


def test_times_of_a_mixture_of_experts_grow_with_the_work() -> None:
    rank = model("qwen3-235b-a22b", Split(8))
    times = [rank.step(decode(batch, 1000)).device for batch in (1, 2, 8, 16, 64, 256)]
    assert times == sorted(times)
    assert times[2] > 2 * times[0]  # 8 tokens reach six times the experts of one
    times = [rank.step(StepShape(chunks=((0, count),), sampled=1)).device for count in (16, 128, 2048, 8192)]
    assert times == sorted(times)
    last = model("qwen3-235b-a22b", Split(8, 1, 2), rank=8).step(decode(16, 500)).device
    both = model("qwen3-235b-a22b", Split(8, 1, 2)).step(decode(16, 500)).device + last
    assert both == pytest.approx(model("qwen3-235b-a22b", Split(8)).step(decode(16, 500)).device, rel=0.03)


def test_experts_on_a_cpu() -> None:
    data = load_machine("h200").to_json()
    data["gpu"] |= {"efficiencies": "cpu", "name": "two cores"}
    spec = planner_accuracy.read_model("benchmarks/shapes/qwen3-30b-a3b.json")
    rank = ComputeModel(Machine.from_json(data, "cpu"), spec, Split(), 4)
    one, four = rank.step(decode(1, 10)), rank.step(decode(4, 10))
    read = 4 * (rank.dims.active_params + rank.dims.head_params)
    assert one.matmul == pytest.approx(read / (load_machine("h200").gpu.read_bytes_per_s.value * 0.9))
    assert 2.5 < four.matmul / one.matmul < 4
    assert one.replayed
