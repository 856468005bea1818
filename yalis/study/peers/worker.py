"""Runs a peer in the peers' own Python: `python -m yalis.study.peers.worker SOCKET FOLDER`, started by `process`.

A message is one line of JSON on the inherited socket, separate from what the peer prints. The first request names the
peer and its setup, every other one is a run. Each gets one reply, which is {"error": sentence} after a failure.
FOLDER holds temporary files and is deleted when the process exits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from yalis.registry import Registry
from yalis.study.peers.peer import Peer, PeerSetup, explain_failure

_GRACE_S = 10.0  # to exit by itself after the connection is closed


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    Thread(target=_receive, args=(channel, requests), daemon=True).start()
    peer: Peer | None = None
    while (request := requests.get()) is not None:
        try:
            if peer is None:
                peer = _start(request)
                reply: dict[str, Any] = {"version": peer.version}
            else:
                reply = asdict(peer.run(**request))
        except Exception as error:
            reply = {"error": explain_failure(error, f"{sys.executable} -m pip")}
        channel.sendall(json.dumps(reply).encode() + b"\n")
    _delete_folder()


def _receive(channel: socket.socket, requests: SimpleQueue[dict[str, Any] | None]) -> None:
    """Queue requests for the main thread. When the connection closes, let it exit, or kill the process group."""
    for line in channel.makefile("rb"):
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(_GRACE_S)
    _delete_folder()
    os.killpg(0, signal.SIGKILL)


def _start(request: dict[str, Any]) -> Peer:
    import torch

    torch.set_num_threads(request["threads"])
    setup = request["setup"]
    setup.update(path=Path(setup["path"]), dtype=getattr(torch, setup["dtype"]), device=torch.device(setup["device"]))
    peer: Any = Registry("peer", {"peer": request["peer"]}).load("peer")
    ready: Peer = peer(PeerSetup(**setup))
    return ready


def _delete_folder() -> None:
    """Delete the temporary files here too, since the parent process may have been killed."""
    shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
