"""Step times, the search over splits, and the published study: against recorded results, brute force and the clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_parallel_memory import NINE_HEADS
from yalis.cli.main import main
from yalis.config import EngineConfig
from yalis.errors import YalisError, YalisFailure
from yalis.parallel.memory import rank_memory
from yalis.parallel.plan import Split
from yalis.perfmodel.collectives import Shape
from yalis.planner.collectives import StageGroups, same_node
from yalis.planner.communication import CommModel, libraries_of
from yalis.planner.compute import ComputeModel
from yalis.planner.estimate import decode_shape, prefill_shapes
from yalis.planner.explain import explain, spell_split
from yalis.planner.intervals import prefixes_of
from yalis.planner.job import Job, capacity
from yalis.planner.machine import load_machine
from yalis.planner.search import Choices, Planner, Slo, best_libraries, scaling, splits
from yalis.planner.step import SimRequest, StepShape
from yalis.planner.step_time import StepTimeModel, largest_slices, slowest_placement, with_control
from yalis.spec import ModelSpec, read_spec
from yalis.study import results
from yalis.study.published import figures
from yalis.study.published.jobs import Predictor, Setting, machine_of, poster, spec_of, split_of
from yalis.study.published.statements import evaluate_statements
from yalis.study.results.kinds.statements import spell_accepted, spell_agreement, spell_interval, spell_value

ROOT = Path(__file__).parents[2]
PERLMUTTER = load_machine("perlmutter")


def shape_of(name: str) -> ModelSpec:
    return read_spec(json.loads((ROOT / "benchmarks" / "shapes" / f"{name}.json").read_text()), name)


def job(requests: int = 16, prompt: int = 256, output: int = 24, **config: object) -> Job:
    settings = EngineConfig(prefix_reuse=False, **config)  # type: ignore[arg-type]
    return Job("70b", shape_of("llama-3.1-70b"), 2, [SimRequest(prompt, output)] * requests, settings)


@pytest.mark.parametrize("model", ["70b", "405b"])
def test_all_reduces_are_those_that_the_engine_counted(model: str) -> None:
    """`yalis bench slice` counted the all-reduces of decode steps on an H200."""
    recorded = results.read(ROOT / "benchmarks" / "results" / "h200" / f"slice-llama-3.1-{model}.json")
    spec = shape_of(f"llama-3.1-{model}")
    for row in recorded.rows:
        model_ = StepTimeModel(PERLMUTTER, spec, Split(row["tp"]), 2, "nccl")
        reduces = model_.all_reduces(row["batch"], row["batch"])
        assert sum(one.count for one in reduces) == row["all_reduces"]
        assert sum(one.count * one.bytes for one in reduces) == row["all_reduce_bytes"]


def test_collectives_of_a_grid_by_hand() -> None:
    """Two rows x two columns of the 70B, 10 tokens of which 3 are sampled: 80 layers."""
    spec = shape_of("llama-3.1-70b")
    model = StepTimeModel(PERLMUTTER, spec, Split(2, 2), 2, "nccl")
    found = {(one.bytes, one.count) for one in model.all_reduces(10, 3)}
    hidden, width = 8192 // 2, 28672 // 2
    qkv = (32 + 2 * 4) * 128
    assert found == {
        (10 * 8192 * 2, 1),  # embedding, over all four ranks
        (10 * hidden * 2, 2 * 79), (3 * hidden * 2, 2),  # attention output and MLP down; sampled rows at the end
        (10 * qkv * 2, 80),
        (10 * 2 * width * 2, 79), (3 * 2 * width * 2, 1),
        (10 * 4, 80), (10 * 4, 79), (3 * 4, 1),  # norms before attention, before the MLP, and at the end
    }  # fmt: skip


def test_groups_are_placed_in_the_order_of_ranks() -> None:
    groups = StageGroups.of(Split(4, 2, 2), 4, 0)
    assert groups.tp == (Shape(2, 4),)
    assert groups.rows == (Shape(2, 2),)  # ranks 0, 2, 4, 6
    assert groups.cols == (Shape(1, 2),)
    assert StageGroups.of(Split(1, 8), 4, 0).cols == (Shape(2, 4),)
    assert StageGroups.of(Split(4, 4), 4, 0).rows == (Shape(4, 1),)
    assert same_node(Split(2, 1, 2), 4, 0)
    assert not same_node(Split(4, 1, 2), 4, 0)


@pytest.mark.parametrize("split", [Split(4), Split(2, 2, 2), Split(5), Split(1, 1, 3)])
def test_a_stage_takes_as_long_as_its_slowest_rank(split: Split) -> None:
    """Nine heads, three KV heads: shards are uneven, and the largest of each kind are on different ranks."""
    spec = read_spec(NINE_HEADS, "nine heads")
    model = StepTimeModel(PERLMUTTER, spec, split, 2, "nccl")
    for shape in (decode_shape(3, 50), StepShape(0, 0, ((0, 40), (0, 24)), 1)):
        times = model.stages(shape)
        assert len(times) == split.stages
        for stage, time in enumerate(times):
            ranks = range(stage * split.per_stage, (stage + 1) * split.per_stage)
            slices = [ComputeModel(PERLMUTTER, spec, split, 2, rank).step(shape) for rank in ranks]
            slowest = max(one.matmul + one.attention + one.other for one in slices)
            assert time.matmul + time.attention + time.other == pytest.approx(slowest, rel=0.01)


def test_communication_of_a_decode_step_by_hand() -> None:
    spec, batch = shape_of("llama-3.1-70b"), 16
    comm = CommModel(PERLMUTTER, "nccl")
    (step,) = StepTimeModel(PERLMUTTER, spec, Split(16), 2, "nccl").stages(decode_shape(batch, 1000))
    group = Shape(4, 4)
    expected = 161 * comm.all_reduce(group, batch * 8192 * 2) + comm.all_gather(group, batch * 16)
    assert step.communication == pytest.approx(expected)
    first, second = StepTimeModel(PERLMUTTER, spec, Split(4, 1, 2), 2, "nccl").stages(decode_shape(batch, 1000))
    node = comm.all_reduce(Shape(1, 4), batch * 8192 * 2)
    assert first.communication == pytest.approx(81 * node + comm.send(batch * 8192 * 2, same_node=False))
    assert second.communication == pytest.approx(80 * node + comm.all_gather(Shape(1, 4), batch * 16))


def test_capacity_is_that_of_the_fullest_rank() -> None:
    work = job(max_batch_tokens=4096)
    split = Split(4, 1, 2)
    room = capacity(work, PERLMUTTER, split)
    memories = [rank_memory(work.spec, split, rank, 2, 64, work.model_len) for rank in range(8)]
    assert room.weights == max(one.weight_bytes + one.rotary.bytes for one in memories)
    left = 0.9 * float(PERLMUTTER.gpu.memory_bytes) - room.weights - room.activations
    assert room.kv_blocks == int(left) // memories[0].kv_block_bytes
    assert room.sequences == room.kv_blocks // 5  # 280 tokens in blocks of 64
    assert not capacity(work, PERLMUTTER, Split(1)).fits


def test_prefill_steps_are_filled_like_those_of_the_scheduler() -> None:
    shapes = prefill_shapes(3, 100, 128)
    assert [one.chunks for one in shapes] == [((0, 100), (0, 28)), ((28, 72), (0, 56)), ((56, 44),)]
    assert [one.sampled for one in shapes] == [1, 1, 1]


def test_every_split_uses_all_gpus_and_no_group_straddles_a_node() -> None:
    spec = shape_of("llama-3.1-70b")
    found = list(splits(spec, 24, 4))
    assert len(found) == len(set(found))
    assert {one.size for one in found} == {24}
    assert {one.per_stage for one in found} == {1, 2, 4, 8, 12, 24}
    assert Split(12, 1, 2) in found
    assert Split(4, 3, 1, 2) not in found  # three columns do not divide the hidden size
    assert all(one.stages == 3 for one in splits(spec, 24, 4, Choices(stages=3)))
    assert list(splits(spec, 24, 4, Choices(grid=(8, 1), stages=3))) == [Split(8, 1, 3)]


@pytest.mark.parametrize(
    ("split", "library"),
    [(Split(8), "nvrar"), (Split(4, 1, 4), "nccl"), (Split(4, 1, 2, 2), "nccl"), (Split(8, 1, 1, 2), "mpi")],
)
def test_the_fast_estimate_agrees_with_the_virtual_clock(split: Split, library: str) -> None:
    planner = Planner(PERLMUTTER, job(prompt=512, output=64, max_batch_tokens=8192))
    choices = Choices((split.rows, split.cols), split.stages, split.replicas, (library,))
    (one,) = planner.candidates([split.size // 4], choices)
    run = planner.replay(one)
    assert run.simulation.output_tokens == 16 * 64
    assert one.estimate.seconds == pytest.approx(run.seconds.value, rel=0.05)
    assert run.seconds.low < run.seconds.value < run.seconds.high
    breakdown = run.simulation.breakdown
    assert breakdown.total == pytest.approx(run.seconds.value)
    assert one.estimate.breakdown.total == pytest.approx(one.estimate.seconds)
    assert one.estimate.breakdown.communication == pytest.approx(breakdown.communication, rel=0.1)


def test_a_machine_without_libraries_runs_single_ranks() -> None:
    """Such as `yalis calibrate` writes on one rank."""
    h200 = load_machine("h200")
    assert not h200.libraries
    small = replace(job(), spec=shape_of("llama-3.1-8b"), model="8b")
    planner = Planner(h200, small)
    (one,) = planner.candidates([1])
    assert (one.split, one.estimate.breakdown.communication) == (Split(1), 0.0)
    replay = planner.replay(one)
    assert replay.seconds.low < one.estimate.seconds < replay.seconds.high
    with pytest.raises(YalisFailure, match=r"405b does not run on single GPUs of h200 .* copy a libraries section"):
        Planner(h200, replace(small, spec=shape_of("llama-3.1-405b"), model="405b")).candidates([1])


def test_one_micro_batch_leaves_all_stages_but_one_idle() -> None:
    split, times = Split(4, 1, 2), {}
    for count in (None, 1):
        planner = Planner(PERLMUTTER, job(output=64, micro_batches=count))
        room = capacity(planner.job, PERLMUTTER, split)
        times[count] = planner.estimate(split, "nccl", room)
    first, second = planner.model(split, "nccl").stages(decode_shape(16, 256 + 32))
    assert times[1].itl > first.total + second.total
    assert times[1].breakdown.idle > times[None].breakdown.idle


def test_the_search_ranks_and_explains() -> None:
    planner = Planner(PERLMUTTER, job())
    found = planner.candidates([1, 2])
    assert {one.library for one in found} == set(libraries_of(PERLMUTTER)) - {"nvrar-published"}
    ranked = best_libraries(found, "latency")
    assert len({(one.nodes, one.split) for one in ranked}) == len(ranked)
    assert ranked[0].estimate.latency == min(one.estimate.latency for one in found)
    cheapest = best_libraries(found, "cost")[0]
    assert cheapest.gpus * cheapest.estimate.seconds == min(one.gpus * one.estimate.seconds for one in found)
    curve = scaling(found, "latency")
    assert {one.scheme for one in curve} <= {"tp", "grid", "pp", "hybrid"}
    reasons = explain(ranked[0], found, "latency")
    assert all(sentence[0].isdigit() and "faster than" in sentence for sentence in reasons)
    assert "less" in " ".join(reasons)
    assert spell_split(Split(4, 2, 2, 3)) == "tp 4x2, pp 2, dp 3"
    assert spell_split(Split()) == "one GPU"


def test_objectives_and_limits_of_the_search() -> None:
    planner = Planner(PERLMUTTER, job())
    slowest = max(one.estimate.itl for one in planner.candidates([1]))
    fast = planner.candidates([1], slo=Slo(itl=slowest * 0.99))
    assert fast
    assert max(one.estimate.itl for one in fast) < slowest
    with pytest.raises(YalisFailure, match=r"meets --slo: the best time to first token is .* relax it"):
        planner.candidates([1], slo=Slo(ttft=1e-6))
    with pytest.raises(YalisError, match=r"no parameters for the all-reduce 'gloo'; give one of nccl, mpi, nvrar"):
        planner.candidates([1], Choices(libraries=("gloo",)))
    with pytest.raises(YalisFailure, match="cannot be split as asked"):
        planner.candidates([1], Choices(grid=(3, 1)))
    large = Planner(PERLMUTTER, replace(job(), spec=shape_of("llama-3.1-405b"), model="405b"))
    with pytest.raises(YalisFailure, match=r"405b with one sequence of 280 tokens does not fit 2 nodes of perlmutter"):
        large.candidates([1, 2])


def test_a_larger_quantity_widens_the_interval() -> None:
    planner = Planner(PERLMUTTER, job())
    one = next(one for one in planner.candidates([2], Choices(grid=(8, 1), libraries=("nccl",))))
    narrow = planner.interval(one)
    path = "libraries.nccl.net_hop_extra_s"
    hop = PERLMUTTER.quantities()[path]
    wide = Planner(PERLMUTTER.with_quantity(path, replace(hop, high=10 * hop.high)), job()).interval(one)
    assert narrow.value == wide.value == one.estimate.seconds
    assert wide.high > narrow.high
    assert wide.low == narrow.low


def test_an_interval_with_nvrar_includes_the_gathers_and_sends_of_nccl() -> None:
    planner = Planner(PERLMUTTER, job())
    one = next(one for one in planner.candidates([2], Choices(grid=(4, 1), stages=2, libraries=("nvrar",))))
    path = "libraries.nccl.net_hop_extra_s"
    hop = PERLMUTTER.quantities()[path]
    wide = Planner(PERLMUTTER.with_quantity(path, replace(hop, high=100 * hop.high)), job()).interval(one)
    assert wide.high > planner.interval(one).high
    assert set(prefixes_of("nvrar")) - set(prefixes_of("nccl")) == {"libraries.nvrar."}


def test_decode_steps_are_padded_to_the_sizes_that_the_engine_records() -> None:
    """The largest recorded step has --max-num-seqs sequences: 66 of 66 are not padded to 96."""
    planner = Planner(PERLMUTTER, job(max_num_seqs=66))
    (one,) = planner.model(Split(8), "nccl").stages(decode_shape(66, 100))
    exact = ComputeModel(PERLMUTTER, planner.job.spec, Split(8), 2, max_num_seqs=66).step(decode_shape(66, 100))
    padded = ComputeModel(PERLMUTTER, planner.job.spec, Split(8), 2).step(decode_shape(66, 100))
    assert one.other == exact.other < padded.other


def test_largest_slices_are_found_once() -> None:
    spec = read_spec(NINE_HEADS, "nine heads")
    assert largest_slices(spec, Split(3), 0).keys() == {0}
    assert len(largest_slices(spec, Split(4), 0)) == 2  # most heads on rank 0, more KV heads on rank 2


def test_shapes_of_the_study_are_those_of_the_benchmarks() -> None:
    for name in ("llama-3.1-70b", "llama-3.1-405b"):
        shape = shape_of(name)
        assert replace(spec_of(name), rope=shape.rope, layer_ropes=shape.layer_ropes) == shape
    assert split_of("hybrid", 32, 4) == Split(4, 1, 8)


def test_committed_statements_are_what_the_model_predicts() -> None:
    """Statements that values were fitted to must stay within 10%, which is no evidence for them."""
    rows = results.read(ROOT / "benchmarks/results/scale/statements.json").rows
    committed = {row["name"]: row for row in rows}
    page = (ROOT / "docs" / "scale.md").read_text()
    for row in rows:
        cells = [row["name"], row["predicted"], spell_value(row), spell_interval(row), spell_accepted(row)]
        cells += [spell_agreement(row), "yes" if row["fitted"] else "no"]
        assert f"| {' | '.join(cells)} |" in page
    for row in evaluate_statements(Predictor()):
        before = committed.pop(row["name"])
        assert row["value"] == (None if before["value"] is None else pytest.approx(before["value"], rel=0.01))
        assert row["agrees"] == before["agrees"]
        assert not row["fitted"] or row["agrees"]
    assert not committed


def test_scaling_figure_of_the_study() -> None:
    """The estimate of the study's settings agrees with the virtual clock, also where the prefill is one step."""
    predictor = Predictor()
    setting = Setting(machine_of("perlmutter"), "llama-3.1-70b", replace(poster(), output_len=40), Split(8), "nccl")
    one = predictor.candidate(setting)
    assert one is not None
    run = predictor.planner(setting).replay(one)
    assert run.simulation.steps == 40
    assert run.seconds.value == pytest.approx(one.estimate.seconds, rel=0.02)
    rows = list(figures.breakdowns(predictor))
    assert len(rows) == 16
    assert with_control(PERLMUTTER).quantities().keys() > PERLMUTTER.quantities().keys()


#: Four experts of which two serve a token, and a shared one, in the second and third of four layers.
WITH_EXPERTS = {
    **NINE_HEADS, "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 4, "mlp_only_layers": [0, 3],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 13,
}  # fmt: skip


WHOLE_EXPERTS = {**WITH_EXPERTS, "num_experts": 5}  # --expert-parallel: three on the first row, two on the second


@pytest.mark.parametrize(
    ("config", "grid"),
    [(NINE_HEADS, (3, 2)), (NINE_HEADS, (1, 4)), (WITH_EXPERTS, (2, 2)), (WHOLE_EXPERTS, (2, 2))],
)
def test_all_reduces_of_a_grid_are_those_that_the_engine_counts(
    config: dict[str, Any], grid: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    work = "--batch 2 --prompt-len 8 --output-len 4 --repeats 1 --warmup 0 --threads 1 --device cpu --json"
    whole = config is WHOLE_EXPERTS
    args = ["--model", str(path), "--tp", "{}x{}".format(*grid), *["--expert-parallel"] * whole, *work.split()]
    assert main(["bench", "slice", *args]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    reduces = StepTimeModel(
        PERLMUTTER, read_spec(config, "model"), Split(*grid, expert_parallel=whole), 4, "nccl"
    ).all_reduces(2, 2)
    assert sum(one.count for one in reduces) == row["all_reduces"]
    assert sum(one.count * one.bytes for one in reduces) == row["all_reduce_bytes"]


@pytest.mark.parametrize("machine", ["alps", "perlmutter"])
def test_splits_of_a_mixture_of_experts_are_ranked(machine: str) -> None:
    spec = shape_of("qwen3-235b-a22b")
    assert spec.moe is not None
    planner = Planner(load_machine(machine), Job("235b", spec, 2, [SimRequest(512, 64)] * 16))
    ranked = best_libraries(planner.candidates([2, 4], Choices(libraries=("nvrar",))), "latency")
    assert {one.scheme for one in ranked} >= {"tp", "grid", "pp", "hybrid"}
    assert {spell_split(one.split) for one in ranked} >= {"tp 8", "tp 8 ep", "tp 4x2 ep", "tp 8 ep, dp 2", "pp 16"}
    assert not [one for one in ranked if one.split.rows == 1 and one.split.expert_parallel]
    best = ranked[0]
    assert best.estimate.seconds < best_libraries(ranked[1:], "latency")[0].estimate.seconds
    assert best.capacity.weights > 2 * 235e9 / best.split.per_replica
    # The bounds of what is assumed about experts count: the interval is wider than that of the machine's quantities.
    whole = planner.interval(best)
    planner.assumptions = {}
    narrow = planner.interval(best)
    assert whole.high - whole.value > 1.2 * (narrow.high - narrow.value)
    assert whole.value == narrow.value


def test_replicas_that_start_in_the_middle_of_a_node() -> None:
    """On nodes of 4 GPUs, pipelines of 3 stages: the first has two sends inside its node, the second only one."""
    split = Split(1, 1, 3, 4)
    near = [[same_node(split, 4, stage, first) for stage in range(2)] for first in (0, 3, 2, 1)]  # of the replicas
    assert near == [[True, True], [False, True], [True, False], [True, True]]
    assert slowest_placement(split, 4) in (2, 3)
    assert slowest_placement(replace(split, replicas=1), 4) == 0
    assert slowest_placement(Split(2, 1, 2, 8), 4) == 0  # replicas fill nodes
    spec, step = shape_of("llama-3.1-8b"), decode_shape(16, 100)
    alone, four = (
        StepTimeModel(PERLMUTTER, spec, replace(split, replicas=count), 2, "nccl").stages(step) for count in (1, 4)
    )
    assert sum(one.communication for one in four) > sum(one.communication for one in alone)
