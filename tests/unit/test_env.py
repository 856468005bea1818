"""What is set in the environment for libraries that read it."""

from __future__ import annotations

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
    env.keep_compiled()
    assert {name: env.variables()[name] for name in KEPT} == {name: str(tmp_path / own) for name, own in KEPT.items()}
    # Both are asked only now, long after they were imported.
    assert Path(cache_dir()) == tmp_path / "inductor"
    assert Path(knobs.cache.dir) == tmp_path / "triton"


@pytest.mark.usefixtures("unset")
def test_a_place_that_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    env.keep_compiled()
    assert env.variables()["TRITON_CACHE_DIR"] == str(tmp_path / "theirs")
    assert env.variables()["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "ours" / "inductor")
