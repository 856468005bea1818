"""The secret of a job, 128 random bits that only its ranks have, and the methods by which a rank gets it.

The first method that applies is used (`choose_method`):

1. YALIS_SECRET or YALIS_SECRET_FILE. Rank 0 sets YALIS_SECRET for the ranks that it starts itself.
2. mpirun on several hosts, without MASTER_ADDR: rank 0 broadcasts it over MPI (mpi4py).
3. All ranks on one host: a file that only this user can read, in $XDG_RUNTIME_DIR, /tmp/yalis-UID or ~/.yalis/jobs.
4. MUNGE: rank 0 sends it in a credential that only this user can decode.
5. insecure_rendezvous=True: there is no secret, and any process that reaches rank 0 can join.
6. A file that only this user can read, in ~/.yalis/jobs, which must be shared by the hosts.

Rank 0 removes its file when all ranks have joined.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from yalis import env
from yalis.errors import YalisError
from yalis.launch.auth import Method
from yalis.launch.launchers import OPEN_MPI, LaunchInfo
from yalis.log import get_logger

MIN_LENGTH = 16  # characters of a secret that the user chooses
_MAX_FILE = 4096
OPTIONS = (
    "set YALIS_SECRET to the same random text of at least 16 characters for every rank (such as `openssl rand -hex 16`)"
    ", or give insecure_rendezvous=True if you trust everyone on this network"
)


class SecretMissing(Exception):
    """The file with the secret does not exist yet. The message names the file."""


def new_secret() -> str:
    return secrets.token_hex(16)


def uses_mpi_broadcast(info: LaunchInfo) -> bool:
    return info.launcher == OPEN_MPI.name and info.address is None and not info.single_host


def choose_method(info: LaunchInfo, insecure: bool) -> Method:
    """Return the method by which this rank gets the secret. It must be the same on all ranks of a job."""
    if env.job_secret() is not None or env.job_secret_file() is not None:
        return Method.GIVEN
    if uses_mpi_broadcast(info):
        return Method.MPI
    if info.single_host:
        return Method.HOST_FILE
    from yalis.launch import munge  # loads ctypes

    try:
        munge.decode(munge.encode(b""))  # in a container with remapped user ids, only decoding fails
        return Method.MUNGE
    except munge.MungeError as error:
        get_logger(__name__).info("the ranks of this job are not authenticated with MUNGE: %s", error)
    return Method.INSECURE if insecure else Method.HOME_FILE


@contextlib.contextmanager
def published_secret(info: LaunchInfo, method: Method) -> Iterator[bytes]:
    """On rank 0, yield the job's secret; other ranks can find it during the block."""
    if method in (Method.GIVEN, Method.INSECURE):
        if method is Method.INSECURE:
            get_logger(__name__).warning(
                "the ranks of this job are not authenticated (insecure_rendezvous=True): "
                "anyone who can connect to rank 0 can join the job and read its prompts"
            )
        yield _read_given() if method is Method.GIVEN else b"insecure"
        return
    secret = new_secret()
    if method not in (Method.HOST_FILE, Method.HOME_FILE):
        yield secret.encode()
        return
    path = secret_path(info, method)
    _write_private(path, secret)
    try:
        yield secret.encode()
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == secret:  # unless a later job with the same name has replaced it
                path.unlink()


def find_secret(info: LaunchInfo, method: Method) -> bytes | None:
    """On the other ranks, return the job's secret, or None if rank 0 sends it (MUNGE).

    Raises SecretMissing if rank 0 has not written it yet.
    """
    if method is Method.GIVEN:
        return _read_given()
    if method is Method.INSECURE:
        return b"insecure"
    if method is Method.MUNGE:
        return None
    path = secret_path(info, method)
    try:
        return _read_private(path).encode()
    except FileNotFoundError:
        shared = " (is the home directory shared by all hosts?)" if method is Method.HOME_FILE else ""
        raise SecretMissing(f"rank 0 has not written {path}{shared}") from None


def secret_path(info: LaunchInfo, method: Method) -> Path:
    """Return the file in which rank 0 puts the secret. Its directory exists and belongs to this user only."""
    folder = _host_folder() if method is Method.HOST_FILE else _home_folder()
    name = "\n".join((info.job, info.address or "", str(info.port or "")))
    return folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:32]}.secret"


def _host_folder() -> Path:
    """Return a directory on this host that only this user can access, for files that are removed after joining."""
    runtime = env.runtime_dir()
    if runtime is not None and _is_private(runtime):
        return _make_private(runtime / "yalis")
    return private_folder()


def private_folder() -> Path:
    """Return a directory that only this user can access, and that stays when the user logs out.

    Another user can occupy the name in /tmp. Then all ranks use the home directory.
    """
    folder = Path(f"/tmp/yalis-{os.geteuid()}")
    try:
        return _make_private(folder)
    except YalisError:
        if folder.lstat().st_uid == os.geteuid():
            raise  # the user can follow the advice of the message
        return _home_folder()


def _home_folder() -> Path:
    try:
        home = Path.home()
    except RuntimeError as error:
        raise YalisError(
            f"the ranks cannot authenticate each other: this user has no home directory; {OPTIONS}"
        ) from error
    _make_private(home / ".yalis")
    return _make_private(home / ".yalis" / "jobs")


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _make_private(folder: Path) -> Path:
    """Create the directory for this user only. An existing one is accepted if nobody else can access it."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise YalisError(
            f"the ranks cannot authenticate each other: {folder} cannot be created ({error.strerror}); {OPTIONS}"
        ) from error
    if not _is_private(folder):
        raise YalisError(
            f"{folder} must be a directory of this user that nobody else can access; remove it, type "
            f"`chmod 700 {folder}`, or {OPTIONS}"
        )
    return folder


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read. It gets its name when it is complete."""
    unfinished = path.with_suffix(f".{new_secret()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise YalisError(
            f"the ranks cannot authenticate each other: {path} cannot be written ({error.strerror}); {OPTIONS}"
        ) from error


def _read_private(path: Path) -> str:
    """Return the text of a file; raises YalisError if other users can access it, FileNotFoundError if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise YalisError(f"{path}, which should contain the job's secret, cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        owner_only = status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not owner_only:
            raise YalisError(f"{path} must be a file of this user that nobody else can access; type `chmod 600 {path}`")
        return file.read(_MAX_FILE).decode(errors="surrogateescape").strip()


def _read_given() -> bytes:
    """Return YALIS_SECRET, or the contents of YALIS_SECRET_FILE."""
    secret, source = env.job_secret(), "YALIS_SECRET"
    if secret is None:
        path = env.job_secret_file()
        assert path is not None
        source = f"YALIS_SECRET_FILE ({path})"
        try:
            secret = _read_private(path)
        except FileNotFoundError:
            raise YalisError(
                f"{source} does not exist; create it with `(umask 077; openssl rand -hex 16 > {path})`"
            ) from None
    if len(secret) < MIN_LENGTH:
        raise YalisError(
            f"{source} has {len(secret)} characters; give at least {MIN_LENGTH} random ones, such as "
            "`openssl rand -hex 16` prints"
        )
    return secret.encode(errors="surrogateescape")
