"""A replay computes what the recorded function computes. Functions that cannot be replayed are not recorded."""

from __future__ import annotations

import threading

import pytest
import torch

from yalis.kernels import native, ops
from yalis.kernels.replay import record


def make_layer():
    """Return a small function of x with native calls and views only, and the tensor x that it reads."""
    torch.manual_seed(0)
    x, up, down, scale = torch.randn(3, 40), torch.randn(96, 40), torch.randn(40, 48), torch.rand(40)

    def layer() -> torch.Tensor:
        inner = ops.gated(ops.linear(ops.rms_norm(x, scale, 1e-5), up), "silu")
        return ops.add(x, ops.linear(inner.view(3, 4, 12)[:, :, :].reshape(3, 48), down))

    return layer, x


def test_a_replay_reads_new_inputs() -> None:
    layer, x = make_layer()
    first, buffer = record(layer)
    assert buffer is not None
    assert torch.equal(buffer.replay(), first)
    for _ in range(3):
        x.normal_()
        assert torch.equal(buffer.replay(), layer())
        assert not torch.equal(buffer.replay(), first)


def test_a_replay_writes_only_its_own_memory() -> None:
    layer, _ = make_layer()
    expected, buffer = record(layer)
    assert buffer is not None
    expected = expected.clone()
    others = [torch.full((3, size), torch.nan) for size in (40, 48, 96) for _ in range(50)]
    buffer.memory.fill_(torch.nan)
    assert torch.equal(buffer.replay(), expected)
    assert all(other.isnan().all() for other in others)


def test_memory_is_reused() -> None:
    """Ten layers need no more than two. A result that a later call reads is not overwritten."""
    x, weights = torch.randn(2, 64), [torch.randn(64, 64) for _ in range(10)]

    def ten_layers() -> torch.Tensor:
        early = ops.linear(x, weights[0])
        y = early
        for weight in weights[1:]:
            y = ops.rms_norm(ops.linear(y, weight), weights[0][0], 1e-5)
        return ops.add(early, y)

    result, buffer = record(ten_layers)
    assert buffer is not None
    assert torch.equal(buffer.replay(), result)
    assert buffer.memory.numel() <= 4 * x.numel()


@pytest.mark.parametrize("operation", [lambda y: y * 2, lambda y: y.add_(1), lambda y: y.t().reshape(-1)])
def test_functions_with_torch_operations_are_not_recorded(operation) -> None:
    layer, _ = make_layer()
    result, buffer = record(lambda: operation(layer()))
    assert buffer is None
    assert torch.equal(result, operation(layer()))


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
    _, with_thread = record(both)
    assert alone is not None
    assert with_thread is not None
    assert with_thread._count == alone._count
    assert native.load() is library


def test_without_the_library_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", native.Unavailable("no C compiler; install gcc"))
    layer, _ = make_layer()
    result, buffer = record(layer)
    assert buffer is None
    assert torch.equal(result, layer())


def test_a_replay_reports_its_calls_to_a_listener() -> None:
    x, weight, scale = torch.randn(4, 32), torch.randn(48, 32), torch.ones(48)
    expected, buffer = record(lambda: ops.rms_norm(ops.linear(x, weight), scale, 1e-5))
    assert buffer is not None
    reported: list[tuple[str, int, int]] = []
    begin = native.now()
    with native.timed(lambda *call: reported.append(call)):
        assert torch.equal(buffer.replay(), expected)
        ops.linear(x, weight)
    end = native.now()
    buffer.replay()
    assert [name for name, _, _ in reported] == ["linear", "rms_norm", "linear"]
    times = [begin, *(time for _, start, stop in reported for time in (start, stop)), end]
    assert times == sorted(times)
