"""The computed memory of a rank equals that of its layers, part by part and to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families import CASES
from yalis.cache.pool import KVPool
from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.layers.mlp import MoE
from yalis.models.decoder import Decoder
from yalis.parallel.memory import RankMemory, rank_memory, whole_memory
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.spec import ModelSpec, read_spec

BLOCK = 16
NINE_HEADS = {
    "model_type": "llama", "hidden_size": 72, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 101, "num_hidden_layers": 3, "vocab_size": 251, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
SPLITS = [
    Split(),
    Split(2),
    Split(3),
    Split(4),
    Split(1, 2),
    Split(1, 4),
    Split(2, 2),
    Split(4, 2),
    Split(stages=2),
    Split(stages=3),
    Split(2, 1, 2),
    Split(3, 2, 2),
]
#: With whole experts; the models of the tests have five or more, and four heads.
EXPERT_SPLITS = [Split(4, expert_parallel=True), Split(3, 2, 2, expert_parallel=True)]


class FakeRank(SingleRank):
    """A rank of a larger group without the other ranks: enough to build layers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class FakeRanks(CommBackend):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @classmethod
    def unusable(cls, world: Any, device: torch.device) -> str | None:
        return None

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        return FakeRank(list(ranks).index(self.rank), len(ranks))


@cache
def family(name: str) -> ModelSpec:
    """Return the spec of a tiny model of the family, with three layers."""
    (case,) = (case for case in CASES if case.name == name)
    case = replace(case, options={**case.options, "num_hidden_layers": 3})
    return read_spec(case.build(seed=0).config.to_dict(), name)


def build(spec: ModelSpec, split: Split, rank: int, dtype: torch.dtype, max_len: int) -> Decoder:
    seats = FakeRanks(rank)
    grid, stage = Grid.open(split, rank, seats), Stage.open(split, rank, seats)
    return Decoder(spec, grid, stage, max_len, dtype, torch.device("meta"))


def is_moe(model: Decoder, name: str) -> bool:
    """Whether the parameter is of a layer with experts."""
    return isinstance(model.layers[int(name.split(".")[1])].mlp, MoE)


def parameter_bytes(model: Decoder) -> dict[str, int]:
    """Return the bytes of the decoder's parameters by the names of memory parts."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = model.layers[0].attention
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parts = {"head norms": parameter.nbytes}
        elif ".joint_norm." in name:
            head = parameter.nbytes // (layer.num_heads + layer.num_kv_heads)
            parts = {"query norms": layer.num_heads * head, "key norms": layer.num_kv_heads * head}
        elif name.endswith(".sinks.weight"):
            parts = {"attention sinks": parameter.nbytes}
        elif ".mlp.correction." in name:
            parts = {"routing corrections": parameter.nbytes}
        elif name.endswith((".mlp.gate_up.bias", ".mlp.down.bias")) and is_moe(model, name):
            parts = {f"{'down' if '.down.' in name else 'gate and up'} biases of experts": parameter.nbytes}
        elif ".mlp.router." in name:
            parts = {"routers": parameter.nbytes}
        elif ".mlp.shared." in name:
            parts = {"matrices of the shared expert": parameter.nbytes}
        elif "norm" in name:
            parts = {"norms": parameter.nbytes}
        elif name.startswith(("embedding", "head")):
            parts = {"embedding" if name.startswith("embedding") else "lm_head": parameter.nbytes}
        elif ".attention.qkv." in name:
            kind = "biases" if name.endswith("bias") else "matrices"
            head = parameter.nbytes // (layer.num_heads + 2 * layer.num_kv_heads)
            queries = "query biases" if kind == "biases" else "query and output matrices"
            parts = {queries: layer.num_heads * head, f"key/value {kind}": 2 * layer.num_kv_heads * head}
        elif ".attention.out." in name:
            parts = {"output biases" if name.endswith("bias") else "query and output matrices": parameter.nbytes}
        elif name.endswith("bias"):
            parts = {"down biases" if ".down." in name else "gate and up biases": parameter.nbytes}
        else:
            parts = {"expert matrices" if is_moe(model, name) else "MLP matrices": parameter.nbytes}
        for part, size in parts.items():
            found[part] = found.get(part, 0) + size
    return found


def planned_bytes(memory: RankMemory) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in memory.weights:
        name = part.name.removeprefix("shared ")
        found[name] = found.get(name, 0) + part.bytes
    return found


def check_against_layers(spec: ModelSpec, split: Split, dtype: torch.dtype, max_len: int) -> None:
    for rank in range(split.size):
        memory = rank_memory(spec, split, rank, dtype.itemsize, BLOCK, max_len)
        model = build(spec, split, rank, dtype, max_len)
        assert planned_bytes(memory) == parameter_bytes(model), f"{split}, rank {rank}"
        assert memory.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert memory.rotary.bytes == sum(buffer.nbytes for buffer in model.buffers())
        attention = model.layers[0].attention
        assert len(memory.heads) == attention.num_heads
        shape = (len(model.layers), 5, BLOCK, attention.num_kv_heads, spec.head_dim)
        assert 5 * memory.kv_block_bytes == KVPool(*shape, dtype, torch.device("meta")).nbytes


def check_copies(spec: ModelSpec, split: Split) -> None:
    """Counting each replicated byte once gives the size of the model."""
    ranks = [rank_memory(spec, split, rank, 2, BLOCK) for rank in range(split.per_replica)]
    whole = whole_memory(spec, 2, BLOCK)
    assert sum(Fraction(part.bytes, part.copies) for rank in ranks for part in rank.weights) == whole.weight_bytes
    assert sum(Fraction(part.bytes, part.copies) for rank in ranks for part in rank.kv_block) == whole.kv_block_bytes
    assert sum(Fraction(rank.rotary.bytes, rank.rotary.copies) for rank in ranks) == whole.rotary.bytes
    total = sum(rank.weight_bytes - sum(part.repeated for part in rank.weights) for rank in ranks)
    assert total == pytest.approx(whole.weight_bytes)


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_every_family_to_the_byte(case: str) -> None:
    spec = family(case)
    for split in SPLITS + (EXPERT_SPLITS if spec.moe else []):
        check_against_layers(spec, split, torch.bfloat16, max_len=100)
        check_copies(spec, split)
    check_against_layers(spec, Split(2, 2), torch.float32, max_len=100)


@st.composite
def models_and_splits(draw: st.DrawFn) -> tuple[ModelSpec, Split]:
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "phi3"])),
        "hidden_size": 24,
        "head_dim": 2 * draw(st.integers(1, 4)),
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 5)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw(st.integers(1, 60)),
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    spec = read_spec(config)
    rows = draw(st.integers(1, min(6, spec.num_heads, spec.intermediate_size, spec.vocab_size)))
    cols = draw(st.integers(1, min(4, spec.vocab_size // rows)))
    return spec, Split(rows, cols, draw(st.integers(1, spec.num_layers)), draw(st.integers(1, 2)))


@settings(max_examples=40, deadline=None)
@given(models_and_splits())
def test_any_model_and_split_to_the_byte(case: tuple[ModelSpec, Split]) -> None:
    spec, split = case
    split.check(spec, "it")
    check_against_layers(spec, split, torch.bfloat16, max_len=32)
    check_copies(spec, split)


@pytest.mark.parametrize(
    ("rows", "shards"),
    [
        (2, [(5, 2), (4, 2)]),
        (4, [(3, 1), (2, 1), (2, 2), (2, 1)]),
        (5, [(2, 1), (2, 2), (2, 1), (2, 1), (1, 1)]),
    ],
)
def test_nine_heads_over_three(rows: int, shards: list[tuple[int, int]]) -> None:
    """A rank holds the key/value heads of its query heads; a head that two rows read is on both."""
    spec, split = read_spec(NINE_HEADS), Split(rows)
    ranks = [rank_memory(spec, split, rank, 4, BLOCK) for rank in range(rows)]
    assert [(len(rank.heads), len(rank.kv_heads)) for rank in ranks] == shards
    assert [rank.kv_token_bytes for rank in ranks] == [3 * 2 * kv * 8 * 4 for _, kv in shards]
    twice = [part for rank in ranks for part in rank.kv_block if part.copies > 1]
    excess = sum(kv for _, kv in shards) - 3
    assert sum(part.bytes for part in twice) == 2 * excess * 3 * 2 * 8 * 4 * BLOCK  # each such head twice
    assert all((part.copies, part.held[-20:]) == (2, "heads read by 2 rows") for part in twice)


def test_prime_vocabulary_and_odd_layers() -> None:
    spec, split = read_spec(NINE_HEADS), Split(2, 2, 2)
    ranks = [rank_memory(spec, split, rank, 4, BLOCK) for rank in range(8)]
    assert [len(rank.vocabulary) for rank in ranks] == [63, 63, 63, 62] * 2
    assert [len(rank.layers) for rank in ranks] == [2] * 4 + [1] * 4
    assert [len(rank.width) for rank in ranks] == [51, 51, 50, 50] * 2


def test_a_tied_embedding_is_on_the_first_and_last_stage() -> None:
    spec = read_spec(NINE_HEADS)
    first, middle, last = (rank_memory(spec, Split(stages=3), rank, 4, BLOCK) for rank in range(3))
    table = 251 * 72 * 4
    (embedding,) = (part for part in first.weights if part.name == "embedding")
    (head,) = (part for part in last.weights if part.name == "lm_head")
    assert (embedding.bytes, embedding.copies) == (head.bytes, head.copies) == (table, 2)
    assert embedding.held.endswith("also on the last stage (tied)")
    assert {"embedding", "lm_head"}.isdisjoint(part.name for part in middle.weights)
    # With a single stage there is one matrix.
    assert [part.name for part in whole_memory(spec, 4, BLOCK).weights].count("lm_head") == 0


def test_an_even_split_has_its_fraction_and_the_replicated_parts() -> None:
    """1 / (tp * pp) of the weights and 1 / (rows * pp) of the KV cache, plus the replicated parts."""
    even = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 256}
    spec = read_spec({**NINE_HEADS, **even, "num_hidden_layers": 4, "tie_word_embeddings": False})
    whole = whole_memory(spec, 2, BLOCK)
    for split in (Split(2), Split(4), Split(2, 2), Split(1, 4), Split(2, 1, 2), Split(2, 2, 2)):
        for rank in range(split.size):
            memory = rank_memory(spec, split, rank, 2, BLOCK)
            assert memory.kv_token_bytes == whole.kv_token_bytes / (split.rows * split.stages)
            assert {part.name for part in memory.weights if part.copies > 1} <= {"norms"}
            predicted = whole.weight_bytes / split.per_replica + sum(part.repeated for part in memory.weights)
            # The first and last stage have an embedding table each, so only the final norm is unevenly distributed.
            assert memory.weight_bytes == pytest.approx(predicted, abs=spec.hidden_size * 2)
