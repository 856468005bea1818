"""Takes the pictures of the chat page in serving.md: python docs/chat_page_pictures.py URL, with yalis serve at URL."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from tests.system.browser import Page, browser  # noqa: E402

QUESTIONS = ["What is the capital of France?", "Write a Python function that adds two numbers."]
DONE = "document.querySelectorAll('.assistant[aria-busy=false] .stats').length"
SETTINGS = '{"system": "", "sampling": {"temperature": 0, "max_completion_tokens": 220}}'


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        tab.open(sys.argv[1])
        tab.evaluate(f"localStorage.setItem('yalis.defaults', '{SETTINGS}')")
        tab.open(sys.argv[1])
        tab.wait_for("document.getElementById('model').textContent")
        for number, question in enumerate(QUESTIONS, 1):
            tab.type(question)
            tab.press("Enter")
            tab.wait_for(f"{DONE} === {number}", timeout=120)
        for name, width, height in (("light", 1180, 760), ("dark", 1180, 760), ("phone", 360, 740)):
            tab.show(dark=name == "dark", width=width)
            take(tab, FOLDER / f"chat-{name}.png", width, height)


def take(tab: Page, file: Path, width: int, height: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    tab.evaluate("document.querySelector('.user').scrollIntoView(); document.activeElement.blur()")
    tab.evaluate("new Promise(done => setTimeout(done, 300))")
    file.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))


if __name__ == "__main__":
    main()
