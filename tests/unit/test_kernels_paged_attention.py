"""Paged attention kernels in Triton's interpreter against the plain-torch reference, with contexts of several tiles."""

from __future__ import annotations

import math
import os
import random
from itertools import pairwise

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

from tests.attention_cases import Case, expect, make_step, relative_error

kernels = pytest.importorskip("yalis.kernels.paged_attention", reason="triton is not installed")


def run(case: Case, programs: int = 16, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Return the kernels' output, the reference's output and the launch plan."""
    step, params, needs = make_step(case), case.params, case.needs
    batch, (k, v) = step.batch, step.cache
    k.flatten(0, 1)[batch.kv_slots], v.flatten(0, 1)[batch.kv_slots] = step.k, step.v
    plan = kernels.plan_launch(
        batch.query_start, batch.query_lens, needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.dtype, programs
    )
    contexts, tables = batch.context_len, batch.block_tables
    if transposed:
        contexts, tables = contexts.long(), tables.long().t().contiguous().t()
    settings = (params.scale, params.window, params.softcap)
    starts = batch.query_start
    out = kernels.paged_attention(step.q, k, v, starts, contexts, tables, plan, *settings, sinks=params.sinks)
    expected = expect(step, params)
    # The reference itself is checked against attention written token by token.
    assert relative_error(expected, step.expected) < 1e-12
    assert kernels._counters(torch.device("cpu")).count_nonzero() == 0, "a launch did not reset its counters"
    return out, expected, plan


@pytest.mark.parametrize("window", [None, 1, 40, 150, 1000])
@pytest.mark.parametrize("programs", [1, 3, 7, 40])
def test_decode_splits(window: int | None, programs: int) -> None:
    # Contexts of several tiles, of less than a tile, and of the new token alone (as in batch padding).
    sinks = programs % 2 == 1 or window == 40
    out, expected, _ = run(Case(((299, 1), (10, 1), (0, 1)), kv_heads=1, group=3, window=window, sinks=sinks), programs)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_random_decode_steps(seed: int) -> None:
    """Contexts of random lengths, with the layout of a captured step: int64 lengths, transposed block tables."""
    rng = random.Random(seed)
    contexts = tuple((rng.choice((0, 1, 31, 127, 128, 129, 200, 500)), 1) for _ in range(rng.randint(1, 5)))
    kv_heads, group, dim = rng.choice(((1, 4, 16), (2, 1, 20), (1, 9, 16)))
    case = Case(
        contexts, kv_heads, group, dim, rng.choice((4, 16)), rng.choice((None, 90)), rng.choice((None, 5.0)), seed
    )
    out, expected, _ = run(case, programs=rng.choice((1, 4, 9, 40)), transposed=True)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [None, 1, 5, 33, 64, 90])
def test_prefill_over_several_tiles(window: int | None) -> None:
    out, expected, plan = run(Case(((70, 40), (0, 33)), kv_heads=1, group=2, window=window, block_size=16))
    assert plan.num_tiles > 4  # type: ignore[attr-defined]
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [None, 1, 33, 90])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("block_size", [32, 128])
def test_tiles_loaded_by_tma(
    block_size: int, softcap: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of 16-bit caches on a GPU; cache slots after the end of a context hold NaN."""
    tiles: list[int] = []
    make = kernels.kv_descriptor
    monkeypatch.setattr(kernels, "kv_descriptor", lambda cache, keys: tiles.append(keys) or make(cache, keys))
    monkeypatch.setattr(kernels, "can_use_tma", lambda *_: True)
    sequences = ((299, 1), (10, 1), (0, 1), (70, 40), (0, 33), (0, 2))
    case = Case(sequences, kv_heads=2, group=3, block_size=block_size, window=window, softcap=softcap)
    out, expected, _ = run(case, programs=40)
    assert len(tiles) == (4 if window is None else 2)  # keys and values, of prefill and of decode
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("group", [1, 3, 7, 40])
def test_groups_that_do_not_divide_a_tile(group: int) -> None:
    out, expected, _ = run(Case(((3, 9), (20, 1)), kv_heads=2, group=group, softcap=2.0))
    assert relative_error(out, expected) < 1e-5


def test_long_context_is_split_and_a_mixed_step_uses_both_kernels() -> None:
    out, expected, plan = run(Case(((200, 1), (2, 5), (7, 1)), kv_heads=1, group=2, head_dim=20), programs=4)
    assert plan.split_plans[None][4].max() > 1  # type: ignore[attr-defined]
    assert plan.num_tiles > 0  # type: ignore[attr-defined]
    assert relative_error(out, expected) < 1e-5


def test_launch_sizes() -> None:
    def plan(query_lens: tuple[int, ...], programs: int = 528) -> object:
        start = torch.tensor([0, *query_lens]).cumsum(0).int()
        return kernels.plan_launch(start, query_lens, 32, 8, 128, torch.bfloat16, programs)

    small = plan((1,))
    large = plan((1,) * 1024)
    assert (small.num_tiles, large.num_tiles) == (0, 0)  # type: ignore[attr-defined]
    assert (small.max_splits, large.max_splits) == (67, 1090)  # type: ignore[attr-defined]
    mixed = plan((1, 33, 1, 10))  # a tile of 64 rows holds 16 queries of 4 heads
    assert mixed.tile_sequence.tolist() == [1, 1, 1, 3]  # type: ignore[attr-defined]
    assert mixed.tile_start[[1, 3]].tolist() == [0, 3]  # type: ignore[attr-defined]
    assert plan((7,)).max_splits == 0  # type: ignore[attr-defined]


def plan_splits(
    lens: list[int], contexts: list[int], programs: int, kv_heads: int, tile: int, window: int | None
) -> list[list[int]]:
    """Return the columns of the split plan of a step: (sequence, begin, end, index, num_splits)."""
    start = torch.tensor([0, *lens]).cumsum(0).int()
    max_splits = len(lens) + programs // kv_heads
    plan = torch.full((5, max_splits), -7, dtype=torch.int32)
    kernels.plan_splits[(-(-max_splits // kernels.BLOCK_SPLITS.value),)](
        plan, start, torch.tensor(contexts), len(lens), kv_heads, max_splits, programs, window or 0,
        BLOCK_N=tile, WINDOW=window is not None, PDL=False,
    )  # fmt: skip
    columns: list[list[int]] = plan.t().tolist()
    return columns


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("seed", range(8))
def test_splits_cover_every_context_once(seed: int, window: int | None) -> None:
    """Splits cover each decoding context from end to end in whole tiles, in proportion to its share of all keys."""
    rng = random.Random(seed)
    count, programs, kv_heads, tile = rng.choice((1, 3, 130, 300)), rng.choice((1, 16, 396)), rng.choice((1, 8)), 32
    lens = [rng.choice((1, 1, 1, 5)) for _ in range(count)]
    contexts = [max(queries, rng.choice((1, 31, 32, 33, 700, 9000))) for queries in lens]
    expected = []
    visible = {i: min(contexts[i], window or contexts[i]) for i, queries in enumerate(lens) if queries == 1}
    for i, keys in visible.items():
        share = keys * programs // (sum(visible.values()) * kv_heads)
        num_splits = max(1, min(share, math.isqrt(keys // 4), -(-keys // tile)))
        length = math.ceil(keys / num_splits / tile) * tile
        edges = [*range(contexts[i] - keys, contexts[i], length), contexts[i]]
        expected += [[i, *pair, index, len(edges) - 1] for index, pair in enumerate(pairwise(edges))]
    found = plan_splits(lens, contexts, programs, kv_heads, tile, window)
    assert found[: len(expected)] == expected
    assert all(split[0] == -1 for split in found[len(expected) :])


def test_total_keys_above_32_bits() -> None:
    """Keys times heads of all contexts exceed 2**31, as with many sequences that share a long prefix."""
    found = plan_splits([1] * 512, [131072] * 512, 396, 32, 64, None)
    assert [split[0] for split in found if split[0] >= 0] == list(range(512))
