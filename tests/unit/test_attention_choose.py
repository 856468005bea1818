"""Selection of the attention backend, and the messages if a named one cannot be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import Case
from yalis.attention.base import BACKENDS
from yalis.attention.choose import ON_CPU, ON_GPU, choose_backend
from yalis.errors import YalisError
from yalis.kernels import native

NEEDS = Case(((0, 1),)).needs


def test_auto_selects_native_on_a_cpu() -> None:
    assert choose_backend("auto", NEEDS).name == "native"
    assert choose_backend("auto", replace(NEEDS, softcap=True, window=True, head_dim=20)).name == "native"


def test_auto_selects_sdpa_where_native_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", replace(NEEDS, dtype=torch.bfloat16)).name == "sdpa"
    monkeypatch.setattr(native, "_loaded", native.Unavailable("no C compiler; install gcc"))
    assert choose_backend("auto", NEEDS).name == "sdpa"
    with pytest.raises(YalisError, match="'native' cannot be used here: no C compiler; install gcc; usable: auto, "):
        choose_backend("native", NEEDS)


def test_preference_lists_cover_every_backend() -> None:
    assert {*ON_GPU, *ON_CPU} == set(BACKENDS.names())


def test_unknown_backend_message_lists_the_known() -> None:
    with pytest.raises(YalisError, match=r"unknown attention backend .flsh.; accepted: auto, sdpa, .*, flash, native"):
        choose_backend("flsh", NEEDS)


def test_unusable_backend_message_has_reason_and_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(YalisError, match=r"'triton' cannot be used here: it needs a GPU.*: auto, sdpa, flex, native$"):
        choose_backend("triton", NEEDS)
    with pytest.raises(YalisError, match="'flash' cannot be used here: it needs a GPU"):
        choose_backend("flash", NEEDS)


def test_interpreted_triton_supports_float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"sinks": True}, "sinks"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"head_dim": 264}, "at most 256"),
    ],
)
def test_reasons_why_flash_is_unusable(change: dict[str, object], reason: str) -> None:
    needs = replace(NEEDS, device=torch.device("cuda"), dtype=torch.bfloat16)
    message = BACKENDS.load("flash").unusable(replace(needs, **change))  # type: ignore[arg-type]
    assert message is not None
    assert reason in message
