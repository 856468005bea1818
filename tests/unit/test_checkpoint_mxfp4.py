"""gpt-oss with experts in MXFP4, as released: the values of transformers, on every split, and its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.families import Case
from tests.gguf_files import write_gguf
from tests.unit.test_parallel_loading import check_joined, join, load
from yalis import LLM, SamplingParams
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.spec import read_spec

CASE = Case(
    "gpt-oss",
    "GptOssConfig",
    {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "sliding_window": 8,
    },
)
EXPERTS = ("gate_up_proj", "down_proj")


def write_released(folder: Path) -> transformers.PreTrainedModel:
    """Write a checkpoint with the tensor names of the released models, and return the dequantized model."""
    model = CASE.build(seed=5)
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales).float()
    model.load_state_dict(state)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mxfp4")
    return folder, write_released(folder)


def test_every_format_of_gpt_oss_has_the_same_weights_on_every_split(
    released: tuple[Path, transformers.PreTrainedModel], tmp_path: Path
) -> None:
    folder, model = released
    model.save_pretrained(tmp_path / "dense")
    apart, joined = (write_gguf(tmp_path / f"{flag}.gguf", model, joined=flag) for flag in (False, True))
    spec = read_spec(open_checkpoint(str(folder)).config)
    names = set(open_checkpoint(str(folder)).names())
    assert names == set(open_checkpoint(str(tmp_path / "dense")).names())
    for split in (Split(), Split(5), Split(2, 2)):

        def parameters(source: Path, chosen: Split = split) -> tuple[list[dict[str, Tensor]], list[int]]:
            models, read = load(spec, lambda: open_checkpoint(str(source)), chosen, torch.float32)
            return [dict(rank.named_parameters()) for rank in models], read

        expected, dense_bytes = parameters(tmp_path / "dense")
        found, packed_bytes = parameters(folder)
        for source, ranks in ((folder, found), *((path, parameters(path)[0]) for path in (apart, joined))):
            for rank, reference in zip(ranks, expected, strict=True):
                assert rank.keys() == reference.keys()
                for name, value in reference.items():
                    assert torch.equal(rank[name], value), f"{name} of {source} over {split}"
        assert all(packed < 0.8 * dense for packed, dense in zip(packed_bytes, dense_bytes, strict=True))
    assert GgufCheckpoint(apart).config["rope_scaling"]["truncate"] is False


def test_random_weights_are_the_same_on_every_split(released: tuple[Path, transformers.PreTrainedModel]) -> None:
    config = open_checkpoint(str(released[0])).config
    spec = read_spec(config)
    whole, parts = (
        load(spec, lambda: RandomCheckpoint(config, seed=7), split, torch.float32)[0]
        for split in (Split(), Split(2, 2))
    )
    alone = join(whole)
    assert alone["model.layers.1.mlp.experts.gate_up_proj"].shape == (3, 64, 192)
    assert all(tensor.float().std() > 0 for name, tensor in alone.items() if "norm" not in name)
    check_joined(spec, Split(2, 2), parts, alone)


def test_tokens_are_those_of_transformers(released: tuple[Path, transformers.PreTrainedModel]) -> None:
    folder, model = released
    model.set_attn_implementation("eager")
    prompt = torch.randint(3, 251, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 14:].tolist()
    with LLM(str(folder), dtype="float32", device="cpu", kv_blocks=16) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert output.token_ids == expected


def test_blocks_and_scales_that_do_not_belong_together(
    released: tuple[Path, transformers.PreTrainedModel], tmp_path: Path
) -> None:
    (path,) = released[0].glob("*.safetensors")
    (tmp_path / "config.json").write_text((released[0] / "config.json").read_text())
    tensors, name = load_file(path), "model.layers.1.mlp.experts.down_proj"
    for change in ({f"{name}_scales": tensors[f"{name}_scales"][:, :5].clone()},
                   {f"{name}_blocks": tensors[f"{name}_blocks"].float()}):  # fmt: skip
        save_file({**tensors, **change}, tmp_path / path.name)
        with pytest.raises(YalisError, match=rf"'{name}_blocks' .* MXFP4 needs U8 of shape"):
            open_checkpoint(str(tmp_path)).tensor(name, (3, 96, 64))
