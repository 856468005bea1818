"""Memory that does not suffice: what is told of it, and what would fit."""

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
    """A GPU of 80 GiB with 1 free, of which this process has 50."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50 * GIB)


@pytest.mark.usefixtures("gpu")
def test_a_proportion_tells_what_fits() -> None:
    found: list[OutOfMemory] = []

    def say(one: OutOfMemory) -> str:
        found.append(one)
        return f"full: {one}"

    with (
        pytest.raises(YalisFailure, match=r"^full: at least 5\.0 GiB needed, 4\.0 GiB free$"),
        explain_oom(GPU, say, before=47 * GIB),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert found == [OutOfMemory(2 * GIB, GIB, 3 * GIB)]
    config = EngineConfig("m", memory_fraction=0.9)
    assert suggest_fit(found[0], config, GPU, tokens=2048) == ["--max-batch-tokens 1638 at most"]
    # 1 GiB of 80 is missing.
    wanted = ["--max-num-seqs 51 at most", "--memory-fraction 0.887 at most"]
    assert suggest_fit(found[0], config, GPU, sequences=64, block_bytes=GIB) == wanted
    shared = EngineConfig("m", memory_fraction=0.9, ranks_per_gpu=4)
    assert suggest_fit(found[0], shared, GPU, block_bytes=GIB) == ["--memory-fraction 0.85 at most"]
    for fields, way in (
        ({"kv_memory": 4.5}, "--kv-memory 3.5 at most"),
        ({"kv_memory": 0.5}, "a smaller --kv-memory"),
        ({"kv_blocks": 100}, "--kv-blocks 98 at most"),
    ):
        assert suggest_fit(found[0], EngineConfig("m", **fields), GPU, block_bytes=2 * GIB // 3) == [way]  # type: ignore[arg-type]


def test_what_nobody_tells_has_no_number() -> None:
    config = EngineConfig("m", kv_blocks=9)
    fragmented = OutOfMemory(5, 5)
    for one in (OutOfMemory(None, None), OutOfMemory(None, GIB), OutOfMemory(5, None), fragmented):
        assert suggest_fit(one, config, CPU, tokens=8, block_bytes=1) == [
            "a smaller --max-batch-tokens",
            "a smaller --kv-blocks",
        ]
    assert str(OutOfMemory(None, None)) == "an unknown amount free"


def test_a_cache_is_told_in_the_words_it_was_asked_for() -> None:
    short = OutOfMemory(3 * GIB, 2 * GIB)
    told = cache_does_not_fit(short, EngineConfig("m", kv_blocks=3072), 3072, 2**20, CPU)
    assert told.startswith("a KV cache of 3072 blocks does not fit the memory of cpu: 3.0 GiB needed, 2.0 GiB free;")
    assert told.endswith("; give --kv-blocks 2048 at most")
    told = cache_does_not_fit(short, EngineConfig("m", kv_memory=99.5), 3072, 2**20, CPU)
    assert "3072 blocks (--kv-memory 99.5) does not fit" in told
    assert told.endswith("; give --kv-memory 2.0 at most")
    assert cache_does_not_fit(OutOfMemory(None, None), EngineConfig("m", kv_memory=9), 9, 9, CPU).endswith(
        "give a smaller --kv-memory"
    )


def test_weights_say_how_many_gpus_would_do() -> None:
    told = weights_do_not_fit(OutOfMemory(GIB, 3 * GIB, 20 * GIB), "llama", 60 * GIB, 2, torch.float32, GPU)
    assert told == (
        "llama in float32 does not fit the memory of cuda:0: its weights there take 60.0 GiB, 23.0 GiB free; give 6 "
        "GPUs at least, with --tp 6, or --dtype bfloat16, which takes half, or a smaller model"
    )
    told = weights_do_not_fit(OutOfMemory(9 * GIB, 3 * GIB), "llama", GIB, 1, torch.bfloat16, CPU)
    assert told.endswith("1.0 GiB, 3.0 GiB free; give a smaller --max-num-seqs or --max-model-len")


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error"), 4096),
        (RuntimeError("CUDA error: out of memory"), None),
        (MemoryError(), None),
    ],
)
def test_allocators_speak_differently(error: Exception, asked: int | None) -> None:
    with pytest.raises(YalisFailure, match=f"^{asked}$"), explain_oom(CPU, lambda one: str(one.asked)):
        raise error
    later = RuntimeError("the capture was broken off")
    later.__context__ = error
    with pytest.raises(YalisFailure, match=f"^{asked}$"), explain_oom(CPU, lambda one: str(one.asked)):
        raise later
    with pytest.raises(RuntimeError, match="else"), explain_oom(CPU, str):
        raise RuntimeError("something else")


def test_the_real_allocator_is_understood() -> None:
    """As much as no machine has."""
    with pytest.raises(YalisFailure) as told, explain_oom(CPU, str):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert str(told.value).startswith(f"at least {2**30}.0 GiB needed, ")
    free = oom.free_bytes(CPU)
    assert free is None or 2**20 < free < 2**50


def test_a_host_is_asked_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "free_bytes", lambda device: 3 * GIB)
    begun = False
    with (
        pytest.raises(YalisFailure, match=r"^at least 4\.0 GiB needed, 3\.0 GiB free$"),
        explain_oom(CPU, str, needed=4 * GIB),
    ):
        begun = True
    assert not begun
    with explain_oom(CPU, str, needed=3 * GIB):
        begun = True
    monkeypatch.setattr(oom, "free_bytes", lambda device: None)
    with explain_oom(CPU, str, needed=4 * GIB):  # nobody says
        pass
    assert begun
