"""A recording gives what the function gave, for new inputs too; what it cannot hold, it refuses."""

from __future__ import annotations

import threading

import pytest
import torch

from yalis.kernels import native, ops
from yalis.kernels.replay import record


def make_layer():
    """A small function of x in native calls alone, with views between them, and the tensor x it reads."""
    torch.manual_seed(0)
    x, up, down, scale = torch.randn(3, 40), torch.randn(96, 40), torch.randn(40, 48), torch.rand(40)

    def layer() -> torch.Tensor:
        inner = ops.gated(ops.linear(ops.rms_norm(x, scale, 1e-5), up), "silu")
        return ops.add(x, ops.linear(inner.view(3, 4, 12)[:, :, :].reshape(3, 48), down))

    return layer, x


def test_a_replay_reads_new_inputs() -> None:
    layer, x = make_layer()
    first, tape = record(layer)
    assert tape is not None
    assert torch.equal(tape.replay(), first)
    for _ in range(3):
        x.normal_()
        assert torch.equal(tape.replay(), layer())
        assert not torch.equal(tape.replay(), first)


def test_a_replay_keeps_to_its_own_memory() -> None:
    layer, _ = make_layer()
    expected, tape = record(layer)
    assert tape is not None
    expected = expected.clone()
    others = [torch.full((3, size), torch.nan) for size in (40, 48, 96) for _ in range(50)]
    tape.memory.fill_(torch.nan)
    assert torch.equal(tape.replay(), expected)
    assert all(other.isnan().all() for other in others)


def test_memory_is_used_again() -> None:
    """Ten layers take no more than two; what a later call still reads is left alone."""
    x, weights = torch.randn(2, 64), [torch.randn(64, 64) for _ in range(10)]

    def long() -> torch.Tensor:
        early = ops.linear(x, weights[0])
        y = early
        for weight in weights[1:]:
            y = ops.rms_norm(ops.linear(y, weight), weights[0][0], 1e-5)
        return ops.add(early, y)

    result, tape = record(long)
    assert tape is not None
    assert torch.equal(tape.replay(), result)
    assert tape.memory.numel() <= 4 * x.numel()


@pytest.mark.parametrize("foreign", [lambda y: y * 2, lambda y: y.add_(1), lambda y: y.t().reshape(-1)])
def test_what_is_not_native_is_not_recorded(foreign) -> None:
    layer, _ = make_layer()
    result, tape = record(lambda: foreign(layer()))
    assert tape is None
    assert torch.equal(result, foreign(layer()))


def test_other_threads_are_not_recorded() -> None:
    layer, _ = make_layer()
    other, _ = make_layer()

    def both() -> torch.Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return layer()

    library = native.load()
    _, alone = record(layer)
    _, beside = record(both)
    assert alone is not None
    assert beside is not None
    assert beside._count == alone._count
    assert native.load() is library


def test_without_the_library_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", native.Unavailable("no C compiler; install gcc"))
    layer, _ = make_layer()
    result, tape = record(layer)
    assert tape is None
    assert torch.equal(result, layer())


def test_a_tape_tells_of_its_calls_to_whoever_listens() -> None:
    x, weight, scale = torch.randn(4, 32), torch.randn(48, 32), torch.ones(48)
    expected, tape = record(lambda: ops.rms_norm(ops.linear(x, weight), scale, 1e-5))
    assert tape is not None
    heard: list[tuple[str, int, int]] = []
    begin = native.now()
    with native.timed(lambda *call: heard.append(call)):
        assert torch.equal(tape.replay(), expected)
        ops.linear(x, weight)
    end = native.now()
    tape.replay()
    assert [name for name, _, _ in heard] == ["linear", "rms_norm", "linear"]
    times = [begin, *(time for _, start, stop in heard for time in (start, stop)), end]
    assert times == sorted(times)
