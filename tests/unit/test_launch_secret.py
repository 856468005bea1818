"""Where a rank gets its job's secret, and which files it trusts."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import needs
from tests.system.strangers import NOBODY, as_nobody
from yalis.errors import YalisError
from yalis.launch import endpoint, munge
from yalis.launch.auth import MAX_CREDENTIAL, JobKey, Method
from yalis.launch.join import join
from yalis.launch.launchers import LaunchInfo
from yalis.launch.secret import (
    SecretMissing,
    choose_method,
    find_secret,
    published_secret,
    secret_path,
    uses_mpi_broadcast,
)

ONE_HOST = LaunchInfo("srun", 1, 2, 1, 2, "127.0.0.1", job="srun 7.0")
TWO_HOSTS = LaunchInfo("srun", 1, 2, 0, 1, "node01", job="srun 7.0")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, home = tmp_path / "runtime", tmp_path / "home"
    runtime.mkdir(0o700)
    home.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("YALIS_MUNGE_SOCKET", str(tmp_path / "no.socket"))
    monkeypatch.delenv("YALIS_SECRET", raising=False)
    monkeypatch.delenv("YALIS_SECRET_FILE", raising=False)


@pytest.fixture
def munged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    needs.root("starting munged")
    program = needs.program("munged")
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/munge-XXXXXX"], text=True).strip())
    folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    files = ("socket", "key-file", "pid-file", "seed-file", "log-file")
    arguments = [f"--{file}={folder}/{file.split('-')[0]}" for file in files]
    monkeypatch.setenv("YALIS_MUNGE_SOCKET", str(folder / "socket"))
    with subprocess.Popen([program, "--foreground", "--force", *arguments], stderr=subprocess.DEVNULL) as daemon:
        deadline = time.monotonic() + 10
        while not (folder / "socket").exists():
            assert daemon.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        try:
            yield
        finally:
            daemon.terminate()
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.mark.parametrize(("info", "method"), [(ONE_HOST, Method.HOST_FILE), (TWO_HOSTS, Method.HOME_FILE)])
def test_a_file_is_readable_by_this_user_only_and_removed(info: LaunchInfo, method: Method) -> None:
    assert choose_method(info, insecure=False) is method
    with pytest.raises(SecretMissing, match="rank 0 has not written"):
        find_secret(info, method)
    with published_secret(info, method) as secret:
        assert len(secret) == 32
        assert find_secret(info, method) == secret
        path = secret_path(info, method)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with published_secret(info, method) as second:  # a job of the same name, after the first was killed
            assert second != secret
            assert find_secret(info, method) == second
    assert list(path.parent.iterdir()) == []


def test_jobs_have_different_files() -> None:
    other = LaunchInfo("srun", 1, 2, 1, 2, "127.0.0.1", 5000, job="srun 7.0")
    assert secret_path(ONE_HOST, Method.HOST_FILE) != secret_path(other, Method.HOST_FILE)


def test_a_file_that_others_can_read_or_a_link_is_refused(tmp_path: Path) -> None:
    path = secret_path(ONE_HOST, Method.HOST_FILE)
    path.write_text("0" * 32)
    path.chmod(0o640)
    with pytest.raises(YalisError, match=f"`chmod 600 {path}`"):
        find_secret(ONE_HOST, Method.HOST_FILE)
    path.unlink()
    (tmp_path / "elsewhere").write_text("0" * 32)
    (tmp_path / "elsewhere").chmod(0o600)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(YalisError, match="cannot be read"):
        find_secret(ONE_HOST, Method.HOST_FILE)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    needs.root("giving a folder to another user")
    folder = tmp_path / "runtime" / "yalis"
    folder.mkdir(0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(YalisError, match=f"{folder} must be a directory of this user"):
        secret_path(ONE_HOST, Method.HOST_FILE)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(YalisError, match=f"{folder} must be a directory of this user"):
        secret_path(ONE_HOST, Method.HOST_FILE)


def test_a_runtime_directory_that_does_not_exist_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/does-not-exist")  # as srun passes it on from the login node
    assert secret_path(ONE_HOST, Method.HOST_FILE).parent == Path(f"/tmp/yalis-{os.geteuid()}")


def test_a_home_that_cannot_be_written_is_an_error_that_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(YalisError, match=r"set YALIS_SECRET to .* or give insecure_rendezvous=True"):
        find_secret(TWO_HOSTS, Method.HOME_FILE)


def test_the_given_secret_is_used_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("YALIS_SECRET_FILE", str(path))
    assert choose_method(ONE_HOST, insecure=True) is Method.GIVEN
    with pytest.raises(YalisError, match="does not exist; create it with"):
        find_secret(ONE_HOST, Method.GIVEN)
    path.write_text("from the file 16\n")
    path.chmod(0o644)
    with pytest.raises(YalisError, match="chmod 600"):
        find_secret(ONE_HOST, Method.GIVEN)
    path.chmod(0o600)
    assert find_secret(ONE_HOST, Method.GIVEN) == b"from the file 16"
    monkeypatch.setenv("YALIS_SECRET", "0123456789abcdef")
    with published_secret(ONE_HOST, Method.GIVEN) as secret:
        assert secret == b"0123456789abcdef"


def test_without_authentication_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_method(ONE_HOST, insecure=True) is Method.HOST_FILE
    assert choose_method(TWO_HOSTS, insecure=True) is Method.INSECURE
    with published_secret(TWO_HOSTS, Method.INSECURE) as secret:
        assert find_secret(TWO_HOSTS, Method.INSECURE) == secret
    (record,) = caplog.records
    assert "not authenticated (insecure_rendezvous=True)" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("name", [None, "YALIS_SECRET", "YALIS_SECRET_FILE"])
def test_ranks_that_rank_0_starts_do_not_use_the_given_secret(
    name: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "the user's own secret")
    with pytest.raises(YalisError, match="rank 1"):
        join(2, ("yalis.no_such_module",), timeout=20)
    warnings = [record.message.partition(":")[0] for record in caplog.records]
    assert warnings == ([] if name is None else ["YALIS_SECRET and YALIS_SECRET_FILE are not used"])


def test_a_key_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(JobKey(Method.GIVEN, "job", b"hidden"))


def test_munge_is_used_only_if_this_user_can_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that maps this user to root, munged knows another user id."""

    def refuse(credential: bytes) -> bytes:
        raise munge.MungeError("Unauthorized credential for client UID=1000 GID=1000")

    monkeypatch.setattr(munge, "encode", lambda payload: b"credential")
    monkeypatch.setattr(munge, "decode", lambda credential: b"")
    assert choose_method(TWO_HOSTS, False) is Method.MUNGE
    monkeypatch.setattr(munge, "decode", refuse)
    assert choose_method(TWO_HOSTS, False) is Method.HOME_FILE
    assert choose_method(TWO_HOSTS, True) is Method.INSECURE


def test_another_user_who_occupies_the_folder_in_tmp_does_not_block_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs.root("giving files to another user")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    occupied = Path("/tmp/yalis-4242")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    for folder in (tmp_path / "home" / ".yalis", tmp_path / "home" / ".yalis" / "jobs"):
        folder.mkdir(0o700)
        os.chown(folder, 4242, 0)
    occupied.mkdir(0o700)  # of root
    try:
        assert secret_path(ONE_HOST, Method.HOST_FILE).parent == tmp_path / "home" / ".yalis" / "jobs"
        os.chown(occupied, 4242, 0)
        assert secret_path(ONE_HOST, Method.HOST_FILE).parent == occupied
        occupied.chmod(0o755)
        with pytest.raises(YalisError, match=r"type `chmod 700 /tmp/yalis-4242`, or set YALIS_SECRET"):
            secret_path(ONE_HOST, Method.HOST_FILE)
    finally:
        occupied.rmdir()


def test_a_given_secret_is_not_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(endpoint, "_broadcast", lambda info, value: sent.append(value) or value)
    info = LaunchInfo("mpirun", 0, 2, 0, 1, None, job="mpi 7", peer="127.0.0.1")
    assert uses_mpi_broadcast(info)
    for secret, published in ((None, None), (b"x" * 32, "x" * 32)):
        server, _ = endpoint.open_endpoint(info, secret, 1)
        server.close()
        assert sent.pop()["secret"] == published


@pytest.mark.usefixtures("munged")
def test_munge_credentials_of_this_user_only() -> None:
    assert choose_method(TWO_HOSTS, insecure=True) is Method.MUNGE
    credential = munge.encode(b"payload")
    assert len(credential) < MAX_CREDENTIAL
    assert munge.decode(credential) == b"payload"
    with pytest.raises(munge.MungeError, match=r"[Rr]eplay"):
        munge.decode(credential)
    with pytest.raises(munge.MungeError):
        munge.decode(b"MUNGE:nonsense:")
    with pytest.raises(munge.MungeError, match=f"created by user id {NOBODY}"):
        munge.decode(as_nobody(_encode_for_anyone))
    assert "nauthorized" in as_nobody(_decode, munge.encode(b"secret"))


def _encode_for_anyone() -> bytes:
    munge.os.geteuid = lambda: 0  # type: ignore[attr-defined]  # this process restricts it to root, as an attacker would
    return munge.encode(b"payload")


def _decode(credential: bytes) -> str:
    try:
        return munge.decode(credential).decode()
    except munge.MungeError as error:
        return str(error)
