"""All ranks together read a checkpoint about once: at most 1.05 times its size, without repeated heads.

Norms are repeated on every rank of a stage. What is repeated otherwise: key and value heads if there are more rows
than heads, a tied embedding on the first and last pipeline stage, and blocks of a quantized GGUF file at the boundary
of two shards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from tests.families import Case
from tests.gguf_files import write_gguf
from tests.page_cache import evict, resident_bytes
from tests.unit.test_parallel_loading import load
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.parallel.plan import Split
from yalis.spec import read_spec

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
SPLITS = [Split(2), Split(4), Split(2, 2), Split(stages=2), Split(2, stages=2), Split(4, 2, 2)]


def read_by_all(path: Path, reopen: Callable[[], Checkpoint], split: Split) -> float:
    """Return the bytes that all ranks read, relative to the size of the weight files."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    _, read = load(read_spec(reopen().config), reopen, split, torch.float32)
    return sum(read) / sum(file.stat().st_size for file in files)


@pytest.fixture(scope="module", params=["safetensors", "bf16.gguf", "q8_0.gguf"])
def untied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Case("llama", "LlamaConfig", {**SIZES, "tie_word_embeddings": False}).build(seed=3)
    folder = tmp_path_factory.mktemp("untied")
    if request.param == "safetensors":
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder
    kind = gguf.GGMLQuantizationType[str(request.param).removesuffix(".gguf").upper()]
    return write_gguf(folder / request.param, model, kind)


def reader(path: Path) -> Callable[[], Checkpoint]:
    return (lambda: GgufCheckpoint(path)) if path.is_file() else (lambda: open_checkpoint(str(path)))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_all_ranks_together_read_the_checkpoint_once(untied: Path, split: Split) -> None:
    assert 0.95 < read_by_all(untied, reader(untied), split) <= 1.05


def test_repeated_parts_are_read_again(tmp_path: Path) -> None:
    """A tied embedding is on the first and the last stage, and 8 rows share 4 key and value heads."""
    model = Case("llama", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}).build(seed=3)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    staged = read_by_all(tmp_path, reader(tmp_path), Split(stages=2))
    assert staged == pytest.approx(1 + model.get_input_embeddings().weight.numel() / whole, rel=0.01)
    kv_heads = 4 * 2 * 4 * 32 * 256  # layers, keys and values, heads, rows of a head, columns
    assert read_by_all(tmp_path, reader(tmp_path), Split(8)) == pytest.approx(1 + kv_heads / whole, rel=0.02)


@pytest.mark.parametrize("stored", ["safetensors", "bf16.gguf"])
def test_a_host_does_not_read_the_columns_of_other_hosts(stored: str, tmp_path: Path) -> None:
    """The pages that the kernel reads for a quarter of the columns, including what it reads ahead.

    A row has 128 KiB. A quarter of it is 32 KiB, and up to two of its pages are shared with the neighbours.
    """
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 65536, "num_hidden_layers": 1}
    model = Case("llama", "LlamaConfig", {**sizes, "tie_word_embeddings": False}).build(seed=3).to(torch.bfloat16)
    if stored == "safetensors":
        model.save_pretrained(tmp_path)
        path, reopen = tmp_path / "model.safetensors", reader(tmp_path)
    else:
        path = write_gguf(tmp_path / stored, model, gguf.GGMLQuantizationType.BF16)
        reopen = reader(path)
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    for start in range(0, 65536, 16384):
        checkpoint = reopen()
        evict(path)
        before = resident_bytes(path)  # of the header, whose pages are in use
        if before > 1 << 20:
            pytest.skip("this file system keeps its pages in memory")
        out = torch.empty(64, 16384, dtype=torch.bfloat16)
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight", (64, 65536)).read_into(
            out, slice(0, 64), slice(start, start + 16384)
        )
        checkpoint.close()
        assert torch.equal(out, weight[:, start : start + 16384])
        assert 1 <= (resident_bytes(path) - before) / out.nbytes < 1.3
