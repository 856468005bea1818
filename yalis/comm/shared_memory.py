"""Messages between ranks of one machine, through memory that they share.

Every rank has a window that its neighbours can read. It writes there what it sends, where the bytes lie in the tensor,
and tells the receiver by a byte on a socket; the receiver reads it in place. A socket ends with its rank, so the death
of a neighbour is noticed.

A window has two halves, which all-reduces use in turn, and nobody says when it has finished reading: a rank begins an
all-reduce only after the one before, which took something from every rank, so every rank has left the one before that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from yalis.comm.torch_dist import TorchGroup
from yalis.log import get_logger

log = get_logger(__name__)

# The longest tensor that is summed at once.
LIMIT = 4 << 20
_SHARED = Path("/dev/shm")
_HEARD = b"\0"
_STALE_S = 3600.0  # names are needed for a moment only


class SharedWindows:
    """The other ranks of this rank's node, as one all-reduce after the other sees them."""

    def __init__(self, mine: Tensor, theirs: Mapping[int, Tensor], sockets: Mapping[int, socket.socket]) -> None:
        """Windows are bytes, [2, LIMIT]; `theirs` and `sockets` by the neighbour's place in the group."""
        self.mine, self.theirs, self._sockets = mine, dict(theirs), dict(sockets)
        self._turn = 0

    def next_half(self) -> int:
        """The half of the windows that the next all-reduce uses, on every rank."""
        self._turn ^= 1
        return self._turn

    def tell(self, peer: int) -> None:
        """What this rank has written is there for `peer`."""
        try:
            self._sockets[peer].sendall(_HEARD)
        except OSError as error:  # which elsewhere would be taken for that of a file or of our own output
            raise RuntimeError(f"the connection to neighbour {peer} is lost: {error.strerror}") from error

    def hear(self, peer: int) -> None:
        """Wait until `peer` has written what comes next."""
        try:
            heard = self._sockets[peer].recv(1)
        except OSError as error:
            raise RuntimeError(f"the connection to neighbour {peer} is lost: {error.strerror}") from error
        if not heard:
            raise RuntimeError(f"the connection to neighbour {peer} is closed")

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()


def open_shared_windows(group: TorchGroup, neighbours: Sequence[int], possible: bool) -> SharedWindows | None:
    """This rank's neighbours (places in the group, itself included); None on all ranks where one of them cannot share
    memory, or says that it is not `possible`. Every rank of the group calls this."""
    token = torch.tensor([secrets.randbits(62)])
    job = f"yalis-{int(group.broadcast(token)):016x}"
    folder = _SHARED / f"{job}-{group.rank}"
    others = [peer for peer in neighbours if peer != group.rank]
    door: socket.socket | None = None
    theirs: dict[int, Tensor] | None = None
    try:
        try:
            mine, door = _make(folder) if possible else (None, None)
        except OSError as error:
            log.info("no memory to share with the ranks of this node: %s", error)
            mine = None
        group.barrier()  # all windows are there, or will not be
        try:
            theirs = {peer: _map(_SHARED / f"{job}-{peer}" / "window") for peer in others}
        except OSError as error:
            log.info("the memory of a rank of this node is not to be seen: %s", error)
        able = mine is not None and theirs is not None
        if not bool(group.all_gather(torch.tensor([able])).all()):
            return None
        assert mine is not None
        assert theirs is not None
        assert door is not None
        sockets = _connect(group.rank, others, door, job)
        group.barrier()  # nobody looks for names any more
        return SharedWindows(mine, theirs, sockets)
    finally:
        if door is not None:
            door.close()
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> tuple[Tensor, socket.socket]:
    """This rank's window and a socket that its neighbours come to, in a folder that only their user may enter."""
    _sweep()
    folder.mkdir(mode=0o700)
    handle = os.open(folder / "window", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, 2 * LIMIT)  # or a full memory would show as a signal in the middle of a copy
    finally:
        os.close(handle)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folder / "door"))
    door.listen()
    return _map(folder / "window"), door


def _sweep() -> None:
    """Remove what ranks that were killed while they met have left behind."""
    for left in _SHARED.glob("yalis-*"):
        with contextlib.suppress(OSError):
            about = left.stat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _map(path: Path) -> Tensor:
    handle = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, 2 * LIMIT)  # lives as long as the tensor
    finally:
        os.close(handle)
    return torch.frombuffer(memory, dtype=torch.uint8).view(2, LIMIT)


def _connect(rank: int, others: Sequence[int], door: socket.socket, job: str) -> dict[int, socket.socket]:
    """A connection to each of them: to those before this rank, from those behind."""
    sockets = {}
    for peer in others:
        if peer < rank:
            sockets[peer] = one = socket.socket(socket.AF_UNIX)
            one.connect(str(_SHARED / f"{job}-{peer}" / "door"))
            one.sendall(rank.to_bytes(4, "little"))
    for _ in range(sum(peer > rank for peer in others)):
        one, _ = door.accept()
        said = one.recv(4, socket.MSG_WAITALL)
        if len(said) < 4:
            raise RuntimeError("a neighbour left while it came")
        sockets[int.from_bytes(said, "little")] = one
    return sockets
