"""The attention backends on a GPU, against their float64 reference; and that a step never waits for the device."""

from __future__ import annotations

import os

import pytest
import torch

from tests.attention_cases import Case, Step, make_step, relative_error
from yalis.attention.base import AttentionBackend
from yalis.attention.choose import choose_backend
from yalis.errors import YalisError

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton is in its interpreter: run tests/gpu in a process of its own", allow_module_level=True)

BACKENDS = ("sdpa", "flex", "triton", "flash")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MIXES = {
    "decode": ((699, 1), (3, 1), (0, 1), (128, 1), (255, 1)),
    "even decode": ((300, 1), (300, 1)),
    "prompts": ((0, 130), (0, 130), (0, 77)),
    "mixed": ((310, 1), (0, 200), (64, 100), (1000, 1), (6, 3)),
}
SHAPES = [  # kv heads, group, head_dim, block size, window, softcap
    (2, 4, 128, 16, None, None),
    (3, 3, 64, 16, None, None),
    (2, 1, 64, 32, 100, None),
    (1, 8, 80, 8, None, None),
    (2, 2, 128, 16, 33, 20.0),
    (1, 2, 256, 16, None, 50.0),
    (2, 2, 20, 16, None, None),
]


def run(backend: AttentionBackend, step: Step, case: Case) -> torch.Tensor:
    backend.write(step.k, step.v, step.cache, step.batch)
    return backend.attend(step.q, step.cache, step.batch, backend.prepare(step.batch), case.params)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_backend_matches_the_reference(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for seed, mix in enumerate(MIXES.values()):
        case = Case(mix, *shape, seed=seed, dtype=dtype, device="cuda")  # type: ignore[arg-type]
        try:
            backend = choose_backend(name, case.needs)(case.needs)
        except YalisError as refusal:
            assert name == "flash"
            pytest.skip(str(refusal))
        step = make_step(case, slowly=False)
        assert relative_error(run(backend, step, case), step.expected) < TOLERANCE[dtype], case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_random(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)

    def pick(*choices: object) -> object:
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    for seed in range(40):
        count = int(torch.randint(1, 12, (1,), generator=draw))
        sequences = tuple((pick(0, 1, 15, 64, 500, 2000), pick(1, 1, 1, 2, 16, 129)) for _ in range(count))
        case = Case(
            sequences, pick(1, 2, 4), pick(1, 2, 3, 5, 8), pick(16, 64, 96, 128), pick(8, 16, 32, 64),
            pick(None, None, 1, 50, 700), pick(None, None, 30.0), seed, dtype, "cuda",
        )  # type: ignore[arg-type]  # fmt: skip
        step = make_step(case, slowly=False)
        backend = choose_backend("triton", case.needs)(case.needs)
        assert relative_error(run(backend, step, case), step.expected) < TOLERANCE[dtype], case


@pytest.mark.parametrize("mix", ["decode", "mixed"])
@pytest.mark.parametrize("name", BACKENDS)
def test_no_host_synchronisation(name: str, mix: str) -> None:
    case = Case(MIXES[mix], 2, 4, 128, 16, dtype=torch.bfloat16, device="cuda")
    backend = choose_backend(name, case.needs)(case.needs)
    step = make_step(case, slowly=False)
    run(backend, step, case)  # whatever is compiled or loaded once
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run(backend, step, case)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert relative_error(out, step.expected) < TOLERANCE[torch.bfloat16]


def test_triton_decode_can_be_captured() -> None:
    """A graph made for one step serves another of the same sizes: lengths and tables are read on the device."""
    case = Case(MIXES["decode"], 2, 4, 128, 16, dtype=torch.bfloat16, device="cuda")
    backend = choose_backend("triton", case.needs)(case.needs)
    step = make_step(case, slowly=False)
    run(backend, step, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(backend, step, case)
    shorter = Case(tuple((cached // 2, 1) for cached, _ in case.sequences), 2, 4, 128, 16, seed=5, dtype=case.dtype)
    other = make_step(Case(**{**vars(shorter), "device": "cuda"}), slowly=False)
    for name in ("slots", "query_start", "context_len"):
        getattr(step.batch, name).copy_(getattr(other.batch, name))
    step.batch.block_tables[:, : other.batch.block_tables.shape[1]].copy_(other.batch.block_tables)
    for mine, new in ((step.q, other.q), (step.k, other.k), (step.v, other.v)):
        mine.copy_(new)
    for mine, new in zip(step.cache, other.cache, strict=True):
        mine[: new.shape[0]].copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out, other.expected) < TOLERANCE[torch.bfloat16]
