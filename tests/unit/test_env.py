"""What is set in the environment for libraries that read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from yalis import env

KEPT = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
def test_compilers_keep_what_they_build_in_our_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    env.set_compile_cache_dirs()
    assert {name: env.variables()[name] for name in KEPT} == {name: str(tmp_path / own) for name, own in KEPT.items()}
    # Both are asked only now, long after they were imported.
    assert Path(cache_dir()) == tmp_path / "inductor"
    assert Path(knobs.cache.dir) == tmp_path / "triton"


@pytest.mark.usefixtures("unset")
def test_a_place_that_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    env.set_compile_cache_dirs()
    assert env.variables()["TRITON_CACHE_DIR"] == str(tmp_path / "theirs")
    assert env.variables()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "ours" / "inductor")


@pytest.mark.parametrize(
    ("given", "before", "spins"),
    [
        ({}, "yalis", "'3000'"),
        ({"GOMP_SPINCOUNT": "77"}, "yalis", "'77'"),
        ({"OMP_WAIT_POLICY": "passive"}, "yalis", "'0'"),
        ({}, "torch", None),
    ],
    ids=str,
)
def test_threads_that_wait_leave_their_core_to_others(given: dict[str, str], before: str, spins: str | None) -> None:
    """As torch's OpenMP says itself, once it is loaded."""
    kept = {name: value for name, value in env.variables().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", f"import {before}; from yalis import LLM"],
        env={**kept, **given, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    said = [line.rpartition("=")[2].strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not said:
        pytest.skip("torch's OpenMP is not GNU's")
    assert (said[0] == spins) if spins else said[0] not in ("'3000'", "'0'"), said


def test_peers_wait_as_their_users_have_it() -> None:
    assert env.without_openmp_spin_limit({"GOMP_SPINCOUNT": "3000", "A": "3000"}) == {"A": "3000"}
    assert env.without_openmp_spin_limit({"GOMP_SPINCOUNT": "77"}) == {"GOMP_SPINCOUNT": "77"}
