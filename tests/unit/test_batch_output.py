"""Writing the results of a batch job: complete lines, each id once, through any interruption."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from yalis.batch import output
from yalis.batch.output import ResultFile, result_fields
from yalis.batch.rescue import ResultsDisplaced
from yalis.errors import YalisError, YalisFailure
from yalis.types import Completion, Metrics, RequestOutput, TokenLogprobs

FIELDS = {"text": "x\u2028y\n", "error": None}


def written(path: Path) -> list[str]:
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line)["custom_id"] for line in data.decode().splitlines()]


def test_resumes_and_counts_errors(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path)
    first.write("a", "d", FIELDS)
    first.write("b", "d", {"error": {"line": 2, "message": "no"}})
    first.close()
    second = ResultFile(path)
    assert (second.digests, second.errors) == ({"a": "d", "b": "d"}, {"b": "no"})
    second.write("c", "d", FIELDS)
    second.close()
    assert written(path) == ["a", "b", "c"]


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path)
    first.write("a", "d", FIELDS)
    whole = path.stat().st_size
    first.write("b\u00e9\ud800", "d", FIELDS)
    first.close()
    data = path.read_bytes()
    for end in range(whole, len(data)):  # every length at which a kill may have ended the second line
        path.write_bytes(data[:end])
        torn = ResultFile(path)
        assert torn.digests.keys() == {"a"}
        torn.close()
        assert path.read_bytes() == data[:whole]
    path.write_bytes(data + b"\0" * 100)
    zeros = ResultFile(path)
    assert zeros.digests.keys() == {"a", "b\u00e9\ud800"}
    zeros.close()
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "content", [b"my diary", b"{}\n", b'{"custom_id": "a"}\n', b"[]\n", b'{"custom_id": 3, "error": null}\n', b"\n"]
)
def test_a_file_of_another_program_is_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(YalisError, match=r"out\.jsonl"):
        ResultFile(path)
    assert path.read_bytes() == content


def test_a_duplicate_id_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"custom_id": "a", "error": null}\n' * 2)
    with pytest.raises(YalisError, match=r"line 2 .* second time"):
        ResultFile(path)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "out.jsonl")
    missing = f"there is no folder {tmp_path / 'nowhere'}; create it first, or give a file"
    for place, words in (
        (tmp_path, "give a file"),
        (tmp_path / "nowhere" / "out.jsonl", missing),
        (tmp_path / "link", missing),
        (Path("/dev/null"), "give a file"),
    ):
        with pytest.raises(YalisError, match=words):
            ResultFile(place)


def test_only_an_empty_file_that_it_created_is_removed(tmp_path: Path) -> None:
    made, found = tmp_path / "made", tmp_path / "found"
    found.touch()
    for path in (made, found):
        ResultFile(path).close()
    assert not made.exists()
    assert found.exists()
    mine = ResultFile(made)
    made.unlink()
    made.touch()  # another file with the same name
    mine.close()
    assert made.exists()


def test_remove_keeps_all_other_results(tmp_path: Path) -> None:
    path = tmp_path / "real.jsonl"
    file = ResultFile(path)
    for name in ("a", "b", "c"):
        file.write(name, "d", {"error": {"line": 1, "message": name}} if name != "b" else FIELDS)
    file.close()
    path.chmod(0o604)
    link = tmp_path / "out.jsonl"
    link.symlink_to(path)
    kept = path.read_bytes().splitlines(keepends=True)[1]
    again = ResultFile(link)
    again.remove({"a", "c"})
    assert (again.digests, again.errors, path.read_bytes()) == ({"b": "d"}, {}, kept)
    with pytest.raises(YalisError, match="another job is writing"):  # the new file is locked as the old one was
        ResultFile(path)
    again.write("a", "d", FIELDS)
    again.close()
    assert written(path) == ["b", "a"]
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o604
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.jsonl", "real.jsonl"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), YalisFailure), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failed_remove_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultFile(path)
    file.write("a", "d", FIELDS)
    file.write("b", "d", {"error": {"line": 2, "message": "no"}})
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(raised):
        file.remove({"b"})
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])
    file.write("c", "d", FIELDS)  # and the file can still be written
    file.close()
    assert written(path) == ["a", "b", "c"]


def test_a_file_replaced_before_it_is_locked_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, lock = tmp_path / "out.jsonl", tmp_path / "other.jsonl", fcntl.flock
    for entry in (path, other):
        entry.write_bytes(b"")

    def late(fd: int, how: int) -> None:
        os.replace(other, path)  # as remove() of another job does
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(YalisError, match="another job is writing"):
        ResultFile(path)


def _hold(path: Path, held: object, release: object) -> None:
    file = ResultFile(path)
    held.set()  # type: ignore[attr-defined]
    release.wait(60)  # type: ignore[attr-defined]
    file.close()


def test_two_jobs_cannot_write_together(tmp_path: Path) -> None:
    path, spawn = tmp_path / "out.jsonl", multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold, args=(path, held, release))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(YalisError, match="another job is writing"):
            ResultFile(path)
    finally:
        release.set()
        other.join()
    ResultFile(path).close()


def _fill(path: Path) -> list[str]:
    """Write until the disk is full; returns the ids that were written."""
    file, done = ResultFile(path), []
    try:
        for number in range(1000):
            file.write(f"id-{number}", "d", {"text": "x" * 999, "error": None})
            done.append(f"id-{number}")
    except YalisFailure:
        with pytest.raises(
            YalisFailure, match="free some disk space and run"
        ):  # still full, and the file still ends with a complete line
            file.write("again", "d", {"text": "x" * 9999, "error": None})
        return done
    finally:
        file.close()
    raise AssertionError("the disk never became full")


def test_a_file_at_its_size_limit_keeps_complete_lines(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_700, old[1]))
    try:
        done = _fill(tmp_path / "out.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert written(tmp_path / "out.jsonl") == done
    assert len(done) == 10


def test_a_full_disk_keeps_complete_lines_and_resumes_later(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        path, ballast = tmp_path / "out.jsonl", tmp_path / "ballast"
        ballast.write_bytes(b"x" * 32_768)
        done = _fill(path)
        assert written(path) == done
        assert len(done) > 10
        ballast.unlink()
        file = ResultFile(path)
        file.write("after", "d", FIELDS)
        file.close()
        assert written(path) == [*done, "after"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_ctrl_c_inside_a_write_leaves_complete_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultFile(path)
    file.write("a", "d", FIELDS)
    real = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        real(fd, data[: len(data) // 2], offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(KeyboardInterrupt):
        file.write("b", "d", FIELDS)
    file.close()
    assert written(path) == ["a"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    file = ResultFile(tmp_path / "out.jsonl")
    file.write("a", "d", FIELDS)
    file.write("b", "d", FIELDS)
    file.close()
    assert written(tmp_path / "out.jsonl") == ["a", "b"]


def test_the_fields_of_a_result() -> None:
    metrics = Metrics(0.1, 0.1, 0.2, 3, 0, 2)
    one = Completion("ab", [5, 6], "stop", [TokenLogprobs(5, -0.5, {5: -0.5, 9: float("-inf")})], metrics)
    two = Completion("c", [7], "length", None, metrics)
    fields = result_fields(RequestOutput("p", [1, 2, 3], [one, two], [None, TokenLogprobs(2, float("-inf"))]))
    assert fields["prompt_logprobs"] == [None, {"token_id": 2, "logprob": None, "top": {}}]
    json.dumps(fields, allow_nan=False)
    assert fields["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": {"5": -0.5, "9": None}}]
    assert (fields["text"], fields["token_ids"], fields["finish_reason"]) == ("ab", [5, 6], "stop")
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (3, 3)
    assert [c["text"] for c in fields["completions"]] == ["ab", "c"]
    assert "completions" not in result_fields(RequestOutput(None, [1], [two]))


def _remove(path: Path) -> None:
    path.unlink()


def _rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _truncate(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n") + 5)  # one result and a piece of the second are left


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"not a result\n")


def _symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("target"))
    path.with_name("target").write_bytes(b"of another program")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _no_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("when", ["close", "sync", "write"])
@pytest.mark.parametrize(
    ("change", "what", "left"),
    [
        (_remove, "was removed or renamed", 3),
        (_rename, "was removed or renamed", 3),
        (_truncate, "was truncated", 1),
        (_empty, "was truncated", 0),
        (_append, "was changed by another program", 3),
        (_symlink, "was replaced by another file", 3),
        (_folder, "was replaced by another file", 3),
        (_no_folder, "was removed or renamed", 3),
    ],
)
def test_a_displaced_file_is_reported_and_its_results_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str, left: int, when: str
) -> None:
    path = tmp_path / "folder" / "out.jsonl"
    path.parent.mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    file = ResultFile(path)
    for name in ("a", "b", "c"):
        file.write(name, "d", FIELDS)
    change(path)
    if when == "sync":
        monkeypatch.setattr(output, "_SYNC_SECONDS", -1.0)
    # Another size is noticed before the next write, which would leave a hole; the rest at a sync or at the end.
    early = change in (_truncate, _empty, _append)
    if when == "write" and not early:
        file.write("d", "d", FIELDS)
    noticed = (
        file.close if when == "close" or (when == "write" and not early) else partial(file.write, "d", "d", FIELDS)
    )
    with pytest.raises(ResultsDisplaced, match=rf"out\.jsonl {what} while the job ran") as raised:
        noticed()
    assert raised.value.exit_code == 1
    file.close()  # reports it once
    saved = tmp_path / ("cwd" if change is _no_folder else "folder") / "out.jsonl.rescued"
    if not left:
        assert "its 3 results are lost; run the same command again" in str(raised.value)
        assert not saved.exists()
        return
    names = ["a", "b", "c", "d"][: left + (when != "close" and not early)]
    assert written(saved) == names
    kept = "1 of its 3 results is" if left < 3 else f"its {len(names)} results are"
    assert f"; {kept} saved in {saved}: run the same command with {saved} instead of {path}" in str(raised.value)
    again = ResultFile(saved)  # the job is resumed with it
    assert list(again.digests) == names
    again.close()


def test_rescued_results_do_not_overwrite_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        file = ResultFile(path)
        file.write("a", "d", FIELDS)
        path.unlink()
        with pytest.raises(ResultsDisplaced):
            file.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.jsonl.rescued", "out.jsonl.rescued-2"]


def test_results_that_cannot_be_read_or_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another host removes from a network file system cannot be used through its descriptor either."""
    path = tmp_path / "out.jsonl"
    file = ResultFile(path)
    file.write("a", "d", FIELDS)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        patched.setattr(os, "pwrite", stale)
        with pytest.raises(
            ResultsDisplaced, match=r"cannot be reached any more \(Stale file handle\).*could not be saved"
        ):
            file.write("b", "d", FIELDS)
    file.close()
