"""Messages between the ranks of one machine through shared memory.

Every rank has a window that the other ranks of its node map. It is anonymous memory, whose file descriptor is passed to
them over abstract Unix sockets. Neither has a name in the file system, so nothing is left behind when ranks are killed.
A sender writes data into its own window, at the offset that the data has in the tensor, and notifies the receiver with
one byte over the socket. The receiver reads the data in place. A socket closes when its rank dies, which its peers
detect.

A window has two halves that consecutive all-reduces alternate between. Reads are not acknowledged: a rank starts
all-reduce k after k - 1, whose result depends on every rank, so every rank has finished k - 2 and its half is free.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from yalis.comm.torch_dist import TorchGroup
from yalis.errors import PeerLost
from yalis.log import get_logger

log = get_logger(__name__)

# Bytes of each half of a window: the largest tensor that is reduced at once.
HALF_BYTES = 4 << 20
_NOTIFICATION = b"\0"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


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
        except OSError as error:  # callers would report an OSError as a problem with a file
            raise PeerLost(f"the connection to rank {peer} of this node is lost: {error.strerror}") from error

    def wait_for(self, peer: int) -> None:
        """Wait until `peer` has written its next data. Raises PeerLost if the peer has ended."""
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
    name = f"yalis-{int(group.broadcast(token)):016x}"
    window: int | None = None
    listener: socket.socket | None = None
    try:
        if same_machine:
            try:
                window, listener = _create_window(), _listen(name, group.rank)
            except (OSError, AttributeError) as error:  # AttributeError: not on Linux
                log.info("cannot create shared memory for the ranks of this node: %s", error)
        # Every rank listens now, or has failed to.
        if not bool(group.all_gather(torch.tensor([listener is not None])).all()):
            return None
        assert window is not None
        assert listener is not None
        others = [peer for peer in node_ranks if peer != group.rank]
        sockets, windows = _connect(name, group.rank, others, listener, window)
        return SharedWindows(_map_window(window), windows, sockets)
    finally:
        if listener is not None:
            listener.close()
        if window is not None:
            os.close(window)


def _create_window() -> int:
    """Return the file descriptor of a new window."""
    window = os.memfd_create("yalis-window")
    try:
        os.posix_fallocate(window, 0, 2 * HALF_BYTES)  # otherwise a copy raises SIGBUS if memory runs out
    except OSError:
        os.close(window)
        raise
    return window


def _map_window(window: int) -> Tensor:
    memory = mmap.mmap(window, 2 * HALF_BYTES)  # kept alive by the tensor
    return torch.frombuffer(memory, dtype=torch.uint8).view(2, HALF_BYTES)


def _listen(name: str, rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(name, rank))
    listener.listen()
    return listener


def _address(name: str, rank: int) -> str:
    """Return an address in Linux's abstract namespace, which exists only as long as its socket."""
    return f"\0{name}-{rank}"


def _connect(
    name: str, rank: int, others: Sequence[int], listener: socket.socket, window: int
) -> tuple[dict[int, socket.socket], dict[int, Tensor]]:
    """Connect to every lower rank, accept a connection from every higher one, and exchange windows over them."""
    sockets: dict[int, socket.socket] = {}
    windows: dict[int, Tensor] = {}
    for peer in (peer for peer in others if peer < rank):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_address(name, peer))
        except OSError as error:
            raise PeerLost(f"rank {peer} of this node cannot be reached: {error.strerror}") from error
        socket.send_fds(connection, [rank.to_bytes(4, "little")], [window])
        sockets[peer], windows[peer] = connection, _receive_window(connection)[1]
    while len(sockets) < len(others):
        connection, _ = listener.accept()
        if not _is_same_user(connection):
            connection.close()
            continue
        peer, other = _receive_window(connection)
        socket.send_fds(connection, [rank.to_bytes(4, "little")], [window])
        sockets[peer], windows[peer] = connection, other
    return sockets, windows


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether a process of this user has connected. Abstract sockets have no file permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _receive_window(connection: socket.socket) -> tuple[int, Tensor]:
    """Return the rank at the other end and its window."""
    message, windows, _, _ = socket.recv_fds(connection, 4, 1)
    if len(message) < 4 or len(windows) != 1:
        raise PeerLost("a rank of this node disconnected during connection setup")
    try:
        return int.from_bytes(message, "little"), _map_window(windows[0])
    finally:
        os.close(windows[0])
