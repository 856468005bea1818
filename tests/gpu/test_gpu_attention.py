"""Compares attention backends on a GPU with the float64 reference, and checks that they never synchronize with it."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch

from tests.attention_cases import Case, Step, make_step, relative_error
from yalis.attention.base import AttentionBackend
from yalis.attention.choose import choose_backend
from yalis.errors import YalisError
from yalis.kernels import ops

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: run tests/gpu in its own process", allow_module_level=True)

BACKENDS = ("sdpa", "flex", "triton", "flash")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MIXES = {
    "decode": ((699, 1), (3, 1), (0, 1), (128, 1), (255, 1)),
    "even decode": ((300, 1), (300, 1)),
    "prompts": ((0, 130), (0, 130), (0, 77)),
    "mixed": ((310, 1), (0, 200), (64, 100), (1000, 1), (6, 3)),
}
SHAPES = [  # kv heads, group, head_dim, block size, window, softcap
    (2, 4, 128, 64, None, None),
    (3, 3, 64, 16, None, None),
    (2, 1, 64, 32, 100, None),
    (1, 8, 80, 8, None, None),
    (2, 2, 128, 64, 33, 20.0),
    (1, 2, 256, 32, None, None),
    (2, 2, 20, 16, None, None),
    (4, 5, 64, 128, None, 50.0),
    (2, 4, 128, 16, None, None),
]
CHECKS = [
    (name, dtype, shape)
    for name in BACKENDS
    for dtype in TOLERANCE
    for shape in SHAPES
    # float16 uses the same code paths as bfloat16, and flex compiles for seconds in each of these.
    if (dtype != torch.float16 or shape == SHAPES[0]) and (name != "flex" or shape in SHAPES[1:7:3])
]


def run(backend: AttentionBackend, step: Step, case: Case) -> torch.Tensor:
    ops.write(step.k, step.v, *step.cache, step.batch.kv_slots)
    return backend.attend(step.q, step.cache, step.batch, backend.prepare(step.batch), case.params)


@pytest.mark.parametrize(("name", "dtype", "shape"), CHECKS, ids=str)
def test_backend_matches_the_reference(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.compiler.reset()  # or flex exceeds torch's recompilation limit and falls back to eager
    for seed, mix in enumerate(MIXES.values()):
        case = Case(mix, *shape, seed=seed, dtype=dtype, device="cuda")  # type: ignore[arg-type]
        try:
            backend = choose_backend(name, case.needs)(case.needs)
        except YalisError as refusal:
            assert name == "flash"
            pytest.skip(str(refusal))
        step = make_step(case, slowly=False)
        assert relative_error(run(backend, step, case), step.expected) < TOLERANCE[dtype], case


@pytest.mark.parametrize("name", ["sdpa", "flex", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks(name: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    for seed, mix in enumerate(MIXES.values()):
        case = Case(mix, 2, 4, 64, 64, (None, 100)[seed % 2], None, seed, dtype, "cuda", sinks=True)
        step = make_step(case, slowly=False)
        backend = choose_backend(name, case.needs)(case.needs)
        assert relative_error(run(backend, step, case), step.expected) < TOLERANCE[dtype], case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 5, 64, 16), (4, 5, 64, 64), (2, 8, 128, 32), (2, 2, 96, 8)], ids=str)
def test_triton_random_lengths(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    for seed in range(20):
        lengths = ((0, 1, 15, 64, 500, 2000), (1, 1, 1, 2, 16, 129))  # cached tokens, new tokens
        sequences = tuple(tuple(map(rng.choice, lengths)) for _ in range(rng.randint(1, 11)))
        case = Case(sequences, *shape, rng.choice((1, 50, 700)), None, seed, dtype, "cuda")  # type: ignore[arg-type]
        step = make_step(case, slowly=False)
        backend = choose_backend("triton", case.needs)(case.needs)
        assert relative_error(run(backend, step, case), step.expected) < TOLERANCE[dtype], case


@pytest.mark.parametrize("mix", ["decode", "mixed"])
@pytest.mark.parametrize("name", BACKENDS)
def test_no_host_synchronisation(name: str, mix: str) -> None:
    case = Case(MIXES[mix], 2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    backend = choose_backend(name, case.needs)(case.needs)
    step = make_step(case, slowly=False)
    run(backend, step, case)  # compile and load everything first
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run(backend, step, case)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert relative_error(out, step.expected) < TOLERANCE[torch.bfloat16]


def test_triton_decode_can_be_captured() -> None:
    """A graph captured for one step serves another with the same number of sequences."""
    case = Case(MIXES["decode"], 2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    backend = choose_backend("triton", case.needs)(case.needs)
    step = make_step(case, slowly=False)
    run(backend, step, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(backend, step, case)
    shorter = Case(tuple((cached // 2, 1) for cached, _ in case.sequences), 2, 4, 128, 64, seed=5, dtype=case.dtype)
    other = make_step(Case(**{**vars(shorter), "device": "cuda"}), slowly=False)
    for name in ("kv_slots", "query_start", "context_len"):
        getattr(step.batch, name).copy_(getattr(other.batch, name))
    step.batch.block_tables[:, : other.batch.block_tables.shape[1]].copy_(other.batch.block_tables)
    for captured, new in ((step.q, other.q), (step.k, other.k), (step.v, other.v)):
        captured.copy_(new)
    for captured, new in zip(step.cache, other.cache, strict=True):
        captured[: new.shape[0]].copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out, other.expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("pdl", [False, True])
def test_triton_decode_is_deterministic(pdl: bool) -> None:
    """Back-to-back launches over contexts of different lengths give the same bits in any order of the KV splits."""
    from yalis.kernels import paged_attention
    from yalis.kernels.pdl import enable_pdl

    rng = random.Random(7)
    for seed in range(4):
        contexts = tuple((rng.choice((0, 30, 500, 1900, 4000)), 1) for _ in range(rng.choice((1, 3, 16))))
        case = Case(
            (*contexts, (5000, 1)), 2, 4, 128, (16, 64)[seed % 2], seed=seed, dtype=torch.bfloat16, device="cuda"
        )
        backend = choose_backend("triton", case.needs)(case.needs)
        step = make_step(case, slowly=False)
        with enable_pdl(torch.device("cuda")) if pdl else contextlib.nullcontext():
            first = run(backend, step, case)
            shared = backend.prepare(step.batch)
            outs = [backend.attend(step.q, step.cache, step.batch, shared, case.params) for _ in range(100)]
        assert relative_error(first, step.expected) < TOLERANCE[torch.bfloat16], case
        assert all(torch.equal(out, first) for out in outs)
        assert paged_attention._counters(first.device).count_nonzero() == 0
