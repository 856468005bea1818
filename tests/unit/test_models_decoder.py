"""Which rows the layers of a step compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.families import CASES
from tests.unit.test_models_compile import BLOCK_SIZE, BLOCKS, make_batch, make_model
from yalis.attention.base import AttentionNeeds, ForwardBatch, LayerCache
from yalis.attention.choose import choose_backend


@pytest.mark.parametrize("name", ["llama-bias-linear", "gemma2"])
def test_the_last_layer_computes_only_rows_that_get_logits(name: str) -> None:
    model = make_model(next(case for case in CASES if case.name == name))
    spec = model.spec
    needs = AttentionNeeds(spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"), 8)
    attention = choose_backend("auto", needs)(needs)
    seen: list[int] = []
    for block in model.layers:
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))

    def run(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        pool = torch.zeros(2, spec.num_layers, BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        seen.clear()
        return model(batch, [LayerCache(*layer) for layer in pool.transpose(0, 1)], attention), pool

    batch = make_batch((5, 9, 1), 0)
    whole, pool = run(replace(batch, logit_rows=torch.arange(15)))
    assert seen == [15] * spec.num_layers
    for rows in ([4, 13, 14], [14], []):
        some, written = run(replace(batch, logit_rows=torch.tensor(rows, dtype=torch.int64)))
        assert seen == [15] * (spec.num_layers - 1) + [len(rows)]
        assert torch.equal(written, pool), "all tokens write their keys and values"
        torch.testing.assert_close(some, whole[rows])
