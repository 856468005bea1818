"""The virtual clock: hand-computed timelines, and the same steps as a real engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams
from yalis.cli.main import main
from yalis.engine.replica_ranks import ReplicaRanks
from yalis.errors import YalisError
from yalis.planner.clock import SimEngine, Simulation, simulate
from yalis.planner.efficiency import load_efficiencies
from yalis.planner.machine import Machine, load_machine
from yalis.planner.step import SimRequest, StepShape, StepTime
from yalis.scheduling import settings
from yalis.scheduling.plan import StepPlan
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.spec import read_spec
from yalis.study import bandwidth, efficiency_fit, planner_accuracy, results
from yalis.study import replay as replay_module
from yalis.study.efficiency_fit import fit_cpu
from yalis.study.planner_accuracy import predict, read_points
from yalis.study.replay import replay
from yalis.study.results import StoredResult
from yalis.workloads import Workload

PREFILL, DECODE, HOST = 0.1, 0.01, 0.002


def scheduler(**fields: Any) -> SchedulerConfig:
    """As on a GPU without a pipeline, unless `fields` say otherwise."""
    values: dict[str, Any] = {
        "max_num_seqs": 8, "max_batch_tokens": 64, "max_model_len": 128, "block_size": 4, "max_in_flight": 2,
        "feed_on_device": True, "prefix_reuse": False,
    }  # fmt: skip
    return SchedulerConfig(**{**values, **fields})


def times(prefill: float = PREFILL, decode: float = DECODE, stages: int = 1) -> Callable[[StepShape], list[StepTime]]:
    return lambda shape: [StepTime(matmul=prefill if shape.chunks else decode)] * stages


def engine(config: SchedulerConfig, host: float = 0.0, blocks: int = 64, **fields: Any) -> SimEngine:
    given = {"stage_times": times(), **fields}
    return SimEngine(config, blocks, host_seconds=lambda shape: host, **given)


def on_cpu(**fields: Any) -> SchedulerConfig:
    return scheduler(max_in_flight=1, feed_on_device=False, **fields)


def run(requests: list[SimRequest], sim: SimEngine, replicas: int = 1) -> tuple[Simulation, list[StepShape]]:
    shapes: list[StepShape] = []
    return simulate(requests, sim, replicas, lambda _, shape: shapes.append(shape)), shapes


# One replica


def test_one_request() -> None:
    done, shapes = run([SimRequest(10, 5, tag="a")], engine(on_cpu()))
    assert shapes == [StepShape(0, 0, ((0, 10),), 1), *(StepShape(1, 10 + n, (), 1) for n in range(1, 5))]
    (request,) = done.requests
    assert (request.output_tokens, request.tag, done.steps, done.preemptions) == (5, "a", 5, 0)
    assert request.ttft == pytest.approx(PREFILL)
    assert request.itl == pytest.approx(DECODE)
    assert done.seconds == done.breakdown.total == done.breakdown.matmul == pytest.approx(PREFILL + 4 * DECODE)
    assert done.tokens_per_s == pytest.approx(5 / done.seconds)
    assert done.peak_kv_blocks == 4  # 14 of the 15 tokens were computed, in blocks of 4


def test_the_host_of_a_cpu_adds_to_every_step() -> None:
    done, _ = run([SimRequest(10, 5)], engine(on_cpu(), HOST))
    assert done.seconds == pytest.approx(PREFILL + 4 * DECODE + 5 * HOST)
    assert done.breakdown.idle == pytest.approx(5 * HOST)


def test_a_gpu_hides_its_host_behind_the_step_before() -> None:
    # The eager prefill starts at once. Decode step k + 1 is launched while step k runs, so no step waits for the host.
    done, _ = run([SimRequest(10, 5)], engine(scheduler(), HOST))
    assert done.seconds == pytest.approx(PREFILL + 4 * DECODE)
    assert done.breakdown.idle == pytest.approx(0.0, abs=1e-12)


def test_steps_bound_by_the_host_take_its_time() -> None:
    host = 3 * DECODE
    # 0 .. host: the host launches the prefill, which ends at PREFILL. host .. 2 host: it launches decode step 1, which
    # runs from PREFILL on. From PREFILL on it launches steps 2, 3 and 4, which start once they are launched.
    done, _ = run([SimRequest(10, 5)], engine(scheduler(), host))
    assert done.requests[0].first_token == pytest.approx(PREFILL)
    assert done.seconds == pytest.approx(PREFILL + 3 * host + DECODE)
    # An eager step ends no earlier than the host that launches it; a replayed one starts only then.
    slow = 2 * PREFILL
    for replayed, end in ((False, slow), (True, slow + PREFILL)):
        sim = engine(scheduler(), slow, replayed=lambda shape, value=replayed: value)
        assert run([SimRequest(10, 1)], sim)[0].seconds == pytest.approx(end)


def test_chunked_prefill() -> None:
    requests = [SimRequest(10, 3), SimRequest(20, 2)]
    done, shapes = run(requests, engine(on_cpu(max_batch_tokens=16)))
    assert shapes == [
        StepShape(0, 0, ((0, 10), (0, 6)), 1),  # all of the first prompt, and the rest of the budget
        StepShape(1, 11, ((6, 14),), 2),
        StepShape(2, 12 + 21, (), 2),
    ]
    first, second = done.requests
    assert (first.first_token, second.first_token) == (pytest.approx(PREFILL), pytest.approx(2 * PREFILL))
    assert first.itl == pytest.approx((PREFILL + DECODE) / 2)


def test_requests_are_submitted_between_steps_and_in_order_of_arrival() -> None:
    late = PREFILL + 0.5 * DECODE  # during the first decode step
    requests = [SimRequest(4, 2, arrival=2.0), SimRequest(10, 4, arrival=0.0), SimRequest(6, 1, arrival=late)]
    done, shapes = run(requests, engine(on_cpu()))
    assert shapes[:3] == [StepShape(0, 0, ((0, 10),), 1), StepShape(1, 11, (), 1), StepShape(1, 12, ((0, 6),), 2)]
    last, first, second = done.requests
    assert first.ttft == pytest.approx(PREFILL)
    assert second.ttft == pytest.approx(0.5 * DECODE + PREFILL)
    assert second.itl is None
    assert last.ttft == pytest.approx(PREFILL)  # it arrived while the engine was idle
    assert done.seconds == pytest.approx(2.0 + PREFILL + DECODE)
    # On a GPU two decode steps are in flight, so the second request joins the one after them.
    assert [bool(shape.chunks) for shape in run(requests, engine(scheduler()))[1][:4]] == [True, False, False, True]


def test_preemption_when_blocks_run_out() -> None:
    # Two sequences of 40 tokens need 20 blocks, and there are 12.
    config = on_cpu(max_model_len=40)
    done, shapes = run([SimRequest(16, 24), SimRequest(16, 24)], engine(config, blocks=12))
    assert done.preemptions == 1
    assert done.peak_kv_blocks == done.num_blocks == 12
    assert len([shape for shape in shapes if shape.chunks]) == 2  # both at once, and the second again
    assert shapes[-1] == StepShape(1, 39, (), 1)
    assert done.steps == len(shapes) > 24
    first, second = done.requests
    assert first.end == pytest.approx(PREFILL + 23 * DECODE)  # the request that came first is not delayed
    assert second.end == pytest.approx(done.seconds) == pytest.approx(2 * PREFILL + (done.steps - 2) * DECODE)


# Pipelines


def test_two_stages_with_bubbles() -> None:
    # One sequence is in one stage at a time: half of each device is idle.
    config = scheduler(pipelined=True, feed_on_device=False)
    pipeline = engine(config, stage_times=times(stages=2))
    done, _ = run([SimRequest(10, 5)], pipeline)
    assert done.seconds == pytest.approx(2 * (PREFILL + 4 * DECODE))
    assert done.breakdown.idle == pytest.approx(done.seconds / 2)
    # Two sequences fill both stages. Prefill: stage 0 computes A then B, stage 1 follows one step later. A's token is
    # back after 2 PREFILL; from then on B's prefill on stage 1 delays it once, and the stages alternate.
    both, shapes = run([SimRequest(10, 5), SimRequest(10, 5)], replace(pipeline, scheduler=config))
    assert [shape.sampled for shape in shapes] == [1] * 10
    a, b = both.requests
    assert a.first_token == pytest.approx(2 * PREFILL)
    assert b.first_token == pytest.approx(3 * PREFILL)
    # A decodes at 2 PREFILL on stage 0, and on stage 1 after B's prefill: 3 PREFILL + DECODE. Then both take turns.
    assert a.end == pytest.approx(3 * PREFILL + 7 * DECODE)
    assert b.end == pytest.approx(3 * PREFILL + 8 * DECODE)
    assert both.breakdown.total == pytest.approx(both.seconds)
    assert both.breakdown.idle == pytest.approx(both.seconds - 2 * (PREFILL + 4 * DECODE))
    # The way back of the tokens counts once per token.
    back, _ = run([SimRequest(10, 5)], replace(pipeline, return_seconds=0.5))
    assert back.seconds == pytest.approx(done.seconds + 5 * 0.5)


def test_the_first_stage_of_a_cpu_pipeline_holds_its_host() -> None:
    config = scheduler(pipelined=True, feed_on_device=False)
    for cpu, seconds in ((False, 3 * PREFILL), (True, 3 * PREFILL + HOST)):
        sim = engine(config, HOST, stage_times=times(stages=2), on_cpu=cpu)
        done, _ = run([SimRequest(10, 1), SimRequest(10, 1)], sim)
        # On a CPU the second step is launched after the first stage has computed; its stage 1 waits for it.
        assert done.seconds == pytest.approx(seconds + (HOST if cpu else 0.0))


# Replicas


def test_replicas_share_the_requests_and_step_at_their_own_pace() -> None:
    sim = engine(on_cpu(max_num_seqs=2))
    done, _ = run([SimRequest(10, 5)] * 4, sim, replicas=2)
    assert done.steps == 2 * 5
    assert done.seconds == pytest.approx(PREFILL + 4 * DECODE)
    # Requests go to the replica with the fewest, the router's own last: 0 and 2 to replica 1, and 1 to replica 0. All
    # are shown when the router's own step ends.
    steps: list[tuple[int, StepShape]] = []
    uneven = [SimRequest(10, 9), SimRequest(10, 3), SimRequest(10, 1)]
    done = simulate(uneven, sim, 2, lambda rank, shape: steps.append((rank, shape)))
    assert next(shape for rank, shape in steps if rank == 0) == StepShape(0, 0, ((0, 10),), 1)
    assert next(shape for rank, shape in steps if rank == 1) == StepShape(0, 0, ((0, 10), (0, 10)), 2)
    assert [request.output_tokens for request in done.requests] == [9, 3, 1]
    assert done.seconds == pytest.approx(PREFILL + 8 * DECODE)
    assert done.breakdown.idle == pytest.approx(6 * DECODE / 2)  # replica 0 has nothing left after its third token


def test_an_idle_replica_takes_over_unstarted_requests() -> None:
    # Four requests on replicas of one sequence: each gets one and holds another. One replica is done much sooner.
    lengths = [30, 2, 30, 2, 30, 2]
    done, _ = run([SimRequest(4, length) for length in lengths], engine(on_cpu(max_num_seqs=1)), replicas=2)
    assert done.moved > 0
    assert [request.output_tokens for request in done.requests] == lengths
    alone, _ = run([SimRequest(4, length) for length in lengths], engine(on_cpu(max_num_seqs=1)))
    assert done.seconds < 0.75 * alone.seconds


def test_many_replicas_finish_what_one_does() -> None:
    rng = random.Random(0)
    requests = [SimRequest(rng.randint(1, 40), rng.randint(1, 40), rng.random()) for _ in range(120)]
    one, four = (run(requests, engine(scheduler(), HOST, blocks=90), replicas)[0] for replicas in (1, 4))
    assert [request.output_tokens for request in four.requests] == [request.output_len for request in requests]
    assert all(request.ttft > 0 for request in four.requests)
    assert four.seconds < one.seconds
    assert four.breakdown.total == pytest.approx(four.seconds)


def test_invalid_input() -> None:
    with pytest.raises(YalisError, match="no requests to simulate"):
        simulate([], engine(scheduler()))
    with pytest.raises(YalisError, match="give prefix_reuse=False"):
        simulate([SimRequest(1, 1)], engine(scheduler(prefix_reuse=True)))
    with pytest.raises(YalisError, match="prompt has 200 tokens and max_model_len"):
        simulate([SimRequest(200, 1)], engine(scheduler()))


# The same steps as a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("overlapped", "blocks", "tokens"), [(False, 40, 64), (True, 40, 64), (True, 14, 48)], ids=["cpu", "gpu", "preempt"]
)
def test_the_steps_of_a_real_engine(
    model: str, overlapped: bool, blocks: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`overlapped`: the scheduler of a GPU, with two steps in flight."""
    if overlapped:
        monkeypatch.setattr(
            settings,
            "SchedulerConfig",
            lambda **fields: SchedulerConfig(**{**fields, "max_in_flight": 2, "feed_on_device": True}),
        )
    real: list[StepShape] = []
    launch = ReplicaRanks.launch

    def record(self: ReplicaRanks, plan: StepPlan) -> Any:
        real.append(StepShape.of(plan))
        return launch(self, plan)

    monkeypatch.setattr(ReplicaRanks, "launch", record)
    rng = random.Random(3)
    sizes = [(rng.randint(1, 70), rng.randint(1, 40)) for _ in range(14)]
    with LLM(
        model, threads=1, prefix_reuse=False, max_num_seqs=5, max_batch_tokens=tokens, kv_blocks=blocks, block_size=16,
        max_model_len=128,
    ) as llm:  # fmt: skip
        facts = llm.scheduler_settings
        llm.generate(
            [[rng.randrange(100) for _ in range(prompt)] for prompt, _ in sizes],
            [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in sizes],
        )
        stats = llm.stats
    num_blocks = facts.pop("num_blocks")
    assert num_blocks == blocks
    done, simulated = run([SimRequest(*size) for size in sizes], engine(SchedulerConfig(**facts), blocks=num_blocks))
    assert simulated == real
    assert (done.steps, done.preemptions) == (stats.steps, stats.preemptions)
    assert bool(done.preemptions) == (blocks == 14)


# Recorded runs


def test_a_cpu_table_is_fitted_to_latency_points() -> None:
    """Points that another table predicts: the fit must predict them too, from a start that is far off."""
    data = {**load_machine("lab").to_json(), "name": "cpu"}
    machine = Machine.from_json(data, "cpu")
    path = Path(__file__).parents[2] / "benchmarks/results/cpu/latency-smollm2-135m-fp32.json"
    spec_points = read_points([StoredResult(path, results.read(path))])
    start = load_efficiencies("cpu")
    truth = start.with_values({"linear_eff": 0.4, "gemm_eff": 0.9, "prefill_attention_eff": 0.4, "native_eff": 0.5})
    cases = [
        Workload(1, 64, 16),
        Workload(1, 300, 16),
        Workload(1, 2000, 16),
        Workload(16, 64, 16),
        Workload(16, 900, 4),
    ]
    points = [replace(point, case=case) for point in spec_points[:2] for case in cases]
    points = [replace(point, measured=predict(point, machine, truth)) for point in points]
    assert max(abs(predict(point, machine, start) / point.measured - 1) for point in points) > 0.4
    fitted = efficiency_fit._fit(points, machine, start)
    assert max(abs(predict(point, machine, fitted) / point.measured - 1) for point in points) < 0.03


RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_run_on_a_cpu_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are fitted to latency points of the same session; nothing is fitted to the run."""
    for module in (planner_accuracy, replay_module):
        monkeypatch.setattr(module, "read_model", lambda name: read_spec(SMOLLM2, name))
    measured, latency = (
        StoredResult(path, results.read(path))
        for path in (RESULTS / "cpu" / f"{name}.json" for name in (
            "throughput-smollm2-135m-chat", "latency-smollm2-135m-calibration"
        ))
    )  # fmt: skip
    machine, table = fit_cpu([latency], load_machine("lab"))
    done, row = replay(measured, machine, table), measured.result.rows[0]
    assert done.steps == row["steps"]
    assert done.seconds == pytest.approx(row["seconds"], rel=0.08)
    assert done.ttft() == pytest.approx(row["first_token_ms"] / 1e3, rel=0.08)
    assert done.itl() == pytest.approx(row["token_ms"] / 1e3, rel=0.08)
    # The second row of 1x64x24 has the prompt of the first, so its first token is no point.
    points = [point for point in read_points([latency]) if point.case == Workload(1, 64, 24)]
    assert [(point.phase, bool(point.excluded)) for point in points] == [
        ("first token", False), ("decode step", False), ("first token", True), ("decode step", False),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b-chat", "llama-3.1-8b-64x512x128", "llama-3.2-1b-chat"])
def test_runs_on_an_h200_are_replayed(name: str) -> None:
    """host_mixed_layer_s was fitted to the host time of the chat run of the 8B model, so its time is no evidence."""
    path = RESULTS / "h200" / f"throughput-{name}.json"
    source = StoredResult(path, results.read(path))
    done, row = replay(source, load_machine("h200")), source.result.rows[0]
    assert done.steps == row["steps"]
    assert done.seconds == pytest.approx(row["seconds"], rel=0.08)
    assert done.itl() == pytest.approx(row["token_ms"] / 1e3, rel=0.08)
    assert done.ttft() == pytest.approx(row["first_token_ms"] / 1e3, rel=0.2)


def test_a_recorded_run_is_replayed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setitem(bandwidth._MATMUL_SIZE, "cpu", 128)
    trace = tmp_path / "trace.jsonl"
    sizes = [{"prompt_len": 5 + 7 * n, "output_len": 3 + n % 4, "arrival": 0.0} for n in range(8)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in sizes))
    flags = ["--model", model, "--threads", "1", "--max-num-seqs", "3", "--repeats", "1", "--warmup", "0"]
    assert main(["bench", "throughput", "--trace", str(trace), *flags, "--out", str(tmp_path / "t")]) == 0
    work = ["--workload", "2x20x4", "--model", model, "--threads", "1", "--repeats", "1"]
    assert main(["bench", "latency", *work, "--out", str(tmp_path / "l")]) == 0
    (measured,), (latency,) = (list((tmp_path / name).iterdir()) for name in ("t", "l"))
    source = StoredResult(measured, results.read(measured))
    assert source.result.parameters["sizes"] == [[line["prompt_len"], line["output_len"], 0.0] for line in sizes]
    row = source.result.rows[0]
    done = replay(source, load_machine("lab"))
    assert done.steps == row["steps"]
    assert row["launch_s"] < row["seconds"]
    capsys.readouterr()
    command = ["bench", "replay", str(measured), "--machine", "lab", "--calibration", str(latency)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    results.check(found, "printed")
    assert found["rows"][0]["measured_steps"] == found["rows"][0]["predicted_steps"] == done.steps
    assert main(command) == 0
    assert "those of a table fitted to latency-" in capsys.readouterr().out
    assert main([*command, "--machine", "h200"]) == 2
    assert "--calibration fits the table of a CPU, but h200 has GPUs" in capsys.readouterr().err
    assert main(["bench", "replay", str(latency)]) == 2
    assert "give one of `yalis bench throughput`" in capsys.readouterr().err
    old = json.loads(measured.read_text())
    del old["parameters"]["sizes"]
    measured.write_text(json.dumps(old))
    assert main(["bench", "replay", str(measured)]) == 2
    assert "an older version wrote it" in capsys.readouterr().err
