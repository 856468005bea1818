"""GGUF files: tensors and config as in transformers, reading slices, and errors for invalid files."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families import Case, choose_eager
from tests.gguf_files import SIZES, fuse_experts, read_all, write_gguf, write_matrix
from tests.peak_memory import peak_extra_bytes
from yalis import LLM, SamplingParams
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.errors import YalisError
from yalis.families import FAMILIES
from yalis.spec import read_spec

Kind = gguf.GGMLQuantizationType
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {"long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0], "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5]}
CASES = [
    Case("llama-tied", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    Case("llama-bias", "LlamaConfig", {**SIZES, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    Case(
        "llama-wide-heads", "LlamaConfig", {**SIZES, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    Case("llama3", "LlamaConfig", {**SIZES, "rope_parameters": _LLAMA3}),
    Case(
        "llama3-other", "LlamaConfig", {**SIZES, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32}}
    ),
    Case("mistral", "MistralConfig", {**SIZES, "sliding_window": 8}),
    Case("qwen2", "Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    Case("qwen3", "Qwen3Config", {**SIZES, "head_dim": 24}),
    Case("gemma2", "Gemma2Config", {**SIZES, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    Case("phi3", "Phi3Config", {**SIZES, "num_key_value_heads": 4, "sliding_window": 12}),
    Case(
        "phi3-partial",
        "Phi3Config",
        {**SIZES, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    Case(
        "phi3-longrope",
        "Phi3Config",
        {
            **SIZES,
            "original_max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG},
        },
    ),
    Case(
        "granite",
        "GraniteConfig",
        {
            **SIZES,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
    ),
    Case(
        "gemma3",
        "Gemma3TextConfig",
        {
            **SIZES,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        std=0.15,
    ),
    Case("olmo2", "Olmo2Config", {**SIZES, "attention_bias": True}),
    Case(
        "olmo3",
        "Olmo3Config",
        {
            **SIZES,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.3,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    Case(
        "smollm3", "SmolLM3Config", {**SIZES, "num_hidden_layers": 4, "mlp_bias": True, "attention_bias": True}, std=0.2
    ),
    Case("glm4", "Glm4Config", {**SIZES, "head_dim": 16}),
    Case("seed_oss", "SeedOssConfig", {**SIZES, "head_dim": 16}),
    Case("exaone4", "Exaone4Config", {**SIZES, "sliding_window": 8, "sliding_window_pattern": 2}),
    Case("ernie4_5", "Ernie4_5Config", {**SIZES, "head_dim": 16, "use_bias": True}),
    Case("arcee", "ArceeConfig", {**SIZES, "head_dim": 16}),
    Case("mixtral", "MixtralConfig", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 3}),
    Case("olmoe", "OlmoeConfig", {**SIZES, "num_experts": 7, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    Case(
        "qwen2-moe",
        "Qwen2MoeConfig",
        {
            **SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 21,
            "shared_expert_intermediate_size": 35,
        },
    ),
    Case(
        "qwen3-moe",
        "Qwen3MoeConfig",
        {
            **SIZES,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 21,
            "norm_topk_prob": True,
            "head_dim": 20,
        },
    ),
    Case(
        "glm4-moe",
        "Glm4MoeConfig",
        {
            **SIZES,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 21,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
    Case(
        "gpt-oss",
        "GptOssConfig",
        {
            **SIZES,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 21,
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
]
#: Families of which llama.cpp may also write gate and up of all experts as one tensor.
JOINED = ("qwen3-moe", "gpt-oss")


def _write(
    case: Case, folder: Path, kind: Kind = Kind.F32, joined: bool = False
) -> tuple[Path, transformers.PreTrainedModel]:
    model = case.build(seed=3)
    extra: dict[str, object] = {}
    factors = {}
    if case.name.startswith("llama3"):
        # as llama.cpp stores them: divisors of the frequencies
        plain = 1.0 / 5e5 ** (torch.arange(0, 12, 2) / 12)
        factors["rope_freqs"] = (plain / model.model.rotary_emb.inv_freq).tolist()
    if case.name == "phi3-longrope":
        factors = {"rope_factors_long": _LONG["long_factor"], "rope_factors_short": _LONG["short_factor"]}
        extra["phi3.rope.scaling.original_context_length"] = 24
    return write_gguf(folder / f"{case.name}.gguf", model, kind, extra=extra, factors=factors, joined=joined), model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensors_and_config_make_the_same_model(case: Case, tmp_path: Path) -> None:
    path, model = _write(case, tmp_path)
    checkpoint = GgufCheckpoint(path)
    tensors = fuse_experts(read_all(checkpoint), model)
    if case.name in JOINED:
        (tmp_path / "joined").mkdir()
        together = GgufCheckpoint(_write(case, tmp_path / "joined", joined=True)[0])
        assert all(torch.equal(tensors[name], value) for name, value in fuse_experts(read_all(together), model).items())
    expected = {name: weight for name, weight in model.state_dict().items() if name in tensors}
    missing = set(model.state_dict()) - set(tensors)
    assert missing == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, weight in expected.items():
        # Gemma's offset of one was rounded when the file was written
        tolerance = 1e-6 if case.name in ("gemma2", "gemma3") and "norm" in name else 0
        assert torch.allclose(tensors[name], weight, rtol=0, atol=tolerance), name

    # a transformers model with this config and these tensors computes the same logits
    config = dict(checkpoint.config)
    assert config["architectures"][0] in FAMILIES
    read_spec(config)
    rebuilt_config = getattr(transformers, case.config)(**config)
    rebuilt = transformers.AutoModelForCausalLM.from_config(choose_eager(rebuilt_config), dtype=torch.float32).eval()
    rebuilt.load_state_dict(tensors, strict=False)
    for length in (9, 40):  # shorter and longer than the sliding windows and longrope's switch length
        ids = torch.randint(3, 251, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert torch.allclose(rebuilt(ids).logits, model(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_generates_the_tokens_of_the_original_model(case: Case, tmp_path: Path) -> None:
    path, model = _write(case, tmp_path)
    prompt = torch.randint(3, 251, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 14:].tolist()
    with LLM(str(path), dtype="float32", device="cpu", kv_blocks=16) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert output.token_ids == expected


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "gemma2", "phi3"])
def test_transformers_reads_the_same_tensors_from_the_file(name: str, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path, model = _write(next(case for case in CASES if case.name == name), tmp_path, Kind.F16)
    checkpoint = GgufCheckpoint(path)
    reference = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    tensors = read_all(checkpoint)
    assert set(tensors) == set(reference["tensors"]) - {"lm_head.weight"} | ({"lm_head.weight"} & set(tensors))
    for name, weight in tensors.items():
        assert torch.equal(weight, reference["tensors"][name]), name
    skipped = {"_model_name_or_path", "model_type", "dtype", "torch_dtype"}
    for key in reference["config"].keys() & checkpoint.config.keys() - skipped:
        assert checkpoint.config[key] == reference["config"][key], key
    assert checkpoint.config["dtype"] == "float16"


def test_llama3_scaling_is_recognised(tmp_path: Path) -> None:
    path, _ = _write(CASES[3], tmp_path)
    scaling = GgufCheckpoint(path).config["rope_scaling"]
    assert scaling.pop("factor") == pytest.approx(32.0)
    assert scaling == {key: value for key, value in _LLAMA3.items() if key not in ("rope_theta", "factor")}


def _dequantizable() -> list[Kind]:
    kinds = []
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes give infinite scales
@pytest.mark.parametrize("kind", _dequantizable(), ids=lambda kind: kind.name)
def test_every_type_the_gguf_package_can_dequantize(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = 512
    row_bytes = columns // block * size
    data = np.random.default_rng(int(kind)).integers(0, 256, (37, row_bytes), dtype=np.uint8)
    if kind in (Kind.F32, Kind.F16):
        data = data.view({Kind.F32: np.float32, Kind.F16: np.float16}[kind])
    checkpoint = GgufCheckpoint(write_matrix(tmp_path / "m.gguf", data, kind, columns))
    expected = torch.from_numpy(np.array(gguf.dequantize(data, kind), dtype=np.float32))
    lazy = checkpoint.tensor("model.embed_tokens.weight", (37, columns))
    before = checkpoint.bytes_read
    left, right = slice(3, 70), slice(256, 512)
    for rows, cols in ((slice(0, 37), slice(0, columns)), (slice(5, 20), right), (slice(36, 37), left)):
        out = torch.empty(expected[rows, cols].shape)
        lazy.read_into(out, rows, cols)
        assert torch.allclose(out, expected[rows, cols], rtol=0, atol=0, equal_nan=True)
    # everything, half the columns of 15 rows, and the blocks that contain columns 3 to 69 of one row
    blocks = 37 * (columns // block) + 15 * (256 // block if block <= 256 else 1) + (-(-70 // block) - 3 // block)
    assert checkpoint.bytes_read - before == blocks * size


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slice_of_interleaved_heads(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "llama.gguf"
    if not path.exists():
        write_gguf(path, CASES[1].build(seed=3))
    model = CASES[1].build(seed=3)
    checkpoint = GgufCheckpoint(path)
    name = data.draw(st.sampled_from(["q_proj.weight", "k_proj.weight", "q_proj.bias", "v_proj.weight"]))
    whole = model.state_dict()[f"model.layers.1.self_attn.{name}"]
    index = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    expected = whole[tuple(index)]
    out = torch.full(expected.shape, torch.nan, dtype=torch.bfloat16)
    checkpoint.tensor(f"model.layers.1.self_attn.{name}", tuple(whole.shape)).read_into(out, *index)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_reading_needs_little_memory_besides_the_result(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((32768, 1024 // block * size), dtype=np.uint8)  # 128 MiB as fp32
    data = data.view(np.float32) if kind == Kind.F32 else data
    checkpoint = GgufCheckpoint(write_matrix(tmp_path / "m.gguf", data, kind, 1024))
    del data
    out = torch.ones(32768, 1024)
    lazy = checkpoint.tensor("model.embed_tokens.weight", (32768, 1024))
    lazy.read_into(torch.empty(8, 1024), slice(0, 8))  # warm up imports and thread pools
    assert peak_extra_bytes(lambda: lazy.read_into(out)) < 48 << 20
    assert not out.any()


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model = CASES[0].build(seed=3)
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, model)
    expected = read_all(GgufCheckpoint(whole))
    first = tmp_path / "m-00001-of-00002.gguf"
    write_gguf(first, model, extra={"split.count": 2})
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    writer.add_tensor("output.weight", np.full((251, 48), 2.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(first)
    tensors = read_all(checkpoint)
    assert tensors.pop("lm_head.weight").unique().tolist() == [2.0]
    assert tensors.keys() == expected.keys()
    assert not checkpoint.config["tie_word_embeddings"]
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(YalisError, match=r"m-00002-of-00002.gguf is missing"):
        GgufCheckpoint(first)


def _one_sentence(error: pytest.ExceptionInfo[YalisError]) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def test_a_truncated_file(tmp_path: Path) -> None:
    path, _ = _write(CASES[0], tmp_path)
    whole = path.read_bytes()
    truncated = tmp_path / "truncated.gguf"
    for length in [0, 1, 4, 10, 24, 50, *range(100, len(whole), len(whole) // 40), len(whole) - 40]:
        truncated.write_bytes(whole[:length])
        with pytest.raises(YalisError, match=r"truncated\.gguf") as error:
            GgufCheckpoint(truncated)
        _one_sentence(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_raises_one_sentence_or_is_harmless(tmp_path: Path, flips: list[tuple[float, int]]) -> None:
    path = tmp_path / "llama-tied.gguf"
    if not path.exists():
        _write(CASES[0], tmp_path)
    content = bytearray(path.read_bytes())
    for where, value in flips:
        content[int(where * 2200)] = value  # metadata and the table of tensors
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with suppress(YalisError):
        checkpoint = GgufCheckpoint(damaged)
        for name in checkpoint.names():
            lazy = checkpoint.find(name)
            assert lazy is not None
            if torch.Size(lazy.shape).numel() < 1 << 20:
                lazy.read_into(torch.empty(lazy.shape))


def test_unsupported_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(YalisError, match="architecture 'bert'; known: llama, qwen2, qwen3, gemma2, phi3"):
        GgufCheckpoint(tmp_path / "other.gguf")

    rows = np.zeros((8, 40), dtype=np.uint8)
    with pytest.raises(YalisError, match=r"'token_embd.weight'.* is stored as Q8_1"):
        GgufCheckpoint(write_matrix(tmp_path / "q8_1.gguf", rows, Kind.Q8_1, 32))

    content = bytearray((tmp_path / "q8_1.gguf").read_bytes())
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    content[at] = 99
    (tmp_path / "new.gguf").write_bytes(content)
    with pytest.raises(YalisError, match=r"ggml type 99, .* pip install -U gguf"):
        GgufCheckpoint(tmp_path / "new.gguf")

    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(YalisError, match="is not a GGUF file"):
        GgufCheckpoint(tmp_path / "text.gguf")

    quantized = write_matrix(tmp_path / "q8_0.gguf", np.zeros((8, 34), dtype=np.uint8), Kind.Q8_0, 32)
    plain = write_matrix(tmp_path / "f32.gguf", np.zeros((8, 32), dtype=np.float32), Kind.F32, 32)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(YalisError, match="pip install gguf"):
        GgufCheckpoint(quantized)
    assert read_all(GgufCheckpoint(plain))["model.embed_tokens.weight"].eq(0).all()


def test_a_wrong_shape_and_a_missing_tensor(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(_write(CASES[0], tmp_path)[0])
    with pytest.raises(YalisError, match=r"has shape \(251, 48\), but its config requires \(251, 49\)"):
        checkpoint.tensor("model.embed_tokens.weight", (251, 49))
    with pytest.raises(YalisError, match=r"has no tensor 'lm_head.weight'"):
        checkpoint.tensor("lm_head.weight", (251, 48))


def test_tensors_of_experts_that_do_not_match_the_metadata(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "mixtral")
    model = case.build(seed=3)
    path = write_gguf(tmp_path / "m.gguf", model)
    content = path.read_bytes()
    at = content.index(b"llama.expert_count") + len(b"llama.expert_count") + 4
    assert content[at] == 5
    (tmp_path / "n.gguf").write_bytes(content[:at] + b"\x06" + content[at + 1 :])
    with pytest.raises(YalisError, match=r"'blk.0.ffn_gate_exps.weight'.* but its metadata has 6 experts"):
        GgufCheckpoint(tmp_path / "n.gguf")


def test_a_tensor_for_each_expert(tmp_path: Path) -> None:
    """Early GGUF files of Mixtral have blk.0.ffn_gate.3.weight instead of a tensor of all experts."""
    case = next(case for case in CASES if case.name == "mixtral")
    whole = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", case.build(seed=3)))
    writer = gguf.GGUFWriter(tmp_path / "apart.gguf", "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
                "attention.head_count_kv", "expert_count", "expert_used_count"):  # fmt: skip
        writer.add_uint32(f"llama.{key}", whole.metadata[f"llama.{key}"])
    writer.add_layer_norm_rms_eps(1e-5)
    parts = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
    for name, value in read_all(whole).items():
        words = name.split(".")
        if "experts" in words:
            name = f"blk.{words[2]}.{parts[words[-2]]}.{words[5]}.weight"
        else:
            name = whole._entries[name].name
        writer.add_tensor(name, value.numpy())
    writer.add_tensor("blk.0.ffn_other_exps.weight", np.zeros((5, 3, 2), dtype=np.float32))  # ignored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    apart = GgufCheckpoint(tmp_path / "apart.gguf")
    assert apart.config["architectures"] == ["MixtralForCausalLM"]
    assert apart._entries.keys() == whole._entries.keys()
    for expert in range(5):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        values = [torch.empty(checkpoint.find(name).shape) for checkpoint in (whole, apart)]
        for value, checkpoint in zip(values, (whole, apart), strict=True):
            checkpoint.find(name).read_into(value)
        assert torch.equal(*values)
