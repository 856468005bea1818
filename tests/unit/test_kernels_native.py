"""The CPU kernels against plain torch, how they are compiled and cached, and the fallback without them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.families import CASES, make_prompts, make_reference
from yalis import LLM, SamplingParams
from yalis.kernels import native, ops

UNAVAILABLE = native.Unavailable("no C compiler; install gcc")


def both(op, *args):
    """Return the result of the native kernel, and that of the plain torch path of the same op in float64."""
    assert native.load() is not None, native.reason()
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    return op(*args), op(*wide)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() <= 2e-6 * max(1.0, expected.abs().max().item()))


def strided(rows: int, cols: int, gap: int) -> torch.Tensor:
    """Return random rows that are `gap` elements apart and not aligned."""
    return torch.randn(rows, cols + gap)[:, gap:]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 70), out=st.integers(1, 90), depth=st.integers(1, 150), gap=st.integers(0, 3),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear(rows: int, out: int, depth: int, gap: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = strided(rows, depth, gap), torch.randn(out, depth) / depth**0.5
    assert close(*both(ops.linear, x, weight, torch.randn(out) if bias else None))


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 48])
@pytest.mark.parametrize("shape", [(960, 576), (577, 1536), (5000, 64)])
def test_linear_with_several_threads(rows: int, shape: tuple[int, int]) -> None:
    assert close(*both(ops.linear, torch.randn(rows, shape[1]), torch.randn(shape) / shape[1] ** 0.5))


def test_a_row_does_not_depend_on_the_batch_size() -> None:
    x, weight = torch.randn(ops.NATIVE_MAX_ROWS, 200), torch.randn(333, 200)
    whole = ops.linear(x, weight)
    for rows in (1, 2, 5, 8, 9, 17):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), cols=st.integers(1, 700), gap=st.integers(0, 2), seed=st.integers(0, 99))
def test_row_operations(rows: int, cols: int, gap: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(cols)
    assert close(*both(ops.rms_norm, strided(rows, cols, gap), weight, 1e-5))
    assert close(*both(ops.add, torch.randn(rows, cols), torch.randn(rows, cols)))
    assert close(*both(ops.gather_rows, strided(rows, cols, gap), torch.randint(rows, (7,))))
    assert close(*both(ops.gated, 5 * strided(rows, 2 * cols, gap), "silu"))


def test_clamped_gate() -> None:
    assert close(*both(ops.clamped_gate, 5 * strided(9, 2 * 37, 3), 1.702, 7.0))
    assert ops.clamped_gate(torch.tensor([[torch.nan, 9.0, 1.0, torch.nan]]), 1.7, 7.0).isnan().all()


def test_silu_of_large_inputs() -> None:
    x = torch.tensor([[-1e4, -90.0, -87.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.0, 1e4] + 10 * [1.0]])
    assert close(*both(ops.gated, x, "silu"))
    assert ops.gated(torch.tensor([[torch.nan, 1.0, 1.0, 1.0]]), "silu").isnan().tolist() == [[True, False]]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40), heads=st.integers(1, 6), half=st.integers(1, 20), rest=st.integers(0, 9),
    more=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_rotary_and_head_norm(tokens: int, heads: int, half: int, rest: int, more: int, seed: int) -> None:
    torch.manual_seed(seed)
    dim = 2 * half + rest
    x = torch.randn(tokens, heads + more, dim)[:, :heads]
    cos, sin = torch.randn(tokens, 1, 4 * half).chunk(2, dim=-1)
    assert close(*both(ops.rotate, x, cos, sin))
    assert close(*both(ops.rms_norm, x, torch.randn(dim), 1e-6))


@pytest.mark.parametrize("shape", [(1, 4, 2, 16), (37, 3, 3, 5)])
def test_norm_of_all_heads_together(shape: tuple[int, int, int, int]) -> None:
    tokens, heads, kv_heads, dim = shape
    qkv = strided(tokens, (heads + 2 * kv_heads) * dim, 3).unflatten(1, (-1, dim))
    assert close(*both(ops.joint_head_norm, qkv, torch.randn((heads + kv_heads) * dim), kv_heads, 1e-5))


def test_other_dtypes_use_plain_torch() -> None:
    x, weight = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert ops.rms_norm(x, torch.ones(8), 1e-5).dtype == torch.bfloat16


PRINT_STATE = "import torch; from yalis.kernels import native; print(native.load() is not None, native.reason())"


def start_process(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "YALIS_CACHE": str(cache), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PRINT_STATE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ranks_may_compile_at_the_same_time(tmp_path: Path) -> None:
    processes = [start_process(tmp_path) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["True None"] * 3
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"], "no temporary files are left"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": "/nowhere"}, "no C compiler; install gcc"),
        ({"CC": "false"}, "false failed: exit status 1"),
        ({"CC": "/no/such/cc -x"}, "C compiler /no/such/cc was not found\n"),
    ],
)
def test_the_reason_if_it_cannot_be_compiled(variables: dict[str, str], reason: str, tmp_path: Path) -> None:
    out, _ = start_process(tmp_path, **variables).communicate(timeout=120)
    assert out.startswith(f"False {reason}")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The kernels are compiled into a temporary folder, and one sentence names the cache."""
    (tmp_path / "file").write_text("")
    out, err = start_process(tmp_path / "file").communicate(timeout=120)
    assert out == "True None\n"
    assert err == (
        f"the cache {tmp_path / 'file'} cannot be written, so code is compiled again in every run; set YALIS_CACHE to "
        "a folder that you can write\n"
    )


def test_only_one_openmp_runtime_is_loaded() -> None:
    ops.linear(torch.randn(4, 576), torch.randn(960, 576))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    runtimes = [path for path in mapped if any(name in Path(path).name for name in ("gomp", "iomp", "libomp"))]
    assert any(path.startswith(str(Path(torch.__file__).parent)) for path in runtimes)
    assert len(runtimes) == 1


def test_an_engine_without_it_generates_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(1, (5, 9, 2), shared=2)
    ref = make_reference(CASES[0], tmp_path, 1, prompts, 8)
    tokens, replays = [], []
    for unavailable in (False, True):
        if unavailable:
            monkeypatch.setattr(native, "_loaded", UNAVAILABLE)
        with LLM(str(ref.path), device="cpu", max_model_len=50) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
            tokens.append([output.token_ids for output in outputs])
            replays.append(llm._engine.runner.executor.replays)
            assert llm._engine.runner.backend.name == ("sdpa" if unavailable else "native")
    assert tokens == [ref.tokens, ref.tokens]
    assert replays[0] > 0 == replays[1]


def test_recorded_calls_have_the_same_size_in_c_and_python() -> None:
    """A struct of another size would make yalis_replay() read wrong arguments without an error."""
    source = (Path(native.__file__).with_name("native.c")).read_text()
    found = re.search(r"value args\[(\d+)\]", source)
    assert found is not None
    assert int(found[1]) == max(map(len, native.SIGNATURES.values()))
