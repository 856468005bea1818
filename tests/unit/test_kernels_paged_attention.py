"""The paged kernels in Triton's interpreter against their plain-torch reference, with contexts of several tiles."""

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
    """The kernels' output and the reference's, and how the kernels were launched."""
    step, params, needs = make_step(case), case.params, case.needs
    batch, (k, v) = step.batch, step.cache
    k.flatten(0, 1)[batch.kv_slots], v.flatten(0, 1)[batch.kv_slots] = step.k, step.v
    launch = kernels.plan_launch(
        batch.query_start, batch.query_lens, needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.dtype, programs
    )
    contexts, tables = batch.context_len, batch.block_tables
    if transposed:
        contexts, tables = contexts.long(), tables.long().t().contiguous().t()
    settings = (params.scale, params.window, params.softcap)
    out = kernels.paged_attention(step.q, k, v, batch.query_start, contexts, tables, launch, *settings)
    expected = expect(step, params)
    # The reference is itself checked, against attention written token by token.
    assert relative_error(expected, step.expected) < 1e-12
    assert kernels._counters(torch.device("cpu")).count_nonzero() == 0, "a launch left counts behind"
    return out, expected, launch


@pytest.mark.parametrize("window", [None, 1, 40, 150, 1000])
@pytest.mark.parametrize("programs", [1, 3, 7, 40])
def test_decode_pieces(window: int | None, programs: int) -> None:
    # One context has several tiles, one is read whole, one fills up a batch.
    out, expected, _ = run(Case(((299, 1), (10, 1), (0, 1)), kv_heads=1, group=3, window=window), programs)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_random_decode_steps(seed: int) -> None:
    """Ragged contexts, as a captured launch sees them: 64-bit lengths, tables lying across."""
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
    out, expected, launch = run(Case(((70, 40), (0, 33)), kv_heads=1, group=2, window=window, block_size=16))
    assert launch.tiles > 4  # type: ignore[attr-defined]
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [None, 1, 33, 90])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("block_size", [32, 128])
def test_whole_blocks_by_descriptor(
    block_size: int, softcap: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does in 16 bits; what lies behind a context in its last block is NaN."""
    described: list[int] = []
    describe = kernels.by_keys
    monkeypatch.setattr(kernels, "by_keys", lambda cache, keys: described.append(keys) or describe(cache, keys))
    monkeypatch.setattr(kernels, "in_blocks", lambda *_: True)
    sequences = ((299, 1), (10, 1), (0, 1), (70, 40), (0, 33), (0, 2))
    case = Case(sequences, kv_heads=2, group=3, block_size=block_size, window=window, softcap=softcap)
    out, expected, _ = run(case, programs=40)
    assert len(described) == (4 if window is None else 2)  # keys and values, of prefill and of decode
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("group", [1, 3, 7, 40])
def test_groups_that_do_not_divide_a_tile(group: int) -> None:
    out, expected, _ = run(Case(((3, 9), (20, 1)), kv_heads=2, group=group, softcap=2.0))
    assert relative_error(out, expected) < 1e-5


def test_long_context_is_split_and_a_mixed_step_uses_both_kernels() -> None:
    out, expected, launch = run(Case(((200, 1), (2, 5), (7, 1)), kv_heads=1, group=2, head_dim=20), programs=4)
    assert launch.cuts[None][4].max() > 1  # type: ignore[attr-defined]
    assert launch.tiles > 0  # type: ignore[attr-defined]
    assert relative_error(out, expected) < 1e-5


def test_launch_fits_the_step() -> None:
    def plan(query_lens: tuple[int, ...], programs: int = 528) -> object:
        start = torch.tensor([0, *query_lens]).cumsum(0).int()
        return kernels.plan_launch(start, query_lens, 32, 8, 128, torch.bfloat16, programs)

    alone = plan((1,))
    crowd = plan((1,) * 1024)
    assert (alone.tiles, crowd.tiles) == (0, 0)  # type: ignore[attr-defined]
    assert (alone.pieces, crowd.pieces) == (67, 1090)  # type: ignore[attr-defined]
    mixed = plan((1, 33, 1, 10))  # 64 rows hold 16 queries of 4 heads
    assert mixed.tile_sequence.tolist() == [1, 1, 1, 3]  # type: ignore[attr-defined]
    assert mixed.tile_start[[1, 3]].tolist() == [0, 3]  # type: ignore[attr-defined]
    assert plan((7,)).pieces == 0  # type: ignore[attr-defined]


def cut(
    lens: list[int], contexts: list[int], programs: int, kv_heads: int, tile: int, window: int | None
) -> list[list[int]]:
    """What `cut` makes of a step: (sequence, begin, end, number, how many) for every program."""
    start = torch.tensor([0, *lens]).cumsum(0).int()
    pieces = len(lens) + programs // kv_heads
    cuts = torch.full((5, pieces), -7, dtype=torch.int32)
    kernels.cut[(-(-pieces // kernels.PLANNED.value),)](
        cuts, start, torch.tensor(contexts), len(lens), kv_heads, pieces, programs, window or 0,
        N=tile, WINDOW=window is not None, PDL=False,
    )  # fmt: skip
    found: list[list[int]] = cuts.t().tolist()
    return found


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_cover_every_context_once(seed: int, window: int | None) -> None:
    """Programs read each decoding context from end to end, in whole tiles, in as many pieces as its part of them."""
    rng = random.Random(seed)
    count, programs, kv_heads, tile = rng.choice((1, 3, 130, 300)), rng.choice((1, 16, 396)), rng.choice((1, 8)), 32
    lens = [rng.choice((1, 1, 1, 5)) for _ in range(count)]
    contexts = [max(brought, rng.choice((1, 31, 32, 33, 700, 9000))) for brought in lens]
    expected = []
    seen = {i: min(contexts[i], window or contexts[i]) for i, brought in enumerate(lens) if brought == 1}
    for i, keys in seen.items():
        wanted = max(
            1, min(keys * programs // (sum(seen.values()) * kv_heads), math.isqrt(keys // 4), -(-keys // tile))
        )
        size = math.ceil(keys / wanted / tile) * tile
        edges = [*range(contexts[i] - keys, contexts[i], size), contexts[i]]
        expected += [[i, *pair, number, len(edges) - 1] for number, pair in enumerate(pairwise(edges))]
    found = cut(lens, contexts, programs, kv_heads, tile, window)
    assert found[: len(expected)] == expected
    assert all(piece[0] == -1 for piece in found[len(expected) :])


def test_many_long_contexts_are_all_read() -> None:
    """More keys, times heads, than 32 bits count: prefixes that many sequences share."""
    found = cut([1] * 512, [131072] * 512, 396, 32, 64, None)
    assert [piece[0] for piece in found if piece[0] >= 0] == list(range(512))
