"""A peer in the peers' own Python: `python -m yalis.study.peers.worker SOCKET FOLDER`, started by `process`.

A message is a line of JSON on the inherited socket, so whatever the peer prints goes elsewhere. The first request says
which peer and its setup, every other one is a run; each is answered once, a failure with {"error": a sentence}.
The folder is for whatever must not stay, and goes with the process.
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

_GRACE_S = 10.0  # to end by itself once nobody listens


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    Thread(target=_listen, args=(channel, requests), daemon=True).start()
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
    _clear()


def _listen(channel: socket.socket, requests: SimpleQueue[dict[str, Any] | None]) -> None:
    """Requests for the main thread, and the end: its own if it is idle, else by force, with all that it started."""
    for line in channel.makefile("rb"):
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(_GRACE_S)
    _clear()
    os.killpg(0, signal.SIGKILL)


def _start(request: dict[str, Any]) -> Peer:
    import torch

    torch.set_num_threads(request["threads"])
    given = request["setup"]
    given.update(path=Path(given["path"]), dtype=getattr(torch, given["dtype"]), device=torch.device(given["device"]))
    peer: Any = Registry("peer", {"it": request["peer"]}).load("it")
    ready: Peer = peer(PeerSetup(**given))
    return ready


def _clear() -> None:
    """Whoever made the folder may have been killed."""
    shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
