"""Which backend is taken, and the sentence where a named one cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import Case
from yalis.attention.base import BACKENDS
from yalis.attention.choose import ON_CPU, ON_GPU, choose_backend
from yalis.errors import YalisError

NEEDS = Case(((0, 1),)).needs


def test_auto_takes_sdpa_on_a_cpu() -> None:
    assert choose_backend("auto", NEEDS).name == "sdpa"
    assert choose_backend("auto", replace(NEEDS, softcap=True, window=True, head_dim=20)).name == "sdpa"


def test_orders_name_every_backend() -> None:
    assert sorted(ON_GPU) == sorted(BACKENDS.names())
    assert set(ON_CPU) < set(ON_GPU)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(YalisError, match="unknown attention backend 'flsh'; accepted: auto, sdpa, flex, triton, flash"):
        choose_backend("flsh", NEEDS)


def test_unusable_name_says_why_and_what_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(YalisError, match=r"'triton' cannot be used here: it needs a GPU.*usable: auto, sdpa, flex$"):
        choose_backend("triton", NEEDS)
    with pytest.raises(YalisError, match="'flash' cannot be used here: it needs a GPU"):
        choose_backend("flash", NEEDS)


def test_interpreted_triton_is_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", NEEDS).name == "triton"
    with pytest.raises(YalisError, match="float32 only"):
        choose_backend("triton", replace(NEEDS, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "bfloat16 and float16 only"),
        ({"softcap": True}, "softcap"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"head_dim": 264}, "at most 256"),
    ],
)
def test_flash_says_what_it_lacks(change: dict[str, object], reason: str) -> None:
    needs = replace(NEEDS, device=torch.device("cuda"), dtype=torch.bfloat16)
    found = BACKENDS.load("flash").unusable(replace(needs, **change))  # type: ignore[arg-type]
    assert found is not None
    assert reason in found
