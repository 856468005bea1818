"""`yalis plan`: the sizes it computes from a config equal those of loaded ranks; predictions for a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_parallel_memory import NINE_HEADS, FakeRanks
from yalis.checkpoint.resolve import open_checkpoint
from yalis.cli.main import main
from yalis.cli.plan_memory import spell_ranks
from yalis.config import EngineConfig
from yalis.engine.runner import Runner
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.spec import read_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with only a config."""
    (tmp_path / "config.json").write_text(json.dumps({**NINE_HEADS, "dtype": "bfloat16"}))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *map(str, args), "--json"]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == status
    assert out.count("\n") == 1
    sizes: dict[str, Any] = json.loads(out)
    return sizes


@pytest.mark.parametrize(
    "budget", [{"kv_blocks": 7}, {"kv_memory": 0.001}, {"max_model_len": 64, "max_num_seqs": 3}, {}]
)
def test_every_rank_has_the_planned_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str], budget: dict[str, Any]
) -> None:
    split = Split(4, 2, 2)
    args = [word for name, value in budget.items() for word in ("--" + name.replace("_", "-"), value)]
    planned = plan(capsys, "--model", folder, "--tp", "4x2", "--pp", 2, "--device", "cpu", *args)
    config = EngineConfig(str(folder), load="random", tp=(4, 2), pp=2, device="cpu", **budget)
    checkpoint = open_checkpoint(config.model, config.load)
    spec = read_spec(checkpoint.config)
    assert [rank["rank"] for rank in planned["ranks"]] == list(range(split.size))
    counts = []
    for rank in planned["ranks"]:
        seats = FakeRanks(rank["rank"])
        grid, stage = Grid.open(split, seats.rank, seats), Stage.open(split, seats.rank, seats)
        fitting: list[int] = []

        def min_over_ranks(blocks: int, fitting: list[int] = fitting) -> int:
            fitting.append(blocks)
            return int(planned["kv_blocks"])

        runner = Runner(config, spec, checkpoint, frozenset(), torch.device("cpu"), grid, stage, min_over_ranks)
        assert rank["weight_bytes"] == runner.weight_bytes
        assert rank["rotary"]["bytes"] == sum(buffer.nbytes for buffer in runner.model.buffers())
        assert (rank["kv_blocks"], rank["kv_bytes"]) == (runner.num_blocks, runner.pool.nbytes)
        counts += fitting
    assert planned["kv_blocks"] == min(counts)


def test_experts_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "qwen3_moe", "num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "hidden_size": 24, "head_dim": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 40,
        "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", tmp_path, "--device", "cpu")
    whole = plan(capsys, *model, "--tp", 4, "--expert-parallel")
    assert [rank["experts"] for rank in whole["ranks"]] == [[0, 3], [3, 6], [6, 8], [8, 10]]
    assert {tuple(rank["width"]) for rank in whole["ranks"]} == {(0, 20)}
    matrices = [
        part["bytes"] for rank in whole["ranks"] for part in rank["weights"] if part["name"] == "expert matrices"
    ]
    assert matrices == [count * 3 * 24 * 20 * 2 * 4 for count in (3, 3, 2, 2)]
    slices = plan(capsys, *model, "--tp", 4, "--no-expert-parallel")
    assert [(rank["experts"], rank["width"][1] - rank["width"][0]) for rank in slices["ranks"]] == [([0, 10], 5)] * 4
    assert (whole["experts"], slices["experts"]) == (None, None)  # nothing was chosen
    assert sum(rank["weight_bytes"] for rank in whole["ranks"]) == sum(rank["weight_bytes"] for rank in slices["ranks"])
    assert main(["plan", *map(str, model), "--tp", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        "experts: (whole experts|a slice of every expert) on each rank: .*modelled .* in steps of", lines[1]
    )
    assert "experts" in lines[2].split()
    for args, message in (
        (
            ("--tp", 11, "--expert-parallel"),
            "tp 11 leaves ranks without an expert: .* has 10 experts; give tp 1 to 10, or",
        ),
        (
            ("--tp", "11x2", "--expert-parallel"),
            "tp 11x2 leaves ranks without an expert: .* give a grid of 1 to 10 rows",
        ),
        (
            ("--tp", "1x2", "--expert-parallel"),
            "--expert-parallel places whole experts on the rows of .* 1x2 has one row",
        ),
    ):
        assert main(["plan", *map(str, (*model, *args))]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_dense_model_has_no_experts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "--tp", "2", "--enable-expert-parallel"]) == 2
    err = capsys.readouterr().err
    assert "--expert-parallel needs a mixture of experts, and " in err
    assert "is a dense model; leave it out" in err


def test_json_has_all_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(
        capsys, "--model", folder, "--tp", "3x2", "--pp", 2, "--dp", 2, "--device", "cuda", "--max-model-len", 50
    )
    assert planned["split"] == {
        "rows": 3, "cols": 2, "stages": 2, "replicas": 2, "expert_parallel": False, "ranks": 24,
    }  # fmt: skip
    assert (planned["dtype"], planned["max_model_len"], planned["block_size"]) == ("bfloat16", 50, 64)
    assert planned["kv_blocks"] is None  # depends on the memory of the GPU
    assert planned["even_weight_bytes"] == planned["weight_bytes"] / 12
    assert planned["even_kv_bytes_per_token"] == planned["kv_bytes_per_token"] / 6
    assert planned["kv_bytes_per_token"] == 3 * 2 * 3 * 8 * 2
    last = planned["ranks"][-1]
    assert (last["replica"], last["stage"], last["row"], last["col"]) == (1, 1, 2, 1)
    assert (last["layers"], last["heads"], last["kv_heads"]) == ([2, 3], [6, 9], [2, 3])
    assert (last["width"], last["vocabulary"]) == ([68, 101], [210, 251])
    assert sum(part["bytes"] for part in last["weights"]) == last["weight_bytes"]
    (head,) = (part for part in last["weights"] if part["name"] == "lm_head")
    assert (head["copies"], head["repeated_bytes"]) == (2, head["bytes"] / 2)


def test_equal_ranks_share_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(folder), "--tp", "4", "--dp", "2", "--dtype", "float32", "--kv-blocks", "10"]
    assert main(["plan", *args, "--device", "cpu"]) == 0
    title, heads, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(" · tp 4 x pp 1 x dp 2 · 8 ranks · float32 · cpu")
    assert heads.split()[:4] == ["ranks", "layers", "heads", "kv"]
    # Ranks 1 and 3 have equal heads, but different shares of the vocabulary and the MLP: 251 and 101 are prime.
    assert [line.split("  ")[0] for line in lines[:4]] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert lines[0].split()[2:7] == ["3", "3", "1", "26", "63"]
    assert lines[2].split()[2:7] == ["3", "2", "2", "25", "63"]
    assert "shared key/value matrices 13.5 KiB" not in lines[0]
    assert "shared key/value matrices 27.0 KiB" in lines[2]
    assert "replicated: held by several ranks, of which each has these bytes" in lines
    assert "  norms: whole, repeated over 4 rows" in lines
    assert "  shared KV cache: split over 4 rows, heads read by 2 rows" in lines
    assert lines[-1] == ("KV cache of a replica: 10 blocks of 16 tokens, 160 tokens in all: 1 sequence of 128 tokens")


def test_one_rank_replicates_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder / "config.json"), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("  nothing")
    assert lines[3].startswith(
        "even shares, if nothing were replicated: weights 0.000 / (tp 1 x pp 1) = 0.000 GiB, KV "
    )
    assert len(lines) == 5


def test_a_kv_cache_that_is_smaller_than_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", folder, "--device", "cpu", "--kv-blocks", 2]
    planned = plan(capsys, *small)
    assert (planned["max_model_len"], planned["seq_len"], planned["sequences"]) == (32, 32, 1)
    assert main(["plan", *map(str, small)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the model supports 128 tokens in a sequence, but the KV cache holds 32, so prompt and completion end there; "
        "give a larger --kv-blocks, or --max-model-len 32 to accept this"
    )
    for flags, last in (
        (["--max-model-len", 32], "2 blocks of 16 tokens, 32 tokens in all: 1 sequence of 32 tokens"),
        (["--max-model-len", 33], "the KV cache holds 32 tokens, fewer than one sequence of --max-model-len 33"),
    ):
        assert main(["plan", *map(str, [*small, *flags])]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(last)


def test_the_assumed_device_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, reported in ([], True), (["--device", "cpu"], False), (["--gpu-memory", "80"], False):
        assert main(["plan", "--model", str(folder), *flags]) == 0
        note = capsys.readouterr().out.splitlines()[1]
        assert note.startswith("this machine has no GPU, so this is the plan for a CPU in float32; for ") is reported


LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def test_what_fits_gpus_of_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 405B: 16 GPUs of 80 GiB hold the weights and 49 sequences of 8k tokens, 8 do not hold the weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_405B))
    args = ["--model", path, "--gpu-memory", 80, "--seq-len", 8192]
    planned = plan(capsys, *args, "--tp", 16)
    first = planned["ranks"][0]
    assert (planned["device"], planned["dtype"], planned["seq_len"]) == ("cuda", "bfloat16", 8192)
    assert (planned["gpu_memory_bytes"], planned["usable_bytes"]) == (80 << 30, 72 << 30)
    left = (72 << 30) - first["weight_bytes"] - first["rotary"]["bytes"]
    assert first["kv_left_bytes"] == left
    assert first["kv_bytes_per_token"] == 126 * 2 * 128 * 2  # one key/value head, on two ranks
    assert planned["kv_blocks"] == left // (64 * first["kv_bytes_per_token"])
    assert planned["weights_fit"] is True
    assert planned["sequences"] == planned["kv_blocks"] // 128 == 49
    # Half of the GPU for each of two ranks, as EngineConfig.ranks_per_gpu divides it.
    shared = plan(capsys, *args, "--tp", 16, "--ranks-per-gpu", 2, "--memory-fraction", 1, status=1)
    assert shared["usable_bytes"] == 40 << 30
    assert shared["weights_fit"] is False
    assert (shared["kv_blocks"], shared["sequences"]) == (0, 0)

    def printed(*words: object) -> list[str]:
        assert main(["plan", *map(str, [*args, *words])]) == 0
        return capsys.readouterr().out.splitlines()

    fits, kv = printed("--tp", 16)[-2:]
    assert fits == (
        "the weights fit GPUs of 80 GiB: rank 0 needs 47.809 of the 72.000 GiB that --memory-fraction allows, not "
        "counting activations and CUDA graphs"
    )
    assert kv.endswith(" blocks of 64 tokens, 402624 tokens in all: 49 sequences of 8192 tokens")
    # --max-num-seqs limits the sequences and, with a short --max-model-len, the KV cache.
    assert printed("--tp", 16, "--max-num-seqs", 32)[-1].endswith(
        "402624 tokens in all: 32 sequences of 8192 tokens; limited by --max-num-seqs, memory would hold 49"
    )
    limited = printed("--tp", 16, "--max-num-seqs", 32, "--max-model-len", 8192)
    assert limited[2].split()[8] == f"{32 * 8192 * first['kv_bytes_per_token'] / 2**30:.3f}"
    assert " 262144 tokens in all: 32 sequences of 8192 tokens; limited by " in limited[-1]
    assert main(["plan", *map(str, args), "--tp", "8"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[2].split()[8] == "none"
    assert err.startswith("yalis: error: the weights do not fit GPUs of 80 GiB: rank 0 needs 94.564 of the 72.000 GiB")
    assert err.endswith("; give a larger --tp or --pp, or GPUs with more memory\n")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--tp 10", "has 9 heads and an MLP width of 101; give tp 1 to 9"),
        ("--tp 10x2", "tp 10x2 leaves ranks without a shard: "),
        ("--tp 10x2", "give a grid of 1 to 9 rows"),
        ("--tp 1x5", "columns that divide it: 1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72"),
        ("--pp 4", "give pp 1 to 3"),
        ("--tp 9x36", "give a grid of at most 251 ranks"),
        ("--tp 2y2", "tp is '2y2'; give a number of ranks, such as 4, or rows x columns, such as 2x2"),
        ("--max-model-len 129", "max_model_len is 129, but"),
        ("--kv-memory 1e-7 --device cuda", "no memory is left for the KV cache"),
        ("--device tpu", "device is 'tpu'"),
        ("--gpu-memory 0", "--gpu-memory is 0; give a number of GiB above 0, such as 80"),
        ("--gpu-memory 80 --kv-blocks 3", "leave out --device cpu, --kv-blocks and --kv-memory"),
        ("--seq-len 129 --device cpu", "--seq-len is 129; give 1 to 128, the tokens of the longest sequence"),
    ],
)
def test_invalid_splits_are_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], args: str, sentence: str
) -> None:
    assert main(["plan", "--model", str(folder), *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_ranks_are_shown_as_spans() -> None:
    assert spell_ranks([0]) == "0"
    assert spell_ranks([0, 1, 2, 3, 8]) == "0-3, 8"
    assert spell_ranks(range(0, 20, 2), max_spans=3) == "0, 2, 4, ... (10)"


SHAPE = str(Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-3.1-8b.json")
PREDICT = ["plan", "--model", SHAPE, "--machine", "perlmutter", "--workload", "4x64x12"]


def test_a_prediction_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREDICT, "--nodes", "1-2"]) == 0
    out = capsys.readouterr().out
    title, heads, first, *lines = out.splitlines()
    assert title == "llama-3.1-8b, bfloat16 on perlmutter, 4x64x12, best latency"
    assert heads.split()[:3] == ["GPUs", "split", "all-reduce"]
    for name in ("matmul", "attention", "other", "communication", "idle", "interval", "weights", "sequences"):
        assert name in heads
    assert first.split()[0] in ("4", "8")
    assert any(line.startswith("the best 5 on the virtual clock") for line in lines)
    assert any(line.startswith("fits: weights and activations need ") for line in lines)
    assert any(line.startswith("  1.") and "x faster than " in line for line in lines)
    assert "replicated: held by several ranks, of which each has these bytes" in lines  # the table of memory
    srun = lines[-1].split()
    assert srun[0] == "srun"
    assert srun[srun.index("yalis") :][:3] == ["yalis", "bench", "throughput"]
    assert srun[-2:] == ["--max-model-len", "76"]
    assert main(["plan", "--model", SHAPE, *srun[srun.index("--workload") + 2 :], "--gpu-memory", "80"]) == 0


def test_a_prediction_as_json_file_report_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out", tmp_path / "plot"
    flags = ["--nodes", "1", "--objective", "cost", "--slo", "ttft=2s,itl=50ms", "--allreduce", "nccl"]
    assert main([*PREDICT, *flags, "--out", str(out), "--plot", str(plot), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = out.iterdir()
    written = json.loads(path.read_text())
    assert printed["memory"]["split"]["ranks"] == 4
    assert written["rows"] == printed["rows"]
    assert written["parameters"]["slo"] == {"ttft": 2.0, "itl": 0.05}
    assert {row["library"] for row in written["rows"]} == {"nccl"}
    replayed = [row for row in written["rows"] if row["replayed_s"] is not None]
    assert len(replayed) == 5
    for row in replayed:
        total = sum(row[f"{name}_s"] for name in ("matmul", "attention", "other", "communication", "idle"))
        assert total == pytest.approx(row["replayed_s"])
        assert row["replayed_s_low"] < row["replayed_s"] < row["replayed_s_high"]
        assert row["tokens_per_s"] == pytest.approx(48 / row["replayed_s"])
    assert {file.suffix for file in tmp_path.glob("plot*")} == {".png", ".svg"}
    page = tmp_path / "report.html"
    assert main(["report", str(out), "-o", str(page)]) == 0
    assert "Predictions" in page.read_text()
    assert "predicted, not measured" in page.read_text()


def test_a_mixture_of_experts_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """By the name of its shape file. Slices and whole experts are compared; the result says what is assumed."""
    args = ["--model", "qwen3-30b-a3b", "--machine", "alps", "--workload", "4x64x12", "--allreduce", "nvrar"]
    planned = plan(capsys, *args)
    assert {("tp 4", False), ("tp 4 ep", True)} <= {(row["split"], row["expert_parallel"]) for row in planned["rows"]}
    assumed = planned["parameters"]["assumed"]
    assert assumed["experts_reached"]["low"] < assumed["experts_reached"]["value"] == 1
    assert any(note.startswith("Assumed: uniform routing, in which a decode step of ") for note in planned["notes"])
    for flag, split in (("--expert-parallel", "tp 4 ep"), ("--no-expert-parallel", "tp 4")):
        fixed = plan(capsys, *args, "--tp", 4, flag)
        assert {row["split"] for row in fixed["rows"]} == {split}
        assert f"--load random --routing uniform --tp 4 {flag} " in fixed["parameters"]["run"]
        experts = fixed["memory"]["ranks"][1]["experts"]
        assert experts == ([32, 64] if flag == "--expert-parallel" else [0, 128])


def test_a_fixed_split_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--nodes", 2, "--tp", 4, "--pp", 2, "--allreduce", "torch", "--memory-fraction", 0.8]
    fixed += ["--micro-batches", 1]
    planned = plan(capsys, *PREDICT[1:], *fixed)
    assert {(row["split"], row["library"]) for row in planned["rows"]} == {("tp 4, pp 2", "nccl")}
    assert "--allreduce torch" in planned["parameters"]["run"]
    assert "--memory-fraction 0.8" in planned["parameters"]["run"]
    assert "--micro-batches 1" in planned["parameters"]["run"]
    assert planned["parameters"]["run"].startswith("srun -N 2 -n 8 --gpus-per-node=4 yalis bench throughput ")


@pytest.mark.parametrize(
    ("args", "sentence", "status"),
    [
        ("--machine summit", "unknown machine 'summit'; give one of alps, ", 2),
        ("--nodes 0", "'0' is not a number of nodes; give 4, 1,2,4 or 1-16", 2),
        ("--nodes 8-4", "'8-4' is not a number of nodes", 2),
        ("--nodes 100000", "perlmutter has 256 nodes; give 1 to 256", 2),
        ("--slo ttft=2", "'ttft=2' is not a list such as ttft=2s,itl=50ms (units: s, ms)", 2),
        ("--slo e2e=2s", "'e2e=2s' is not a list such as", 2),
        ("--slo ttft=1ms", "meets --slo: the best time to first token is", 1),
        ("--allreduce gloo", "perlmutter has no parameters for the all-reduce 'gloo'; give one of nccl, mpi, nvrar", 2),
        ("--objective speed", "invalid choice: 'speed'", 2),
        ("--machine h200 --nodes 2", "--nodes is 2, but h200 has 1 node; give 1, or a machine with a network", 2),
        ("--device cpu", "--device cpu has no effect on a prediction", 2),
        ("--kv-memory 1", "--kv-memory 1.0 has no effect on a prediction", 2),
        ("--eager", "--eager has no effect on a prediction", 2),
        ("--compile", "--compile has no effect on a prediction", 2),
        ("--attention foo", "--attention foo has no effect on a prediction", 2),
        ("--prefix-reuse", "--prefix-reuse has no effect on a prediction", 2),
        ("--ranks-per-node 2", "--ranks-per-node 2 has no effect on a prediction", 2),
        (f"--out {__file__}", "which is a file; give a folder", 2),
        ("--gpu-memory 80", "--gpu-memory and --machine exclude each other", 2),
        ("--trace t.jsonl", "--workload and --trace exclude each other", 2),
        ("--tp 3", "cannot be split as asked over 1 node of perlmutter", 1),
        ("--workload 1x131072x9", "limited to 131072; give a shorter --workload", 2),
        ("--study out", "--study has its own machines, models and workloads; leave out --workload", 2),
    ],
)
def test_bad_predictions_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], args: str, sentence: str, status: int
) -> None:
    assert main([*PREDICT, *args.split()]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_a_model_that_fits_nowhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    large = SHAPE.replace("8b", "405b")
    assert main(["plan", "--model", large, "--machine", "perlmutter", "--nodes", "2"]) == 1
    assert "does not fit 2 nodes of perlmutter (4 GPUs of 79 GiB each) on any split; give more --nodes" in (
        capsys.readouterr().err
    )


def test_a_machine_of_cpus_is_predicted_in_float32(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(capsys, "--model", folder, "--machine", "lab", "--nodes", 2, "--workload", "2x16x4", "--tp", 2)
    assert planned["parameters"]["dtype"] == "float32"
    assert planned["devices"][0]["type"] == "cpu"
    assert planned["memory"]["block_size"] == 16
    assert "--gpus-per-node" not in planned["parameters"]["run"]


def test_the_study_takes_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--study", str(tmp_path / "out"), "--model", SHAPE]) == 2
    assert "--study has its own machines, models and workloads; leave out --model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flags_of_a_prediction_need_a_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "--nodes", "4"]) == 2
    assert "--nodes needs a machine to predict for; add --machine, such as --machine perlmutter" in (
        capsys.readouterr().err
    )
