"""The chat page in a browser, in front of a server whose model recites: what its tests share."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.reciting_model import save_reciting_model
from tests.server import RunningServer
from tests.system.browser import Page

SHOWCASE = (
    """Three **steps**, see [the paper](https://example.org/paper):

1. one
2. *two*

```python
def add(a, b):  # ünïcödé 😀
    return a + b
```

| name | value |
| --- | ---: |
| x | 1 |

A long word: """
    + "abcdefgh" * 40
)
HOSTILE = """<script>window.pwned = 1</script> <img src="https://evil.example/a.png" onerror="window.pwned = 2">
![pixel](https://evil.example/b.png) [click](javascript:window.pwned=3) [data](data:text/html,x)
<iframe src="https://evil.example/c"></iframe> <style>body { display: none }</style> <base href="https://evil.example">

```html"onmouseover="window.pwned=4
</code></pre><script>window.pwned = 5</script>
```

<https://evil.example/d"onclick="window.pwned=6> [ok](https://evil.example/e"onclick="window.pwned=7)
"""
ENDLESS = "And then they went on walking, over one hill after the other. "
ANSWER = "document.querySelector('.message.assistant:last-child')"
DONE = f"{ANSWER} && {ANSWER}.getAttribute('aria-busy') === 'false'"
TEXT = f"{ANSWER}.querySelector('.body').textContent"
CHATS = "Object.keys(localStorage).filter(x => x.startsWith('yalis.chat.')).map(x => JSON.parse(localStorage[x]))"


def save_model(folder: Path) -> Path:
    texts = {"1": SHOWCASE, "2": HOSTILE, "4": "<think>\nAdd them.\n</think>\nIt is 4."}
    return save_reciting_model(folder, texts, {"3": ENDLESS})


class CuttableProxy:
    """Forwards connections to a server until cut() closes them all, as a network that fails does."""

    def __init__(self, server: RunningServer) -> None:
        target = urlsplit(server.url)
        self._target = (target.hostname, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttableProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def open_empty(page: Page, url: str) -> None:
    page.open(f"{url}/version")  # of the same origin, and without the page
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    for record in (page.requests, page.posts, page.errors):
        record.clear()
    page.open(f"{url}/")
    page.wait_for("document.getElementById('model').textContent")


def send(tab: Page, text: str, until: str = DONE) -> None:
    count = tab.evaluate("document.querySelectorAll('.message').length")
    tab.evaluate("document.getElementById('input').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait_for(f"document.querySelectorAll('.message').length > {count} && ({until})")


def stored(tab: Page) -> Any:
    """Return the only stored conversation."""
    (chat,) = tab.evaluate(CHATS)
    return chat


def wait_until_idle(server: RunningServer) -> None:
    end = time.monotonic() + 60
    while server.state.async_llm.num_open or server.blocks_in_use():
        assert time.monotonic() < end, "the request still runs"
        time.sleep(0.01)
