"""Checks whether another user could change a file that this process would execute or load."""

from __future__ import annotations

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
    user = os.geteuid()
    closed = False
    for component, status, is_last in _components(path, follow):
        if component in _folders_above_home(user):
            continue
        if status.st_uid not in (user, 0) and (is_last or status.st_uid != _unmapped_root()):
            return f"{component} belongs to {_user_name(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            closed = False
            continue
        is_folder = stat.S_ISDIR(status.st_mode)
        by_group = status.st_mode & stat.S_IWGRP and not closed and not _is_private_group(status.st_gid, user)
        if (by_group or status.st_mode & stat.S_IWOTH) and not (is_folder and status.st_mode & stat.S_ISVTX):
            return f"{component} can be written by other users"
        closed |= is_folder and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    return None


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible only to this user. Raises OSError if that is impossible."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def _components(path: Path, follow: bool) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield every existing component of the path from the root on, its lstat and whether it is the last one.

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
