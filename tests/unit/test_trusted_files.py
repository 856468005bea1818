"""Files that are executed or loaded must not be changeable by another user: caches, peers' environments."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest

from tests.system.strangers import as_nobody
from yalis import cache_folders
from yalis.cache_folders import cache_folder
from yalis.checkpoint import fetch
from yalis.cli.doctor import examine
from yalis.comm import tuning
from yalis.errors import YalisError
from yalis.kernels.compiler import build_cached
from yalis.study.peers.process import find_python
from yalis.trusted_files import make_private_folder, untrusted_entry, untrusted_reason

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that other users can reach, unlike tmp_path."""
    path = Path(tempfile.mkdtemp(prefix="yalis-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_own_files_and_those_of_root_are_trusted(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    for path in (Path("/"), Path("/etc/passwd"), folder, folder / "file", folder / "link", folder / "missing" / "x"):
        assert untrusted_reason(path) is None


@pytest.mark.parametrize("named", ["file", "link", "way/file"], ids=["directly", "by a link", "by a linked folder"])
@pytest.mark.parametrize("changed", ["inner/file", "inner"])
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "reason"),
    [
        (NOBODY, 0, 0o755, "belongs to nobody"),
        (0, 0, 0o757, "can be written by other users"),
        (0, NOBODY, 0o775, "can be written by other users"),
        (54321, 0, 0o755, "belongs to user 54321"),
    ],
)
def test_what_another_user_could_change(
    folder: Path, uid: int, gid: int, mode: int, reason: str, changed: str, named: str
) -> None:
    (folder / "inner").mkdir(mode=0o755)
    (folder / "inner" / "file").touch(0o644)
    (folder / "link").symlink_to("inner/file")
    (folder / "way").symlink_to(folder / "inner")
    path = folder / (f"inner/{named}" if named == "file" else named)
    assert untrusted_reason(path) is None
    os.chown(folder / changed, uid, gid)
    (folder / changed).chmod(mode)
    assert untrusted_reason(path) == f"{folder / changed} {reason}"
    assert untrusted_reason(Path(os.path.relpath(path))) == f"{folder / changed} {reason}"


def test_a_link_of_another_user(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    os.chown(folder / "link", NOBODY, NOBODY, follow_symlinks=False)
    for follow in (True, False):
        assert untrusted_reason(folder / "link", follow) == f"{folder / 'link'} belongs to nobody"


def test_only_the_end_of_a_path_may_be_left_unfollowed(folder: Path) -> None:
    (folder / "file").touch()
    os.chown(folder / "file", NOBODY, NOBODY)
    (folder / "link").symlink_to("file")
    assert untrusted_reason(folder / "link") is not None
    assert untrusted_reason(folder / "link", follow=False) is None


def test_a_closed_folder_and_the_sticky_bit(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    os.chown(inner, 0, NOBODY)
    inner.chmod(0o775)
    assert untrusted_reason(inner) is not None
    folder.chmod(0o700)  # the group cannot reach it
    assert untrusted_reason(inner) is None
    inner.chmod(0o777)
    assert untrusted_reason(inner) is not None
    inner.chmod(0o1777)
    assert untrusted_reason(inner) is None


def test_a_path_that_leaves_a_closed_folder(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    (folder / "shared").mkdir()
    os.chown(folder / "shared", 0, NOBODY)
    (folder / "shared").chmod(0o775)
    (folder / "closed" / "link").symlink_to(folder / "shared")
    for path in (folder / "closed" / ".." / "shared" / "x.so", folder / "closed" / "link" / "x.so"):
        assert untrusted_reason(path) == f"{folder / 'shared'} can be written by other users"


def test_a_folder_that_cannot_be_read_is_not_trusted(folder: Path) -> None:
    """As on NFS with root_squash, where root may not read the folders of users."""
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed").chmod(0o700)
    assert as_nobody(_reason, folder / "closed" / "inner") == f"{folder / 'closed' / 'inner'} cannot be checked"


def _reason(path: Path) -> str | None:
    return untrusted_reason(path)


def test_entries_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (folder / f"{number:02}").touch()
    calls: list[Path] = []
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (calls.append(path), lstat(path))[1])
    assert untrusted_entry(folder) is None
    assert len(calls) < 10  # the path of the folder is not checked for every entry
    os.chown(folder / "30", NOBODY, 0)
    assert untrusted_entry(folder) == f"{folder / '30'} belongs to nobody"
    (folder / "20").unlink()
    (folder / "20").symlink_to("30")
    assert untrusted_entry(folder) == f"{folder / '30'} belongs to nobody"
    assert untrusted_entry(folder / "missing") is None


def test_loops_and_odd_paths_end(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "file").touch()
    assert untrusted_reason(folder / "loop") is None  # opening it fails
    assert untrusted_reason(folder / "file" / "x" / ".." / "y") is None


def test_private_folders(folder: Path) -> None:
    (folder / "given").mkdir(mode=0o755)
    make_private_folder(folder / "given" / "a" / "b")
    modes = [(folder / name).stat().st_mode & 0o777 for name in ("given", "given/a", "given/a/b")]
    assert modes == [0o755, 0o700, 0o700]


LIBRARY = "int answer(void) { return %d; }"
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
"""


def _compile(source: str, out: Path) -> Path:
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", out], input=source, text=True, check=True)
    return out


def test_a_planted_library_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, ran = folder / "cache", folder / "ran"
    monkeypatch.setenv("YALIS_CACHE", str(cache))
    builds = 0

    def load() -> int:
        """Load the library as the native kernels are; returns how often it has been built."""

        def build(temporary: Path) -> Path:
            nonlocal builds
            builds += 1
            return _compile(LIBRARY % builds, temporary / "native.so")

        library = build_cached("native", ".so", [b"source"], build)
        return int(CDLL(str(library)).answer())

    assert (load(), load()) == (1, 1)  # the second time from the cache
    assert (cache.stat().st_mode & 0o777, (cache / "native").stat().st_mode & 0o777) == (0o700, 0o700)
    (library,) = (cache / "native").iterdir()
    library.unlink()
    os.chown(_compile(PLANTED % ran, library), NOBODY, NOBODY)
    assert load() == 2
    refusal = f"the cache {cache / 'native'} is not used, because {library} belongs to nobody; set YALIS_CACHE to a "
    assert refusal in caplog.text
    os.chown(library, 0, 0)
    cache.chmod(0o777)
    assert load() == 2  # from the temporary cache of this process
    assert f"because {cache} can be written by other users; type `chmod -R go-rwx {cache}`, or set" in caplog.text
    assert not ran.exists()


def test_the_temporary_cache_is_removed(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    program = "from yalis.cache_folders import cache_folder; print(cache_folder('native'))"
    environment = {**os.environ, "YALIS_CACHE": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert f"{folder} belongs to nobody" in done.stderr
    assert not Path(done.stdout.strip()).parent.exists()


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_compilers_and_tokenizers_do_not_use_a_cache_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(folder))
    for name in ("triton", "inductor", "tokenizers", "nvrar"):
        (folder / name / "entry").mkdir(parents=True)
        if mode == 0o755:
            os.chown(folder / name / "entry", NOBODY, NOBODY)
        (folder / name).chmod(mode)
        cache_folders._warn.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            used = cache_folder(name)
            assert cache_folder(name) == used
        assert len(caplog.messages) == 1  # once
        assert used != folder / name
        assert list(used.iterdir()) == []
        assert untrusted_reason(used) is None


def test_doctor_reports_a_cache_that_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(folder))
    os.chown(folder, NOBODY, NOBODY)
    finding = next(finding for finding in examine() if finding.name == "cache")
    assert not finding.usable
    assert finding.detail.startswith(
        f"the cache {folder} is not used, because {folder} belongs to nobody; set YALIS_CACHE"
    )


def test_another_user_trusts_its_own_files_and_those_of_root(folder: Path) -> None:
    (folder / "own").mkdir(mode=0o755)
    (folder / "root").mkdir(mode=0o755)
    (folder / "stranger").mkdir(mode=0o755)
    os.chown(folder / "own", NOBODY, NOBODY)
    os.chown(folder / "stranger", 54321, 54321)
    found = {name: as_nobody(untrusted_reason, folder / name) for name in ("own", "root", "stranger")}
    assert found == {"own": None, "root": None, "stranger": f"{folder / 'stranger'} belongs to user 54321"}
    assert untrusted_reason(folder / "own") == f"{folder / 'own'} belongs to nobody"


def test_tuned_tables_of_others_are_neither_read_nor_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(folder))
    key, nodes = tuning.TableKey("cpu", tuning.ONE_HOST), [[0], [1]]
    path = tuning.save(key, nodes, [tuning.Timing(1024, tuning.Choice("gloo"), 1.0)], "command")
    assert tuning.load(key).shapes
    os.chown(path, NOBODY, NOBODY)
    assert not tuning.load(key).shapes
    with pytest.raises(YalisError, match="belongs to nobody; set YALIS_CACHE to a folder that only you can write"):
        tuning.save(key, nodes, [], "command")


def test_a_model_is_hashed_again_if_another_user_wrote_its_stamp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(folder))
    alias = fetch.Alias("tiny", "", "tiny==1", "tiny.gguf", 4, fetch.hashlib.sha256(b"true").hexdigest())
    alias.path.parent.mkdir(parents=True)
    alias.path.write_bytes(b"true")
    assert fetch._is_cached(alias)
    times = alias.path.stat()
    alias.path.write_bytes(b"evil")
    os.utime(alias.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fetch._is_cached(alias)  # the stamp is of this user
    os.chown(fetch._stamp(alias), NOBODY, NOBODY)
    assert not fetch._is_cached(alias)


@pytest.mark.parametrize("part", ["", "bin", "bin/python3", "pyvenv.cfg", "lib/python3.11/site-packages"])
def test_an_environment_of_others_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").touch()
    (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    monkeypatch.setenv("YALIS_PEERS", str(folder))
    assert find_python() == folder / "bin" / "python3"
    os.chown(folder / part, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(YalisError, match=r"belongs to nobody; install your own with `make peers`, or name another"):
        find_python()
