"""Random steps over a paged KV cache, and attention written token by token in float64 to compare with."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from yalis.attention.base import AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.kernels import reference


@dataclass(frozen=True)
class Case:
    """A step. Each sequence is (cached tokens, new tokens)."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 8
    window: int | None = None
    softcap: float | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    in_order: bool = False  # contiguous blocks instead of shuffled ones
    sinks: bool = False

    @property
    def params(self) -> AttentionParams:
        # Not the usual 1 / sqrt(head_dim), so that a backend that ignores the scale fails.
        sinks = None
        if self.sinks:
            generator = torch.Generator().manual_seed(self.seed)
            sinks = 2 * torch.randn(self.kv_heads * self.group, generator=generator)
            sinks = sinks.to(self.device, self.dtype)
        return AttentionParams(0.3 / math.sqrt(self.head_dim) + 0.2, self.window, self.softcap, sinks)

    @property
    def needs(self) -> AttentionNeeds:
        heads = self.kv_heads * self.group
        return AttentionNeeds(
            heads, self.kv_heads, self.head_dim, self.dtype, torch.device(self.device), self.block_size,
            self.window is not None, self.softcap is not None, self.sinks,
        )  # fmt: skip


@dataclass(frozen=True)
class Step:
    batch: ForwardBatch
    cache: LayerCache  # unused slots hold NaN
    q: Tensor
    k: Tensor  # keys and values of the new tokens, not yet written to the cache
    v: Tensor
    expected: Tensor  # [T, H, D] float64, on the CPU


def make_step(case: Case, slowly: bool = True) -> Step:
    """Make the tensors of a step. `expected` is computed by attend_one if `slowly`, else by kernels/reference.py."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    size, dim = case.block_size, case.head_dim
    contexts = [cached + count for cached, count in case.sequences]
    blocks = [-(-context // size) for context in contexts]
    block_ids = list(range(1, sum(blocks) + 4))
    if not case.in_order:
        rng.shuffle(block_ids)
    tables = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    shape = (len(block_ids) + 1, size, case.kv_heads, dim)
    cache_k, cache_v = torch.full(shape, math.nan, dtype=case.dtype), torch.full(shape, math.nan, dtype=case.dtype)
    # Block tables are padded with 0, and block 0 may hold the data of another sequence.
    cache_k[0], cache_v[0] = torch.randn(shape[1:]), torch.randn(shape[1:])
    heads = case.kv_heads * case.group
    tokens = sum(count for _, count in case.sequences)
    # Views of one tensor, as a fused QKV projection returns them.
    joint = torch.randn(tokens, heads + 2 * case.kv_heads, dim).to(case.dtype)
    q, k, v = joint.split((heads, case.kv_heads, case.kv_heads), dim=1)
    expected = torch.empty(tokens, heads, dim, dtype=torch.float64)
    positions: list[int] = []
    slots: list[int] = []
    row = 0
    for i, ((cached, count), context) in enumerate(zip(case.sequences, contexts, strict=True)):
        table = [block_ids.pop(0) for _ in range(blocks[i])]
        tables[i, : len(table)] = torch.tensor(table)
        context_slots = [table[p // size] * size + p % size for p in range(context)]
        keys, values = (torch.randn(context, case.kv_heads, dim).to(case.dtype) for _ in range(2))
        keys[cached:], values[cached:] = k[row : row + count], v[row : row + count]
        for cache, rows in ((cache_k, keys), (cache_v, values)):
            cache.flatten(0, 1)[context_slots[:cached]] = rows[:cached]
        for j in range(count if slowly else 0):
            expected[row + j] = attend_one(q[row + j].double(), keys.double(), values.double(), cached + j, case.params)
        positions += range(cached, context)
        slots += context_slots[cached:]
        row += count
    lens = tuple(count for _, count in case.sequences)
    start = torch.tensor([0, *lens]).cumsum(0).int()
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.tensor(positions),
        rope_rows=torch.tensor(positions),
        kv_slots=torch.tensor(slots),
        query_start=start,
        context_len=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        logit_rows=start[1:].long() - 1,
        query_lens=lens,
        context_lens=tuple(contexts),
    )
    step = move(Step(batch, LayerCache(cache_k, cache_v), q, k, v, expected), case.device)
    return step if slowly else replace(step, expected=expect(step, case.params))


def expect(step: Step, params: AttentionParams) -> Tensor:
    """Return the result of kernels/reference.py in float64, over a copy of the cache with the new keys and values."""
    batch = step.batch
    k, v = (x.double() for x in step.cache)
    k.flatten(0, 1)[batch.kv_slots], v.flatten(0, 1)[batch.kv_slots] = step.k.double(), step.v.double()
    indices = (batch.query_start, batch.context_len, batch.block_tables)
    scalars = (params.scale, params.window, params.softcap)
    return reference.paged_attention(step.q.double(), k, v, *indices, *scalars, params.sinks).cpu()


def attend_one(q: Tensor, keys: Tensor, values: Tensor, position: int, params: AttentionParams) -> Tensor:
    """Return the attention of one token, head by head and key by key. q [H, D], keys and values [context, K, D]."""
    heads, group = q.shape[0], q.shape[0] // keys.shape[1]
    first = 0 if params.window is None else max(0, position - params.window + 1)
    rows = []
    for head in range(heads):
        scores = []
        for p in range(first, position + 1):
            score = float(torch.dot(q[head], keys[p, head // group])) * params.scale
            if params.softcap is not None:
                score = params.softcap * math.tanh(score / params.softcap)
            scores.append(score)
        max_score = max(scores)
        weights = torch.tensor([math.exp(s - max_score) for s in scores], dtype=torch.float64)
        total = weights.sum()
        if params.sinks is not None:
            total += math.exp(float(params.sinks[head]) - max_score)
        rows.append((weights[:, None] * values[first : position + 1, head // group]).sum(0) / total)
    return torch.stack(rows)


def move(step: Step, device: str) -> Step:
    def to_device(x: object) -> object:
        return x.to(device) if isinstance(x, Tensor) else x

    batch = ForwardBatch(**{name: to_device(value) for name, value in vars(step.batch).items()})  # type: ignore[arg-type]
    joint = torch.cat((step.q, step.k, step.v), dim=1).to(device)
    q, k, v = joint.split((step.q.shape[1], step.k.shape[1], step.v.shape[1]), dim=1)
    return Step(batch, LayerCache(*(x.to(device) for x in step.cache)), q, k, v, step.expected)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference divided by the largest expected magnitude; NaN if any output is NaN."""
    return float((out.double().cpu() - expected).abs().max() / expected.abs().max())
