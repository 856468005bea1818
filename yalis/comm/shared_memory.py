"""Messages between the ranks of one machine through shared memory.

Every rank has a window that the other ranks of its node map. A sender writes data into its own window, at the offset
that the data has in the tensor, and notifies the receiver with one byte over a Unix socket. The receiver reads the data
in place. A socket closes when its rank dies, so the death of a peer is noticed.

A window has two halves that consecutive all-reduces alternate between. Reads are not acknowledged: a rank starts
all-reduce k after k - 1, whose result depends on every rank, so every rank has finished k - 2 and its half is free.
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
from yalis.errors import PeerLost
from yalis.log import get_logger

log = get_logger(__name__)

# Bytes of each half of a window: the largest tensor that is reduced at once.
HALF_BYTES = 4 << 20
_SHM_DIR = Path("/dev/shm")
_NOTIFICATION = b"\0"
_STALE_S = 3600.0  # files in _SHM_DIR are only needed while ranks connect


class SharedWindows:
    """The windows of this rank and of the other ranks of its node, with a socket to each of them."""

    def __init__(self, own: Tensor, peers: Mapping[int, Tensor], sockets: Mapping[int, socket.socket]) -> None:
        """Windows are uint8 tensors of shape [2, HALF_BYTES]; `peers` and `sockets` are keyed by rank in the group."""
        self.own, self.peers, self._sockets = own, dict(peers), dict(sockets)
        self._half = 0

    def next_half(self) -> int:
        """Return the half of the windows for the next all-reduce, the same on every rank."""
        self._half ^= 1
        return self._half

    def notify(self, peer: int) -> None:
        """Signal `peer` that data for it is in this rank's window."""
        try:
            self._sockets[peer].sendall(_NOTIFICATION)
        except OSError as error:  # elsewhere, an OSError means a file or this process's output
            raise PeerLost(f"the connection to rank {peer} of this node is lost: {error.strerror}") from error

    def wait_for(self, peer: int) -> None:
        """Wait until `peer` has written its next data. Raises PeerLost if the peer is gone."""
        try:
            received = self._sockets[peer].recv(1)
        except OSError as error:
            raise PeerLost(f"the connection to rank {peer} of this node is lost: {error.strerror}") from error
        if not received:
            raise PeerLost(f"the connection to rank {peer} of this node is closed")

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()


def open_shared_windows(group: TorchGroup, node_ranks: Sequence[int], same_machine: bool) -> SharedWindows | None:
    """Create this rank's window and map those of the other ranks of its node. Every rank of the group calls this.

    `node_ranks` are ranks in the group, this one included. Returns None on all ranks if one of them cannot share memory
    or passes `same_machine` as False.
    """
    token = torch.tensor([secrets.randbits(62)])
    prefix = f"yalis-{int(group.broadcast(token)):016x}"
    folder = _SHM_DIR / f"{prefix}-{group.rank}"
    others = [peer for peer in node_ranks if peer != group.rank]
    listener: socket.socket | None = None
    peers: dict[int, Tensor] | None = None
    try:
        try:
            own, listener = _create_window(folder) if same_machine else (None, None)
        except OSError as error:
            log.info("cannot create shared memory for the ranks of this node: %s", error)
            own = None
        group.barrier()  # every window exists now, or its creation failed
        try:
            peers = {peer: _map_window(_SHM_DIR / f"{prefix}-{peer}" / "window") for peer in others}
        except OSError as error:
            log.info("cannot map the shared memory of another rank of this node: %s", error)
        usable = own is not None and peers is not None
        if not bool(group.all_gather(torch.tensor([usable])).all()):
            return None
        assert own is not None
        assert peers is not None
        assert listener is not None
        sockets = _connect(group.rank, others, listener, prefix)
        group.barrier()  # all ranks are connected, so the files can be removed
        return SharedWindows(own, peers, sockets)
    finally:
        if listener is not None:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def _create_window(folder: Path) -> tuple[Tensor, socket.socket]:
    """Create this rank's window and a listening socket, in a folder that only its user can enter."""
    _remove_stale_folders()
    folder.mkdir(mode=0o700)
    handle = os.open(folder / "window", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, 2 * HALF_BYTES)  # otherwise full memory raises SIGBUS during a copy
    finally:
        os.close(handle)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    return _map_window(folder / "window"), listener


def _remove_stale_folders() -> None:
    """Remove folders left by ranks that were killed while they connected."""
    for folder in _SHM_DIR.glob("yalis-*"):
        with contextlib.suppress(OSError):
            stat = folder.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


def _map_window(path: Path) -> Tensor:
    handle = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, 2 * HALF_BYTES)  # kept alive by the tensor
    finally:
        os.close(handle)
    return torch.frombuffer(memory, dtype=torch.uint8).view(2, HALF_BYTES)


def _connect(rank: int, others: Sequence[int], listener: socket.socket, prefix: str) -> dict[int, socket.socket]:
    """Connect to every lower rank and accept a connection from every higher one."""
    sockets = {}
    for peer in others:
        if peer < rank:
            sockets[peer] = connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(_SHM_DIR / f"{prefix}-{peer}" / "socket"))
            connection.sendall(rank.to_bytes(4, "little"))
    for _ in range(sum(peer > rank for peer in others)):
        connection, _ = listener.accept()
        sender = connection.recv(4, socket.MSG_WAITALL)
        if len(sender) < 4:
            raise PeerLost("a rank of this node disconnected during connection setup")
        sockets[int.from_bytes(sender, "little")] = connection
    return sockets
