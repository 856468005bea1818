"""Messages about memory that ran out: how much was needed, and which settings would fit."""

from __future__ import annotations

import pytest
import torch

from yalis.config import EngineConfig
from yalis.engine import oom
from yalis.engine.oom import OutOfMemory, cache_does_not_fit, explain_oom, suggest_fit, weights_do_not_fit
from yalis.errors import YalisFailure

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB with 1 GiB free. This process has allocated 50."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50 * GIB)


@pytest.mark.usefixtures("gpu")
def test_values_that_fit_are_estimated_by_proportion() -> None:
    found: list[OutOfMemory] = []

    def explain(error: OutOfMemory) -> str:
        found.append(error)
        return f"full: {error}"

    with (
        pytest.raises(YalisFailure, match=r"^full: at least 5\.0 GiB needed, 4\.0 GiB free$"),
        explain_oom(GPU, explain, allocated=47 * GIB),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert found == [OutOfMemory(2 * GIB, GIB, 3 * GIB)]
    config = EngineConfig("m", memory_fraction=0.9)
    assert suggest_fit(found[0], config, GPU, tokens=2048) == ["max_batch_tokens=1638 or less"]
    # 1 GiB of 80 is missing.
    expected = ["max_num_seqs=51 or less", "memory_fraction=0.887 or less"]
    assert suggest_fit(found[0], config, GPU, sequences=64, block_bytes=GIB) == expected
    shared = EngineConfig("m", memory_fraction=0.9, ranks_per_gpu=4)
    assert suggest_fit(found[0], shared, GPU, block_bytes=GIB) == ["memory_fraction=0.85 or less"]
    for fields, option in (
        ({"kv_memory": 4.5}, "kv_memory=3.5 or less"),
        ({"kv_memory": 0.5}, "a smaller kv_memory="),
        ({"kv_blocks": 100}, "kv_blocks=98 or less"),
    ):
        assert suggest_fit(found[0], EngineConfig("m", **fields), GPU, block_bytes=2 * GIB // 3) == [option]  # type: ignore[arg-type]


def test_unknown_sizes_give_advice_without_numbers() -> None:
    config = EngineConfig("m", kv_blocks=9)
    fragmented = OutOfMemory(5, 5)
    for one in (OutOfMemory(None, None), OutOfMemory(None, GIB), OutOfMemory(5, None), fragmented):
        assert suggest_fit(one, config, CPU, tokens=8, block_bytes=1) == [
            "a smaller max_batch_tokens=",
            "a smaller kv_blocks=",
        ]
    assert str(OutOfMemory(None, None)) == "an unknown amount free"


def test_a_kv_cache_is_explained_by_the_flag_that_set_its_size() -> None:
    short = OutOfMemory(3 * GIB, 2 * GIB)
    message = cache_does_not_fit(short, EngineConfig("m", kv_blocks=3072), 3072, 2**20, CPU)
    assert message.startswith("a KV cache of 3072 blocks does not fit the memory of cpu: 3.0 GiB needed, 2.0 GiB free;")
    assert message.endswith("; give kv_blocks=2048 or less")
    message = cache_does_not_fit(short, EngineConfig("m", kv_memory=99.5), 3072, 2**20, CPU)
    assert "3072 blocks (kv_memory=99.5) does not fit" in message
    assert message.endswith("; give kv_memory=2.0 or less")
    assert cache_does_not_fit(OutOfMemory(None, None), EngineConfig("m", kv_memory=9), 9, 9, CPU).endswith(
        "give a smaller kv_memory="
    )


def test_weights_that_do_not_fit_name_the_number_of_gpus() -> None:
    message = weights_do_not_fit(OutOfMemory(GIB, 3 * GIB, 20 * GIB), "llama", 60 * GIB, 2, torch.float32, GPU)
    assert message == (
        "llama in float32 does not fit the memory of cuda:0: its weights take 60.0 GiB there, 23.0 GiB free; give at "
        "least 6 GPUs with tp=6, or dtype='bfloat16', which takes half, or a smaller model"
    )
    message = weights_do_not_fit(OutOfMemory(9 * GIB, 3 * GIB), "llama", GIB, 1, torch.bfloat16, CPU)
    assert message.endswith("1.0 GiB there, 3.0 GiB free; give a smaller max_num_seqs= or max_model_len=")


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error"), 4096),
        (RuntimeError("CUDA error: out of memory"), None),
        (MemoryError(), None),
    ],
)
def test_messages_of_all_allocators_are_parsed(error: Exception, requested: int | None) -> None:
    with pytest.raises(YalisFailure, match=f"^{requested}$"), explain_oom(CPU, lambda oom: str(oom.requested)):
        raise error
    later = RuntimeError("the capture was interrupted")
    later.__context__ = error
    with pytest.raises(YalisFailure, match=f"^{requested}$"), explain_oom(CPU, lambda oom: str(oom.requested)):
        raise later
    with pytest.raises(RuntimeError, match="else"), explain_oom(CPU, str):
        raise RuntimeError("something else")


def test_the_message_of_the_real_allocator_is_parsed() -> None:
    """Allocate more than any machine has."""
    with pytest.raises(YalisFailure) as failure, explain_oom(CPU, str):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(failure.value).startswith(f"at least {2**30}.0 GiB needed, ")
    free = oom.free_bytes(CPU)
    assert free is None or 2**20 < free < 2**50
