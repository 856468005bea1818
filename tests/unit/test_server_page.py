"""The chat page in a browser, with a real server whose model recites the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_page import (
    ANSWER,
    DONE,
    ENDLESS,
    HOSTILE,
    SHOWCASE,
    TEXT,
    open_empty,
    save_model,
    send,
    stored,
    wait_until_idle,
)  # fmt: skip
from tests.server import RunningServer, running_server
from tests.system.browser import Page, browser
from yalis import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with (
        LLM(str(model), threads=1, kv_memory=0.1) as llm,
        running_server(llm, served_model_name="org/reciter") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: Any) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        yield tab


@pytest.fixture
def tab(page: Page, server: RunningServer) -> Iterator[Page]:
    """Return a page without conversations."""
    open_empty(page, server.url)
    yield page
    assert page.errors == []
    assert all(url.startswith((server.url, "blob:")) for url in page.requests)


def test_the_page_is_served_with_a_strict_policy(server: RunningServer) -> None:
    response = server.get("/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(re.fullmatch("'sha256-[A-Za-z0-9+/]{43}='", policy[name]) for name in ("script-src", "style-src"))
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert re.findall(r"(?:src|href)=\"(?!#|data:)", response.text) == []
    again = server.get("/", **{"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_an_answer_is_streamed_shown_and_kept(tab: Page, server: RunningServer) -> None:
    assert tab.evaluate("document.getElementById('model').textContent") == "reciter"
    send(tab, "Show me 1")
    offline = server.llm.chat([{"role": "user", "content": "Show me 1"}], progress=False)[0]
    chat = stored(tab)
    assert [one["text"] for one in chat["messages"]] == ["Show me 1", SHOWCASE] == ["Show me 1", offline.text]
    stats = tab.evaluate(f"{ANSWER}.querySelector('.stats').textContent")
    tokens = len(offline.completions[0].token_ids)
    assert re.fullmatch(rf"{tokens} tokens · [\d.]+ tokens/s · first token after \d+ ms", stats)
    shown = tab.evaluate(f"{ANSWER}.querySelector('.body').innerHTML")
    assert "<strong>steps</strong>" in shown
    assert '<span class="keyword">def</span>' in shown
    assert "😀" in shown
    assert '<td class="right">1</td>' in shown
    assert tab.evaluate("document.title") == "Show me 1 · YALIS chat"
    tab.open(f"{server.url}/")
    assert tab.evaluate(f"{ANSWER}.querySelector('.body').innerHTML") == shown
    assert tab.evaluate("document.querySelector('.chat-title').textContent") == "Show me 1"
    send(tab, "Again 1")
    assert [one["content"] for one in tab.posts[-1]["messages"]] == ["Show me 1", SHOWCASE, "Again 1"]
    assert tab.posts[-1]["stream_options"] == {"include_usage": True}


def test_stop_keeps_the_text_and_frees_the_request(tab: Page, server: RunningServer) -> None:
    send(tab, "Walk 3", until=f"{ANSWER} && {TEXT}.length > 100")
    first = tab.evaluate(f"{TEXT}.length")
    tab.wait_for(f"{TEXT}.length > {first}")  # it is streamed
    assert tab.evaluate("document.getElementById('send').getAttribute('aria-label')") == "Stop"
    tab.press("Escape")
    tab.wait_for(DONE)
    wait_until_idle(server)
    text = tab.evaluate(TEXT)
    assert text == (ENDLESS * (1 + len(text) // len(ENDLESS)))[: len(text)].strip()
    assert re.match(r"about \d+ tokens? .*stopped", tab.evaluate(f"{ANSWER}.querySelector('.stats').textContent"))
    tab.open(f"{server.url}/")
    assert tab.evaluate(TEXT) == text
    send(tab, "On 3", until=f"{ANSWER} && {TEXT}.length > 100")
    tab.click("#send")
    tab.wait_for(DONE)
    wait_until_idle(server)


def test_a_reload_in_mid_answer_keeps_what_had_arrived(tab: Page, server: RunningServer) -> None:
    send(tab, "Walk 3", until=f"{ANSWER} && {TEXT}.length > 300")
    length = tab.evaluate(f"{TEXT}.length")
    tab.open(f"{server.url}/")
    wait_until_idle(server)
    assert tab.evaluate(f"{TEXT}.length") >= length
    assert "stopped" in tab.evaluate(f"{ANSWER}.querySelector('.stats').textContent")
    assert "error" not in stored(tab)["messages"][1]


def test_what_a_model_writes_cannot_become_html(tab: Page, server: RunningServer) -> None:
    send(tab, "Show me 2")
    hostile = "<img src=x onerror='window.pwned=8'>"
    received = stored(tab)
    recorded = received | {"id": "b", "title": hostile, "system": hostile}
    recorded["messages"] = [
        {"role": role, "text": HOSTILE, "error": hostile, "model": hostile} for role in ("user", "assistant")
    ]
    strange: dict[str, Any] = {
        "a": "{",
        "c": json.dumps(recorded),
        "d": "null",
        "e": json.dumps({"version": 1, "id": "e"}),
    }
    for id, text in {**strange, "b": json.dumps(recorded)}.items():
        tab.evaluate(f"localStorage.setItem('yalis.chat.{id}', {json.dumps(text)})")
    for current in (received["id"], "b"):
        tab.evaluate(f"sessionStorage.setItem('yalis.current', '{current}')")
        tab.open(f"{server.url}/")
        tab.wait_for("document.getElementById('model').textContent")
        shown = tab.evaluate("document.body.textContent")
        assert "<script>window.pwned = 1</script>" in shown
        assert "javascript:window.pwned=3" in shown
        assert (
            tab.evaluate("document.querySelectorAll('img, iframe, base, .message style, .message script').length") == 0
        )
        links = tab.evaluate(
            "[...document.querySelectorAll('.message a')].map(x => [x.protocol, x.getAttributeNames().join()])"
        )
        assert len(links) == 6  # with the bare URLs in the text of the tags
        assert set(map(tuple, links)) == {("https:", "href,title,target,rel")}
        names = tab.evaluate("[...document.querySelectorAll('.message *')].flatMap(x => x.getAttributeNames())")
        assert not [name for name in names if name.startswith("on") or name == "style"]
    assert tab.evaluate("document.getElementById('title').textContent") == hostile
    assert tab.evaluate("typeof window.pwned") == "undefined"
    # The browser refuses HTML from strings, even from this page.
    assert (
        tab.evaluate("(() => { try { document.body.innerHTML = 'x' } catch (error) { return error.name } })()")
        == "TypeError"
    )
    tab.errors.clear()  # the report of that refusal
    assert tab.evaluate("Object.keys(localStorage).length") == 6  # strange entries are left alone
    assert tab.evaluate("document.querySelectorAll('.chat').length") == 2


def test_thoughts_are_folded(tab: Page) -> None:
    send(tab, "2 + 2 = 4")
    assert tab.evaluate(TEXT) == "It is 4."
    assert tab.evaluate(f"[...{ANSWER}.querySelector('details').children].map(x => x.textContent)") == [
        "Thoughts",
        "Add them.",
    ]


def test_keyboard(tab: Page) -> None:
    assert tab.evaluate("document.activeElement.id") == "input"
    tab.type("a")
    tab.press("Enter", "Shift")
    tab.type("1")
    tab.press("Enter")
    tab.wait_for(DONE)
    assert stored(tab)["messages"][0]["text"] == "a\n1"
    tab.press("ArrowUp")
    assert tab.evaluate("document.activeElement.value") == "a\n1"
    tab.press("Escape")
    tab.press("o", "Control", "Shift")
    assert tab.evaluate("document.querySelectorAll('.message').length") == 0
    send(tab, "second 1")
    tab.press("ArrowDown", "Alt")
    assert tab.evaluate("document.getElementById('title').textContent") == "a"
    tab.press("ArrowUp", "Alt")
    assert tab.evaluate("document.getElementById('title').textContent") == "second 1"
    for keys, dialog in (((",", "Control"), "settings"), (("/", "Control"), "keys")):
        tab.press(*keys)
        assert tab.evaluate("document.querySelector('dialog[open]').id") == dialog
        tab.press("Escape")
        assert tab.evaluate("document.querySelector('dialog[open]')") is None
    reached = set()
    for _ in range(60):
        tab.press("Tab")
        name, ring = tab.evaluate(
            "(() => { const x = document.activeElement, style = getComputedStyle(x);"
            "return [x === document.body ? '' : x.id || x.ariaLabel || x.textContent, style.outlineStyle] })()"
        )
        if not name:
            continue  # the page itself, after its last element
        reached.add(name)
        assert ring != "none" or name in ("input", "log"), name
    controls = {"new-chat", "theme", "export-all", "show-keys", "open-settings", "input"}
    assert reached >= controls | {"Copy", "Regenerate", "Edit", "Copy code", "Rename “a”", "Delete “a”"}
    buttons = "[...document.querySelectorAll('button')].filter(x => !x.ariaHidden)"
    assert tab.evaluate(f"{buttons}.filter(x => !x.ariaLabel && !x.textContent.trim()).length") == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(width: int, tab: Page) -> None:
    tab.show(width=width)
    fits = "[document.documentElement, document.getElementById('log')].every(x => x.scrollWidth <= x.clientWidth)"
    assert tab.evaluate(fits)
    send(tab, "x" * 300 + " 1")
    assert tab.evaluate(fits)
    right = (
        "[...document.querySelectorAll('.top *, .composer, .message > *')].map(x => x.getBoundingClientRect().right)"
    )
    assert tab.evaluate(f"Math.max(...{right})") <= width
    if width == 360:
        tab.wait_for("document.getElementById('sidebar').getBoundingClientRect().right <= 0")
        tab.click("#open-sidebar")
        tab.wait_for("document.getElementById('sidebar').getBoundingClientRect().left === 0")
        tab.click("#close-sidebar")
    tab.click("#open-settings")
    assert tab.evaluate("document.getElementById('settings').getBoundingClientRect().right") <= width
    assert tab.evaluate("(x => x.scrollWidth <= x.clientWidth)(document.getElementById('settings'))")
    tab.press("Escape")


def test_dark_mode_follows_the_system_or_the_button(tab: Page, server: RunningServer) -> None:
    colours = "(x => [x.backgroundColor, x.color])(getComputedStyle(document.body))"
    light, dark = ["rgb(251, 251, 249)", "rgb(31, 36, 49)"], ["rgb(20, 23, 29)", "rgb(228, 230, 234)"]
    assert tab.evaluate(colours) == light
    tab.show(dark=True)
    assert tab.evaluate(colours) == dark
    tab.click("#theme")
    assert tab.evaluate("document.getElementById('theme').ariaLabel") == "Theme: light"
    assert tab.evaluate(colours) == light
    tab.open(f"{server.url}/", dark=True)
    assert tab.evaluate(colours) == light
    tab.click("#theme")
    tab.show()
    assert tab.evaluate(colours) == dark
