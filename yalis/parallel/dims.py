"""The dimensions of one rank's slice of a model, from which its floors are computed."""

from __future__ import annotations

from dataclasses import replace

from yalis.parallel.plan import Grid, Split, shard
from yalis.perfmodel.floors import ModelDims
from yalis.spec import ModelSpec


def rank_dims(spec: ModelSpec, split: Split, rank: int, weight_bytes: float, kv_bytes: float) -> ModelDims:
    """Return the dimensions of the shards that `rank` holds. Biases and routers count for every rank."""
    coords = split.coords(rank)
    grid = Grid.at(split, coords)
    heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
    layers = shard(spec.num_layers, split.stages, coords.stage)
    whole = ModelDims.of(spec, weight_bytes, kv_bytes)
    experts = len(grid.experts(whole.experts))
    return replace(
        whole,
        columns=split.cols,
        layers=len(layers),
        heads=len(heads),
        kv_heads=len(kv_heads),
        intermediate=len(grid.width(spec.intermediate_size)),
        expert_layers=sum(spec.mlp_of(layer) == "moe" for layer in layers),
        experts=experts,
        top_k=whole.top_k * experts / whole.experts if whole.experts else 0,
        expert_width=len(grid.expert_width(whole.expert_width)),
        shared_width=len(grid.width(whole.shared_width)),
        vocab=len(grid.vocabulary(spec.vocab_size)),
        embedding=coords.stage == 0,
        head=coords.stage == split.stages - 1,
        windows=spec.windows[layers.start : layers.stop],
    )
