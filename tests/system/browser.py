"""A headless Chromium to load pages in, controlled over a pipe, without a port, driver or package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Background traffic of the browser would be mistaken for requests of the page.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip

_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, ",": 188, "/": 191}


class Page:
    """One tab. Records the URLs it requests, the JSON it posts, and its console messages and exceptions."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._next, self._session = 0, ""
        self.requests: list[str] = []
        self.posts: list[Any] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a DevTools command and return its result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, place: Path | str, dark: bool = False, width: int = 1280) -> None:
        """Load a file or a URL."""
        self.show(dark, width)
        self._loaded = False
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def show(self, dark: bool = False, width: int = 1280) -> None:
        """Change the colour scheme and the width of the window."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, script: str, timeout: float = 30) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + timeout
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"this did not become true: {script}"
            time.sleep(0.02)
        return value

    def press(self, key: str, *modifiers: str) -> None:
        """Press a key, such as Enter or o, with modifiers of Alt, Control and Shift."""
        bits = sum({"Alt": 1, "Control": 2, "Shift": 8}[name] for name in modifiers)
        code, number = (f"Key{key.upper()}", ord(key.upper())) if key.isalpha() and len(key) == 1 else (key, _KEYS[key])
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": bits}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 and not modifiers else "")
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2] }})()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> None:
        """Save the whole page as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("document.documentElement.clientWidth")
        area = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def _receive(self, timeout: float = 30) -> Any:
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            more = os.read(self._read, 1 << 20) if ready else b""
            assert more, "the browser did not answer"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._handle_event(message.get("method", ""), message.get("params", {}))
        return message

    def _handle_event(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            if "postData" in params["request"]:
                self.posts.append(json.loads(params["request"]["postData"]))
        elif event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(json.dumps(params))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Yield a page of a browser with its profile in `folder`; skips the test if no browser is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed; tests/system/install.sh installs one as root on Debian")
    (child_in, parent_out), (parent_in, child_out) = os.pipe(), os.pipe()

    def connect_pipes() -> None:
        # The browser reads from fd 3 and writes to fd 4; the pipes themselves may use these numbers.
        reading, writing = os.dup2(child_in, 30), os.dup2(child_out, 31)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={folder}"],
        preexec_fn=connect_pipes, close_fds=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(child_in)
    os.close(child_out)
    try:
        yield Page(parent_out, parent_in)
    finally:
        process.kill()
        process.wait()
        os.close(parent_out)
        os.close(parent_in)
