"""Each rank reads only its slices, and the shards of all ranks together are the complete model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.families import Case
from tests.gguf_files import write_gguf
from tests.multiprocess.splits import WIDE
from tests.unit.test_parallel_memory import BLOCK, FakeRanks
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.models.decoder import Decoder
from yalis.parallel.embedding import LMHead, VocabEmbedding
from yalis.parallel.linear import GridLinear
from yalis.parallel.memory import rank_memory
from yalis.parallel.norm import HeadNorm, JointHeadNorm, Norm
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.parallel.weights import DenseWeight, InterleavedShard, ParallelLayer, RowShard, Weight
from yalis.spec import ModelSpec, read_spec

Kind = gguf.GGMLQuantizationType
SPLITS = [
    Split(2),
    Split(3),
    Split(4),
    Split(2, 2),
    Split(1, 4),
    Split(stages=2),
    Split(stages=3),
    Split(3, 2, 2),
]
MAX_LEN = 64


def load_rank(spec: ModelSpec, checkpoint: Checkpoint, split: Split, rank: int, dtype: torch.dtype) -> Decoder:
    seats = FakeRanks(rank)
    grid, stage = Grid.open(split, rank, seats), Stage.open(split, rank, seats)
    model = Decoder(spec, grid, stage, MAX_LEN, dtype, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    model.load(checkpoint)
    return model


Slice = tuple[str, tuple[int, ...], tuple[range, ...], Tensor]  # name, full shape, slice of it, values


def dense(weight: Weight) -> Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.data


def in_file_order(shard: RowShard, values: Tensor) -> Tensor:
    """Return rows as the checkpoint has them: RoPE on neighbouring pairs reorders them on load."""
    if not isinstance(shard, InterleavedShard):
        return values
    heads = values.clone().view(-1, shard.head_dim, *values.shape[1:])
    even, odd = heads[:, : shard.rotated].chunk(2, dim=1)
    heads[:, : shard.rotated] = torch.stack((even, odd), dim=2).flatten(1, 2)
    return heads.view(values.shape)


def slices_of(model: Decoder) -> Iterator[Slice]:
    """Yield every slice of a checkpoint tensor that the model holds."""
    for module in model.modules():
        if not isinstance(module, ParallelLayer):
            continue
        if isinstance(module, GridLinear):
            start, cols = 0, module.weight.cols
            for shard in module.weight.shards:
                here = slice(start, start + len(shard.rows))
                shape = (shard.total_rows, module.weight.total_cols)
                yield (
                    f"{shard.name}.weight",
                    shape,
                    (shard.rows, cols),
                    in_file_order(shard, dense(module.weight)[here]),
                )
                if module.bias is not None:
                    yield f"{shard.name}.bias", shape[:1], (shard.rows,), in_file_order(shard, module.bias[here])
                start += len(shard.rows)
        elif isinstance(module, (VocabEmbedding, LMHead)):
            if not (isinstance(module, LMHead) and module.tied):
                (shard,) = module.weight.shards
                shape, held = (shard.total_rows, module.hidden), (module.vocab_shard, range(module.hidden))
                yield f"{shard.name}.weight", shape, held, dense(module.weight)
        elif isinstance(module, Norm):
            for kind, values in module.named_parameters():
                yield f"{module.name}.{kind}", (module.size,), (module.shard,), values
        elif isinstance(module, JointHeadNorm):
            start = 0
            for name, total, heads in zip(module.names, module.totals, module.held, strict=True):
                held = range(heads.start * module.head_dim, heads.stop * module.head_dim)
                yield f"{name}.weight", (total * module.head_dim,), (held,), module.weight[start : start + len(held)]
                start += len(held)
        else:
            assert isinstance(module, HeadNorm)
            size = len(module.weight)
            yield f"{module.name}.weight", (size,), (range(size),), module.weight


def join(models: list[Decoder]) -> dict[str, Tensor]:
    """Return the full tensors, NaN where no rank has a value. Values on several ranks must be equal."""
    whole: dict[str, Tensor] = {}
    for model in models:
        for name, shape, held, values in slices_of(model):
            assert not values.isnan().any(), f"{name}: not completely loaded"
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            target = tensor[tuple(slice(part.start, part.stop) for part in held)]
            assert target.shape == values.shape
            assert (target.isnan() | (target == values)).all(), f"{name} differs between ranks"
            target.copy_(values)
    return whole


def load(
    spec: ModelSpec, reopen: Callable[[], Checkpoint], split: Split, dtype: torch.dtype
) -> tuple[list[Decoder], list[int]]:
    """Return the model of every rank and the bytes it read, each with a separate checkpoint object."""
    models, read = [], []
    for rank in range(split.size):
        checkpoint = reopen()
        before = checkpoint.bytes_read  # opening a GGUF reads the rotary factors
        models.append(load_rank(spec, checkpoint, split, rank, dtype))
        read.append(checkpoint.bytes_read - before)
        checkpoint.close()
    return models, read


def check_joined(spec: ModelSpec, split: Split, models: list[Decoder], alone: dict[str, Tensor]) -> None:
    joined = join(models)
    assert joined.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(joined[name], tensor), f"{name} over {split}"
    if spec.tie_embeddings and split.stages > 1:  # join() merges them under one name
        assert models[0].embedding is not None
        assert models[-split.per_stage].head is not None
        assert torch.equal(dense(models[0].embedding.weight), dense(models[-split.per_stage].head.weight))


# Safetensors


@pytest.mark.parametrize(
    ("case", "stored"),
    [
        pytest.param(
            case, (torch.float32, torch.bfloat16)[number % 2], id=case.name, marks=[pytest.mark.full] * left_out
        )
        for number, case in enumerate(WIDE)
        for left_out in [case.brief and "tied" in case.name]
    ],
)
def test_safetensors(case: Case, stored: torch.dtype, tmp_path: Path) -> None:
    case.build(seed=1).to(stored).save_pretrained(tmp_path, max_shard_size="100KB")
    spec = read_spec(open_checkpoint(str(tmp_path)).config)
    [whole], [once] = load(spec, lambda: open_checkpoint(str(tmp_path)), Split(), torch.float32)
    alone = join([whole])
    saved = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert saved.keys() == alone.keys()
    for name, tensor in saved.items():
        offset = spec.norm_offset if "norm" in name and name.endswith("weight") else 0.0
        assert torch.equal(alone[name], tensor.float() + offset)
    assert once == sum(tensor.numel() for tensor in alone.values()) * stored.itemsize
    for split in SPLITS:
        models, read = load(spec, lambda: open_checkpoint(str(tmp_path)), split, torch.float32)
        check_joined(spec, split, models, alone)
        memory = [
            rank_memory(replace(spec, norm_offset=0.0), split, rank, stored.itemsize, BLOCK)
            for rank in range(split.size)
        ]
        assert read == [rank.weight_bytes for rank in memory]
        assert sum(read) == pytest.approx(once + sum(part.repeated for rank in memory for part in rank.weights))


@pytest.mark.parametrize("name", ["mixtral-window", "qwen2-moe"])
def test_fused_experts(name: str, tmp_path: Path) -> None:
    """A checkpoint with one tensor for all experts has the weights of one with a matrix for each."""
    (case,) = (case for case in WIDE if case.name == name)
    model = case.build(seed=1)
    model.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = open_checkpoint(str(tmp_path / "fused"))
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight"} <= set(fused.names())
    spec = read_spec(fused.config)
    for split in (Split(), Split(3), Split(2, 2)):
        (apart, read), (together, read_fused) = (
            load(spec, partial(open_checkpoint, str(tmp_path / folder)), split, torch.float32)
            for folder in ("apart", "fused")
        )
        assert read_fused == read
        check_joined(spec, split, together, join(apart))


# GGUF

LLAMA_9 = Case(
    "llama-9-heads", "LlamaConfig",
    {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 160,
     "num_hidden_layers": 3, "tie_word_embeddings": True},
)  # fmt: skip
NARROW = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 96}
GGUF_CASES = [
    (LLAMA_9, Kind.Q4_1),
    (Case("qwen2", "Qwen2Config", {**NARROW, "num_hidden_layers": 3}), Kind.BF16),
    (Case("gemma2", "Gemma2Config", {**NARROW, "head_dim": 16, "num_hidden_layers": 3}), Kind.Q8_0),
    (Case("phi3", "Phi3Config", {**NARROW, "num_hidden_layers": 3}), Kind.Q4_0),
    # Blocks of 256: every shard boundary is inside a block.
    (
        Case("llama-blocks", "LlamaConfig", {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
                                             "intermediate_size": 512, "num_hidden_layers": 3}),
        Kind.TQ2_0,
    ),
]  # fmt: skip


def stored_bytes(checkpoint: GgufCheckpoint, model: Decoder, whole_blocks: bool) -> float:
    """Return the file size of the model's slices. Blocks at their boundaries count fully, or in proportion."""
    total = 0.0
    for name, _, held, _ in slices_of(model):
        entry = checkpoint._entries[name]
        *rows, columns = (range(1), *held) if len(held) == 1 else held
        blocks = len(columns) / entry.block
        if whole_blocks:
            blocks = -(-columns.stop // entry.block) - columns.start // entry.block
        total += len(rows[-1]) * blocks * entry.block_bytes
    return total


@pytest.mark.parametrize(
    ("case", "kind"), [pytest.param(case, kind, id=f"{case.name}-{kind.name}") for case, kind in GGUF_CASES]
)
def test_gguf(case: Case, kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", case.build(seed=2), kind)
    checkpoint = GgufCheckpoint(path)
    spec = read_spec(checkpoint.config)
    [whole], [once] = load(spec, lambda: GgufCheckpoint(path), Split(), torch.float32)
    alone = join([whole])
    tensors = {name: checkpoint._entries[name] for name in alone}
    assert once == sum(entry.row_bytes * torch.Size(entry.shape[:-1]).numel() for entry in tensors.values())
    extra = 0.0
    for split in SPLITS:
        if spec.hidden_size % split.cols or spec.num_heads < split.rows:
            continue
        models, read = load(spec, lambda: GgufCheckpoint(path), split, torch.float32)
        check_joined(spec, split, models, alone)
        needed = [stored_bytes(checkpoint, model, whole_blocks=False) for model in models]
        assert read == [stored_bytes(checkpoint, model, whole_blocks=True) for model in models]
        extra += sum(read) - sum(needed)
        # A row has at most two boundaries, so at most two of its blocks are read twice.
        for model, bytes_read, part in zip(models, read, needed, strict=True):
            rows = sum(len(held[0]) for _, _, held, _ in slices_of(model) if len(held) == 2)
            assert part <= bytes_read <= part + 2 * rows * max(entry.block_bytes for entry in tensors.values())
    assert (extra > 0) == (kind != Kind.BF16)  # some boundary was inside a block


# Random weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in WIDE[::4]])
def test_random(case: Case, dtype: torch.dtype) -> None:
    config = case.build(seed=1).config.to_dict()
    spec = read_spec(config)
    [whole], _ = load(spec, lambda: RandomCheckpoint(config, seed=7), Split(), dtype)
    alone = join([whole])
    assert len({tensor.flatten()[0].item() for name, tensor in alone.items() if tensor.dim() == 2}) > 10
    for split in SPLITS:
        models, read = load(spec, lambda: RandomCheckpoint(config, seed=7), split, dtype)
        check_joined(spec, split, models, alone)
        assert read == [0] * split.size
