"""The chat page in a browser: settings, changes of conversations, storage, API keys, and a server that fails."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_page import (
    ANSWER,
    CHATS,
    DONE,
    SHOWCASE,
    TEXT,
    CuttableProxy,
    open_empty,
    save_model,
    send,
    stored,
    wait_until_idle,
)  # fmt: skip
from tests.server import RunningServer, running_server
from tests.system.browser import Page, browser
from yalis import LLM

ERROR = f"{ANSWER}?.querySelector('.error span')?.textContent"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: Any) -> Iterator[LLM]:
    folder = save_model(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.1, max_num_seqs=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def page(tmp_path_factory: Any) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        yield tab


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with running_server(llm, max_queue=0, served_model_name="reciter") as running:
        yield running


@pytest.fixture
def tab(page: Page, server: RunningServer) -> Page:
    open_empty(page, server.url)
    return page


def click(tab: Page, label: str) -> None:
    """Click the last button with this label or text, which may only be visible while the mouse is over it."""
    named = f"x => [x.ariaLabel, x.textContent.trim()].includes({json.dumps(label)})"
    tab.evaluate(f"[...document.querySelectorAll('button')].findLast({named}).click()")


def fill(tab: Page, name: str, value: str) -> None:
    tab.evaluate(f"document.querySelector('#settings [name={name}]').focus()")
    tab.evaluate("document.activeElement.select()")
    tab.type(value)


def texts(tab: Page) -> Any:
    return tab.evaluate("[...document.querySelectorAll('.message .body')].map(x => x.textContent)")


def test_settings_are_sent_and_kept(tab: Page, server: RunningServer) -> None:
    click(tab, "Settings of this chat")
    given = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "5", "min_p": "0.1", "seed": "7"}
    given |= {"max_completion_tokens": "3", "presence_penalty": "9", "frequency_penalty": "-1", "stop": "X\nY"}
    for name, value in given.items():
        fill(tab, name, value)
    click(tab, "Use for new chats")
    tab.press("Escape")
    send(tab, "Show me 1")
    request = tab.posts[-1]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "max_completion_tokens": 3}
    sampling |= {"frequency_penalty": -1, "stop": ["X", "Y"]}  # a penalty of 9 is out of range
    assert {name: request.get(name) for name in [*sampling, "presence_penalty"]} == {
        **sampling,
        "presence_penalty": None,
    }
    stats = tab.evaluate(f"{ANSWER}.querySelector('.stats').textContent")
    assert re.match(r"3 tokens · .*ended at the limit of tokens", stats)
    tab.open(f"{server.url}/")
    assert stored(tab)["sampling"] == sampling
    click(tab, "New chat")
    click(tab, "Settings of this chat")
    assert tab.evaluate("document.querySelector('[name=seed]').value") == "7"
    click(tab, "Reset")
    click(tab, "Done")
    send(tab, "Show me 1")
    assert "seed" not in tab.posts[-1]
    assert tab.evaluate(f"{CHATS}.length") == 2


def test_an_answer_is_generated_again_and_a_question_edited(tab: Page) -> None:
    send(tab, "first 4")
    send(tab, "Show me 1")
    click(tab, "Regenerate")
    tab.wait_for(f"document.querySelectorAll('.message').length === 4 && {DONE}")
    assert [one["content"] for one in tab.posts[-1]["messages"]][-1] == "Show me 1"
    tab.evaluate("[...document.querySelectorAll('.user .icon')].find(x => x.ariaLabel === 'Edit').click()")
    tab.evaluate("document.activeElement.select()")
    tab.type("instead 1")
    tab.press("Enter")
    tab.wait_for(f"document.querySelectorAll('.message').length === 2 && {DONE}")
    assert tab.posts[-1]["messages"] == [{"role": "user", "content": "instead 1"}]
    click(tab, "Undo")
    assert [one["text"] for one in stored(tab)["messages"]][::2] == ["first 4", "Show me 1"]
    assert len(texts(tab)) == 4
    click(tab, "Edit")
    tab.evaluate("document.activeElement.select()")
    tab.type("My own *words*.")
    click(tab, "Save")
    assert texts(tab)[-1] == "My own words."
    assert stored(tab)["messages"][-1]["text"] == "My own *words*."
    assert len(tab.posts) == 4  # nothing was sent


def test_chats_are_renamed_deleted_and_exported(tab: Page, tmp_path: Path) -> None:
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    send(tab, "Show me 1")
    click(tab, "Rename “Show me 1”")
    tab.evaluate("document.activeElement.select()")
    tab.type("Steps & more")
    tab.press("Enter")
    assert tab.evaluate("document.getElementById('title').textContent") == "Steps & more"
    click(tab, "Export “Steps & more”")
    file = tmp_path / "Steps-more.json"
    wait_for_file(file)
    exported = json.loads(file.read_text())
    assert [(one["role"], one["content"]) for one in exported["messages"]] == [
        ("user", "Show me 1"),
        ("assistant", SHOWCASE),
    ]
    assert exported["messages"][1]["stats"]["counted"]
    click(tab, "Export all chats")
    wait_for_file(tmp_path / "chats.json")
    assert json.loads((tmp_path / "chats.json").read_text()) == [exported]
    click(tab, "Delete “Steps & more”")
    assert tab.evaluate(f"{CHATS}.length") == 0
    assert texts(tab) == []
    click(tab, "Undo")
    assert stored(tab)["title"] == "Steps & more"
    assert len(texts(tab)) == 2
    tab.evaluate("[...document.querySelectorAll('.user .icon')].find(x => x.ariaLabel === 'Edit').click()")
    tab.type(" 4")
    tab.press("Enter")
    tab.wait_for(f"{DONE} && {TEXT} === 'It is 4.'")
    assert stored(tab)["title"] == "Steps & more"  # a title that was given stays


def wait_for_file(file: Path) -> None:
    end = time.monotonic() + 10
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < end, f"{file.name} was not downloaded"
        time.sleep(0.02)


def test_copy_buttons(tab: Page, server: RunningServer) -> None:
    tab.call(
        "Browser.grantPermissions", origin=server.url, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    send(tab, "Show me 1")
    for label, expected in (("Copy code", "def add(a, b):  # ünïcödé 😀\n    return a + b"), ("Copy", SHOWCASE)):
        tab.evaluate("document.getElementById('status').textContent = ''")
        click(tab, label)
        tab.wait_for("document.getElementById('status').textContent === 'Copied.'")
        assert tab.evaluate("navigator.clipboard.readText()") == expected
    # Without TLS another host has no clipboard API.
    tab.evaluate(
        "window.copied = '';"
        "document.execCommand = name => { copied = name + document.activeElement.value; return true }"
    )
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    click(tab, "Copy")
    tab.wait_for("copied")
    assert tab.evaluate("copied") == "copy" + SHOWCASE


def test_full_storage_is_told_and_survived(tab: Page) -> None:
    tab.evaluate(
        "for (let size = 1 << 23; size; size >>= 1) {"
        "  try { localStorage.setItem(`other${size}`, 'x'.repeat(size)) } catch {} }"
    )
    send(tab, "Show me 1")
    notice = "document.getElementById('notice')"
    assert tab.evaluate(f"{notice}.textContent").startswith("The browser's storage is full: “Show me 1” will be lost")
    assert tab.evaluate(f"[{notice}.hidden, {CHATS}.length]") == [False, 0]
    assert len(texts(tab)) == 2
    tab.evaluate("for (const key of Object.keys(localStorage)) if (/^other/.test(key)) localStorage.removeItem(key)")
    send(tab, "4")
    assert tab.evaluate(f"{notice}.hidden")
    assert len(stored(tab)["messages"]) == 4


def test_changes_of_another_tab_are_shown(tab: Page) -> None:
    send(tab, "Show me 1")
    chat = stored(tab)
    chat["messages"][1]["text"] = "Changed elsewhere."
    key = f"yalis.chat.{chat['id']}"
    tab.evaluate(f"localStorage.setItem('{key}', {json.dumps(json.dumps(chat))})")
    tab.evaluate(f"window.dispatchEvent(new StorageEvent('storage', {{ key: '{key}' }}))")
    assert texts(tab)[1] == "Changed elsewhere."


def test_a_busy_server_is_asked_again(tab: Page, server: RunningServer) -> None:
    send(tab, "Walk 3", until=f"{ANSWER} && {TEXT}.length > 100")
    click(tab, "New chat")
    send(tab, "Show me 1", until=f"{ERROR}?.startsWith('The server is busy. Next attempt in ')")
    tab.press("ArrowDown", "Alt")
    assert tab.evaluate("document.getElementById('title').textContent") == "Walk 3"
    tab.press("Escape")
    tab.wait_for(DONE)
    tab.press("ArrowDown", "Alt")  # "Walk 3" is the last one used now
    tab.wait_for(f"{TEXT}.includes('steps')")
    tab.wait_for(DONE)
    assert tab.evaluate(ERROR) is None
    wait_until_idle(server)


def test_a_refused_request_is_one_sentence(tab: Page) -> None:
    send(tab, "x" * 70000 + "1", until=ERROR)
    sentence = tab.evaluate(ERROR)
    assert re.fullmatch(r"[A-Z][^.]*\b65536\b[^.]*\.", sentence)
    click(tab, "Retry")
    tab.wait_for(f"{DONE} && {ERROR}")
    assert tab.evaluate(ERROR) == sentence
    assert len(tab.posts) == 2
    assert len(texts(tab)) == 2


def test_a_lost_connection_keeps_the_text(page: Page, server: RunningServer) -> None:
    with CuttableProxy(server) as proxy:
        open_empty(page, proxy.url)
        send(page, "Walk 3", until=f"{ANSWER} && {TEXT}.length > 100")
        proxy.cut()
    page.wait_for(ERROR)
    assert page.evaluate(ERROR) == "The connection was lost before the end of the answer."
    text = page.evaluate(TEXT)
    assert len(text) > 100
    wait_until_idle(server)
    click(page, "Retry")
    page.wait_for(f"{ERROR} === 'The server cannot be reached. Check that it is running.'")
    click(page, "Undo")
    assert page.evaluate(TEXT) == text


def test_an_api_key_is_asked_for_and_kept_for_the_tab(page: Page, llm: LLM, tmp_path: Path) -> None:
    file, key = tmp_path / "keys", "a-key-of-the-tests-0123456789"
    file.write_text(key)
    os.chmod(file, 0o600)
    dialog = "document.getElementById('key-dialog').open && document.getElementById('key-reason').textContent"
    with running_server(llm, served_model_name="reciter", api_key_file=str(file)) as server:
        page.open(f"{server.url}/health")
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        page.open(f"{server.url}/")
        page.wait_for(f"{dialog} === 'The server asks for an API key.'")
        page.press("Escape")
        send(page, "Show me 1", until=dialog)
        page.type("wrong")
        page.press("Enter")
        page.wait_for(f"{dialog} === 'The server refused this key.'")
        page.type(key)
        page.press("Enter")
        page.wait_for(f"{DONE} && {TEXT}.includes('steps')")
        assert stored(page)["messages"][1]["text"] == SHOWCASE
        assert page.evaluate("sessionStorage.getItem('yalis.key')") == key
        assert key not in page.evaluate("JSON.stringify(localStorage)")
        page.open(f"{server.url}/")
        page.wait_for("document.getElementById('model').textContent === 'reciter'")


def test_a_server_that_ends_refuses_and_then_stops(page: Page, llm: LLM) -> None:
    with running_server(llm, served_model_name="reciter") as server:
        open_empty(page, server.url)
        send(page, "Walk 3", until=f"{ANSWER} && {TEXT}.length > 100")
        server.server.drain()
        click(page, "New chat")
        send(page, "Show me 1", until=ERROR)
        assert page.evaluate(ERROR) == "The server is shutting down."
        page.press("ArrowDown", "Alt")
        assert page.evaluate(f"{ERROR} ?? null") is None  # it is finishing this answer
    page.wait_for(ERROR)
    assert page.evaluate(f"{TEXT}.length") > 100
