"""All backends that run on a CPU against attention written token by token, over mixes of prefill and decode."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention_cases import Case, make_step, relative_error
from yalis.attention.base import BACKENDS
from yalis.attention.choose import choose_backend
from yalis.kernels import ops

TOLERANCE = {"sdpa": 2e-5, "flex": 2e-5, "triton": 2e-5, "native": 2e-5}
MIXES = {
    "prefill": ((0, 5),),
    "equal prompts": ((0, 6), (0, 6)),
    "chunk": ((11, 7),),
    "decode": ((16, 1), (3, 1), (0, 1)),
    "even decode": ((12, 1), (12, 1)),
    "mixed": ((9, 1), (0, 4), (5, 1), (17, 1), (6, 3)),
}


def check(name: str, case: Case) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    backend = choose_backend(name, case.needs)(case.needs)
    step = make_step(case)
    ops.write(step.k, step.v, *step.cache, step.batch.kv_slots)
    shared = backend.prepare(step.batch)
    out = backend.attend(step.q, step.cache, step.batch, shared, case.params)
    assert out.shape == step.q.shape
    assert relative_error(out, step.expected) < TOLERANCE[name], case


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(name: str, mix: str) -> None:
    check(name, Case(MIXES[mix]))


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("window", [1, 4, 9, 64])
def test_windows(name: str, window: int) -> None:
    check(name, Case(MIXES["mixed"], window=window))


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("head_dim", [20, 64, 80])
def test_head_dims(name: str, head_dim: int) -> None:
    check(name, Case(MIXES["mixed"], head_dim=head_dim, window=7))


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups(name: str, group: int) -> None:
    check(name, Case(MIXES["mixed"], group=group, block_size=32))


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("window", [None, 5])
def test_softcap(name: str, window: int | None) -> None:
    check(name, Case(MIXES["mixed"], softcap=0.7, window=window))
    check(name, Case(MIXES["equal prompts"], softcap=0.7))


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("window", [None, 5])
def test_sinks(name: str, window: int | None) -> None:
    check(name, Case(MIXES["mixed"], sinks=True, window=window, group=3))
    check(name, Case(MIXES["equal prompts"], sinks=True, softcap=0.7))
    check(name, Case(((200, 1), (3, 1)), sinks=True))  # several KV splits


@st.composite
def cases(draw: st.DrawFn, max_len: int) -> Case:
    sequence = st.tuples(st.integers(0, max_len), st.one_of(st.just(1), st.integers(1, max_len // 2)))
    return Case(
        tuple(draw(st.lists(sequence, min_size=1, max_size=4))),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([16, 20, 64])),
        block_size=draw(st.sampled_from([8, 16, 32])),
        window=draw(st.one_of(st.none(), st.integers(1, max_len))),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        in_order=draw(st.booleans()),
    )


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(cases(40))
def test_sdpa_random(case: Case) -> None:
    check("sdpa", case)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(cases(40))
def test_native_random(case: Case) -> None:
    check("native", case)


def test_native_with_several_tiles_of_keys_and_heads() -> None:
    """More keys than KEY_TILE, more query heads per KV head than HEAD_TILE, and a window that starts within a tile."""
    for window in (None, 130):
        check("native", Case(((300, 1), (64, 1), (63, 1), (127, 1)), kv_heads=1, group=18, window=window))


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(cases(40))
def test_flex_random(case: Case) -> None:
    check("flex", case)


@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(cases(20))
def test_triton_random(case: Case) -> None:
    check("triton", case)


def test_layers_with_different_windows_share_a_step() -> None:
    case = Case(MIXES["mixed"], window=4)
    for name in TOLERANCE:
        backend = BACKENDS.load(name)(case.needs)
        windowed, full = make_step(case), make_step(Case(MIXES["mixed"]))
        ops.write(windowed.k, windowed.v, *windowed.cache, windowed.batch.kv_slots)
        shared = backend.prepare(windowed.batch)
        for step, window in ((windowed, 4), (full, None), (windowed, 4)):
            params = Case(MIXES["mixed"], window=window).params
            out = backend.attend(windowed.q, windowed.cache, windowed.batch, shared, params)
            assert relative_error(out, step.expected) < TOLERANCE[name]
