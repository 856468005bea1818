"""Checks whether another user could change a file that this process would execute or load."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MAX_LINKS = 40  # the kernel's limit


def untrusted_reason(path: Path, follow: bool = True) -> str | None:
    """Return why another user could change this file or folder, such as "/x/y belongs to alice"; None if nobody can.

    The path itself, each folder above it and each symbolic link must belong to this user or root, and nobody else may
    be able to write it. Accepted nevertheless are:

    - folders with the sticky bit, such as /tmp, where only the owner of an entry can replace it;
    - what a group can write, if the user is its only member, or below a folder that nobody else can enter (0700);
    - the folders above the user's home, and folders of root in a user namespace that does not map root.

    A path that does not exist is trusted if its folders are. `follow=False` does not follow a link at the end of the
    path.

    If nobody else can change the path, there is no race between this check and the use of the file.
    """
    return _check(path, follow)[0]


def untrusted_entry(folder: Path) -> str | None:
    """Return why another user could change this folder or an entry of it, as untrusted_reason() does for a path.

    Checks the path of the folder once. Entries of entries are not checked.
    """
    reason, closed = _check(folder, follow=True)
    if reason is not None or not folder.is_dir():
        return reason
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path, status = folder / entry.name, entry.stat(follow_symlinks=False)
                is_link = stat.S_ISLNK(status.st_mode)
                reason = untrusted_reason(path) if is_link else _check_component(path, status, True, closed)
                if reason is not None:
                    return reason
    except OSError:
        return f"{folder} cannot be checked"
    return None


def _check(path: Path, follow: bool) -> tuple[str | None, bool]:
    """Return the reason of untrusted_reason(), and whether the path is below a folder that nobody else can enter."""
    closed_folder: Path | None = None  # the first that nobody else can enter; links and .. may lead out of it
    for component, status, is_last in _components(path, follow):
        if status is None:
            return f"{component} cannot be checked", False
        if component in _folders_above_home(os.geteuid()):
            continue
        closed = closed_folder is not None and component.is_relative_to(closed_folder)
        if (reason := _check_component(component, status, is_last, closed)) is not None:
            return reason, False
        if not closed:
            is_closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
            closed_folder = component if is_closed else None
    return None, closed_folder is not None


def _check_component(path: Path, status: os.stat_result, is_last: bool, closed: bool) -> str | None:
    """Return why another user could change what is at `path` itself. `closed`: nobody else can enter its folder."""
    user = os.geteuid()
    if status.st_uid not in (user, 0) and (is_last or status.st_uid != _unmapped_root()):
        return f"{path} belongs to {_user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        return None
    by_group = status.st_mode & stat.S_IWGRP and not closed and not _is_private_group(status.st_gid, user)
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if (by_group or status.st_mode & stat.S_IWOTH) and not is_sticky:
        return f"{path} can be written by other users"
    return None


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible only to this user. Raises OSError if that is impossible."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _components(path: Path, follow: bool) -> Iterator[tuple[Path, os.stat_result | None, bool]]:
    """Yield every existing component of the path from the root on, its lstat and whether it is the last one.

    The last component has None instead of its lstat if this user may not read it, as on NFS with root_squash.

    Symbolic links are yielded, and then the components of their targets.
    """
    absolute = Path.cwd() / path
    here, pending, links = Path(absolute.anchor), list(reversed(absolute.parts[1:])), 0
    yield here, os.lstat(here), not pending
    while pending:
        name = pending.pop()
        if name == "..":
            here = here.parent
            continue
        component = here / name
        try:
            status = os.lstat(component)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            yield component, None, True
            return
        is_link = stat.S_ISLNK(status.st_mode)
        yield component, status, not pending and not (is_link and follow)
        if not is_link or not (pending or follow):
            here = component
            continue
        links += 1
        if links > _MAX_LINKS:
            return  # opening it fails too
        target = Path(os.readlink(component))
        here = Path(target.anchor) if target.is_absolute() else here
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)


@cache
def _unmapped_root() -> int | None:
    """Return the user id shown for files of root if this user namespace does not map root, as in some containers."""
    try:
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
    return None if any(outside == "0" for _, outside, _ in mapped) else overflow


@cache
def _folders_above_home(user_id: int) -> frozenset[Path]:
    """Return the folders above a user's home. The administrator chose them, so they are trusted, as ssh does."""
    import pwd

    try:
        return frozenset(Path(pwd.getpwuid(user_id).pw_dir).parents)
    except KeyError:
        return frozenset()


@cache
def _is_private_group(group_id: int, user_id: int) -> bool:
    """Return whether this user is the only member. Distributions with such groups use a umask of 002."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(user_id), grp.getgrgid(group_id)
    except KeyError:
        return False
    same = user.pw_gid == group_id and user.pw_name == group.gr_name
    return same and set(group.gr_mem) <= {user.pw_name} and user_id != 0


def _user_name(user_id: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"
