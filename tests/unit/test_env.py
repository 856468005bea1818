"""The environment variables that yalis sets for other libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from yalis import env
from yalis.cache_folders import cache_folder

CACHE_DIRS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHE_DIRS:
        monkeypatch.setenv(name, "")  # so that the original value is restored afterwards
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
def test_compilers_use_our_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    env.set_compile_cache_dirs(cache_folder)
    assert {name: env.variables()[name] for name in CACHE_DIRS} == {
        name: str(tmp_path / folder) for name, folder in CACHE_DIRS.items()
    }
    # Both read the variables on use, not on import.
    assert Path(cache_dir()) == tmp_path / "inductor"
    assert Path(knobs.cache.dir) == tmp_path / "triton"


@pytest.mark.usefixtures("unset")
def test_cache_directories_set_by_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    env.set_compile_cache_dirs(cache_folder)
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
def test_waiting_openmp_threads_spin_briefly(given: dict[str, str], before: str, spins: str | None) -> None:
    """As reported by torch's OpenMP when it is loaded."""
    others = {
        name: value for name, value in env.variables().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import {before}; from yalis import LLM"],
        env={**others, **given, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    reported = [line.rpartition("=")[2].strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not reported:
        pytest.skip("torch's OpenMP is not GNU's")
    assert (reported[0] == spins) if spins else reported[0] not in ("'3000'", "'0'"), reported


def test_peer_engines_keep_their_own_spin_count() -> None:
    assert env.without_openmp_spin_limit({"GOMP_SPINCOUNT": "3000", "A": "3000"}) == {"A": "3000"}
    assert env.without_openmp_spin_limit({"GOMP_SPINCOUNT": "77"}) == {"GOMP_SPINCOUNT": "77"}
