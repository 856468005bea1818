"""Ranks that load a real model: memory use equals the prediction, and each rank reads only its part of the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.test_parallel_loading import stored_bytes
from tests.unit.test_parallel_memory import build
from yalis import LLM, SamplingParams
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.parallel.memory import rank_memory
from yalis.parallel.plan import Split

BLOCK, BLOCKS, MAX_LEN = 16, 96, 512
SPLIT = Split(2)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the thread count, which the engine in this process changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_nine_heads_over_two_ranks(threads: None) -> None:
    settings = {"device": "cpu", "dtype": "float32", "block_size": BLOCK, "kv_blocks": BLOCKS, "max_model_len": MAX_LEN}
    with LLM("smollm2-135m", tp=2, **settings) as llm:
        [output] = llm.generate(["The capital of France is"], SamplingParams(max_tokens=4))
        assert output.text.startswith(" Paris")
        reports = llm._engine.reports()  # type: ignore[union-attr]
        spec = llm.spec
    assert (spec.num_heads, spec.num_kv_heads) == (9, 3)
    assert [report.rank for report in reports] == [0, 1]

    memory = [rank_memory(spec, SPLIT, rank, 4, BLOCK, MAX_LEN) for rank in range(2)]
    assert [report.weight_bytes for report in reports] == [rank.weight_bytes for rank in memory]
    assert [report.kv_bytes for report in reports] == [BLOCKS * rank.kv_block_bytes for rank in memory]

    checkpoint = open_checkpoint("smollm2-135m")
    assert isinstance(checkpoint, GgufCheckpoint)
    models = [build(spec, SPLIT, rank, torch.float32, MAX_LEN) for rank in range(2)]
    assert [report.bytes_read for report in reports] == [stored_bytes(checkpoint, m, whole_blocks=True) for m in models]
    # In total: the file once, and twice the norms and the key/value head that both ranks need.
    once = stored_bytes(checkpoint, build(spec, Split(), 0, torch.float32, MAX_LEN), whole_blocks=True)
    fractions = [report.bytes_read / once for report in reports]
    assert 1 < sum(fractions) < 1.03
    assert max(fractions) < 0.53
    checkpoint.close()
