"""Blocks compile without graph breaks, once for all layers of the same type and any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from tests.families import CASES, Case
from tests.ranks import Memory, run_ranks
from yalis.attention.base import AttentionNeeds, ForwardBatch, LayerCache
from yalis.attention.choose import choose_backend
from yalis.comm.base import SingleRank
from yalis.models.compile import compile_blocks
from yalis.models.decoder import Decoder
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.spec import read_spec

NAMES = ("llama-bias-linear", "qwen3-gqa4", "phi3-partial-tied", "gemma2", "granite", "gpt-oss")
BLOCK_SIZE, BLOCKS = 8, 64


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(case: Case, grid: Grid | None = None, layers: int = 2) -> Decoder:
    case = replace(case, options={**case.options, "num_hidden_layers": layers})
    spec = read_spec(case.build(0).config.to_dict())
    model = Decoder(spec, grid or Grid(), Stage(), 256, torch.float32, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.1, generator=draw)
    return model


def make_batch(lengths: tuple[int, ...], cached: int) -> ForwardBatch:
    """Return a batch of sequences with these numbers of new tokens, each after `cached` tokens, in separate blocks."""
    each = BLOCKS // len(lengths)
    places = [(i, cached + k) for i, length in enumerate(lengths) for k in range(length)]
    positions = torch.tensor([position for _, position in places])
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    return ForwardBatch(
        token_ids=torch.randint(3, 251, (len(places),)),
        positions=positions,
        rope_rows=positions,
        kv_slots=torch.tensor([i * each * BLOCK_SIZE + position for i, position in places]),
        query_start=start,
        context_len=torch.tensor([cached + length for length in lengths], dtype=torch.int32),
        block_tables=torch.arange(each * len(lengths), dtype=torch.int32).view(len(lengths), each),
        logit_rows=start[1:].long() - 1,
        query_lens=lengths,
        context_lens=tuple(cached + length for length in lengths),
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_any_number_of_tokens(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    eager, compiled = make_model(case, layers=5), make_model(case, layers=5)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compile_blocks(compiled, backend=aot_autograd(fw_compiler=keep))
    heads, kv_heads, dim = eager.spec.num_heads, eager.spec.num_kv_heads, eager.spec.head_dim
    needs = AttentionNeeds(heads, kv_heads, dim, torch.float32, torch.device("cpu"), BLOCK_SIZE)
    attention = choose_backend("auto", needs)(needs)
    pools = [torch.zeros(2, eager.spec.num_layers, BLOCKS, BLOCK_SIZE, kv_heads, dim) for _ in range(2)]

    def run(model: Decoder, pool: Tensor, batch: ForwardBatch) -> Tensor:
        return model(batch, [LayerCache(*layer) for layer in pool.transpose(0, 1)], attention)

    layers = [(at == 0, window) for at, window in enumerate(eager.spec.windows)]  # the first has no residual
    layer_types, before_the_last = len(set(layers)), len(set(layers[:-1]))
    for lengths, cached, expected in (
        ((5, 9, 1), 0, before_the_last),
        ((1,) * 3, 9, layer_types),
        ((1,) * 16, 9, layer_types),
        ((3, 30), 11, layer_types),
        ((1,), 40, 2 * layer_types),
        ((60,), 0, 2 * layer_types),
        ((1,) * 2, 10, 2 * layer_types),
        ((1,), 60, 2 * layer_types),
    ):
        batch = make_batch(lengths, cached)
        assert torch.equal(run(compiled, pools[0], batch), run(eager, pools[1], batch))
        assert len(graphs) == expected, lengths
    assert torch.equal(*pools)
    assert pools[0].count_nonzero() > 0
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert {"yalis.rope_write.default", "yalis.attend.default"} < called
    assert not {target for target in called if "clone" in target or "copy" in target}, (
        "the KV cache may have been copied"
    )


def test_compiling_one_model_after_another() -> None:
    """torch limits the graphs per code object. The graphs of other engines do not count."""
    case = next(case for case in CASES if case.name == "gemma2")  # two types of layers
    for _ in range(4):
        model = make_model(case, layers=5)
        compile_blocks(model, backend="eager")
        dim, kv_heads = model.spec.head_dim, model.spec.num_kv_heads
        needs = AttentionNeeds(model.spec.num_heads, kv_heads, dim, torch.float32, torch.device("cpu"), BLOCK_SIZE)
        attention = choose_backend("auto", needs)(needs)
        caches = [LayerCache(*torch.zeros(2, BLOCKS, BLOCK_SIZE, kv_heads, dim)) for _ in model.layers]
        for lengths in ((5, 9), (1,)):
            model(make_batch(lengths, 0), caches, attention)


@pytest.mark.parametrize("split", [Split(2), Split(1, 2)], ids=["rows", "columns"])
def test_ranks_sum_within_compiled_blocks(split: Split) -> None:
    """Two ranks of a model whose hidden states or heads are split compute the same as uncompiled."""
    case = next(case for case in CASES if case.name == "qwen3-gqa4")
    batches = [make_batch(lengths, cached) for lengths, cached in (((5, 9), 0), ((1, 1), 9))]

    def run(rank: int, comm: Memory) -> None:
        alone = SingleRank()
        row_group, col_group = (comm, alone) if split.rows == 2 else (alone, comm)
        coords = split.coords(rank)
        grid = Grid(split.rows, split.cols, coords.row, coords.col, row_group, col_group, comm)
        eager, compiled = make_model(case, grid), make_model(case, grid)
        compile_blocks(compiled, backend="aot_eager")
        attention = eager.layers[0].attention
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        needs = AttentionNeeds(heads, kv_heads, dim, torch.float32, torch.device("cpu"), BLOCK_SIZE)
        backend = choose_backend("sdpa", needs)(needs)
        caches = [
            [LayerCache(*torch.zeros(2, BLOCKS, BLOCK_SIZE, kv_heads, dim)) for _ in eager.layers] for _ in range(2)
        ]
        for batch in batches:
            before = len(comm.calls)
            expected = eager(batch, caches[0], backend)
            middle = len(comm.calls)
            assert torch.equal(compiled(batch, caches[1], backend), expected)
            assert comm.calls[middle:] == comm.calls[before:middle]

    run_ranks(2, run)
