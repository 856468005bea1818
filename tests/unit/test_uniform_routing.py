"""--routing uniform: experts are equally likely, on every split and in recorded steps, and results say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from yalis import LLM, SamplingParams, YalisError
from yalis.cli.main import main
from yalis.config import EngineConfig
from yalis.kernels import ops
from yalis.layers.mlp import MoE, route_uniformly
from yalis.models.decoder import Decoder
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid
from yalis.spec import read_spec
from yalis.study import results
from yalis.study.compare import compare
from yalis.study.topology import note_routing

#: The second of three layers is dense. 11 experts have no even shares.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 251,
    "max_position_embeddings": 512, "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 25,
    "mlp_only_layers": [1],
}  # fmt: skip
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("experts") / "model.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(config: str, **settings: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [7] * length} for length in (400, 3, 40)]
    settings = {"routing": "uniform", **settings}
    with LLM(config, load="random", device="cpu", dtype="float32", kv_blocks=128, threads=1, **settings) as llm:
        return [output.token_ids for output in llm.generate(prompts, SAMPLING)]


def test_experts_are_equally_likely(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights send a repeated token to the same experts; with uniform routing all are chosen as often."""
    chosen: list[Tensor] = []
    route = ops.route

    def spy(*args: Any) -> tuple[Tensor, Tensor]:
        weights, experts = route(*args)
        if len(experts) > 100:  # a prompt; decode steps repeat the first rows
            chosen.append(experts.flatten())
        return weights, experts

    monkeypatch.setattr(ops, "route", spy)
    shares = {}
    for routing in ("model", "uniform"):
        chosen.clear()
        run(config, routing=routing, eager=True)
        counts = torch.cat(chosen).bincount(minlength=11)
        shares[routing] = counts / counts.sum() * 11
    assert shares["model"].max() > 2
    assert shares["uniform"].max() < 1.25
    assert shares["uniform"].min() > 0.75


def test_recorded_steps_and_splits_route_alike(config: str) -> None:
    expected = run(config)
    assert expected == run(config, eager=True)
    assert expected == run(config, tp=2, expert_parallel=True)
    assert expected != run(config, routing="model")


def test_rows_of_layers_and_stages() -> None:
    """A stage's layers have the scores of the same layers of the whole model, and layers differ."""
    model = Decoder(read_spec(CONFIG), Grid(), Stage(), 64, torch.float32, torch.device("cpu"))
    route_uniformly(dict(enumerate(model.layers)), 100)
    mlps = [block.mlp for block in model.layers]
    tables = {number: mlp.uniform_scores for number, mlp in enumerate(mlps) if isinstance(mlp, MoE)}
    assert list(tables) == [0, 2]
    first, last = tables.values()
    assert first is not None
    assert last is not None
    assert first.shape == last.shape == (100, 11)
    assert not torch.isclose(first[:64], last[:64]).all(1).any()
    route_uniformly({2: model.layers[2]}, 100)  # alone on its stage
    assert torch.equal(mlps[2].uniform_scores, last)
    assert len(first.unique()) == first.numel()  # no ties


def test_results_say_so(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = "--batch 2 --prompt-len 8 --output-len 4 --repeats 1 --warmup 0 --threads 1 --device cpu --load random"
    out = tmp_path / "out"
    args = ["--model", config, *work.split(), "--routing", "uniform", "--out", str(out)]
    assert main(["bench", "latency", *args]) == 0
    result = results.read(next(out.iterdir()))
    assert result.parameters["engine"]["routing"] == "uniform"
    assert result.notes == ["--routing uniform: all experts were equally likely, whatever the routers computed"]
    assert result.notes[0] in capsys.readouterr().out
    engine = {name: value for name, value in result.parameters["engine"].items() if name != "routing"}
    old = replace(result, parameters={**result.parameters, "engine": engine})  # an older version had no such field
    with pytest.raises(YalisError, match="not of the same work: routing is model and uniform"):
        compare(old, result, noise=0.05)
    spec = read_spec(CONFIG)
    (note,) = note_routing(EngineConfig(config, load="random"), spec)
    assert note.startswith("random weights prefer a few experts")
    assert note_routing(EngineConfig(config), replace(spec, moe=None)) == []


def test_bad_input(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--model", config, "--routing", "uniform"]) == 2
    assert "it is for measurements with --load random" in capsys.readouterr().err
    with pytest.raises(YalisError, match="routing is 'even'; accepted: model, uniform"):
        LLM(config, load="random", routing="even")
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps({**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    with pytest.raises(YalisError, match=r"for a mixture of experts, and .*dense\.json has no experts"):
        run(str(dense))
