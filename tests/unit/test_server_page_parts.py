"""Parts of the chat page in a browser: its reader of event streams and its Markdown."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.browser import Page, browser
from yalis.server.page import page as chat_page

HELPERS = """
  var render = text => { const root = make("div"); new MarkdownView(root).show(text); return root };
  var html = root => { for (const x of root.querySelectorAll(".code-head")) x.remove(); return root.innerHTML };
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: Any) -> Iterator[Page]:
    """Return a blank page in which the parts can be called one by one."""
    folder = chat_page.FOLDER
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.evaluate("\n".join((folder / f"{name}.js").read_text() for name in chat_page.SCRIPTS[:5]) + HELPERS)
        yield tab
        assert tab.errors == []


def test_the_parts_come_first() -> None:
    assert chat_page.SCRIPTS[:5] == ("dom", "sse", "inline", "highlight", "blocks")


STREAM = (
    "\ufeffdata: one\n\n: a comment\ndata:two\r\rdata: three\r\ndata:  lines\r\n\r\n"
    "id: 1\nretry: 5\ndata: grüße 😀 \u0301\n\n"
    'event: error\ndata: {"error": "é"}\n\ndata\n\nevent: none\n\n\n\ndata: [DONE]\n\ndata: never ended\n'
).encode()
EVENTS = [
    ["message", "one"], ["message", "two"], ["message", "three\n lines"], ["message", "grüße 😀 \u0301"],
    ["error", '{"error": "é"}'], ["message", ""], ["message", "[DONE]"],
]  # fmt: skip


def test_events_are_the_same_however_the_stream_is_cut(tab: Page) -> None:
    size, chosen = len(STREAM), random.Random(0)
    cuts = [[], *([at] for at in range(size + 1)), list(range(size))]
    cuts += [sorted(chosen.sample(range(size), chosen.randint(1, 40))) for _ in range(300)]
    tab.evaluate(f"var bytes = Uint8Array.from(atob('{base64.b64encode(STREAM).decode()}'), x => x.charCodeAt(0))")
    read = tab.evaluate(
        f"{json.dumps(cuts)}.map(cuts => {{ const reader = new EventReader(), found = []; let start = 0;"
        "for (const end of [...cuts, bytes.length]) {"
        "  found.push(...reader.feed(bytes.slice(start, end)).map(x => [x.type, x.data])); start = end }"
        "return found })"
    )
    assert len(read) == len(cuts)
    for cut, events in zip(cuts, read, strict=True):
        assert events == EVENTS, cut


def test_bytes_that_are_not_utf8_do_not_end_a_stream(tab: Page) -> None:
    read = tab.evaluate("new EventReader().feed(Uint8Array.of(100,97,116,97,58,255,97,10,10)).map(x => x.data)")
    assert read == ["\ufffda"]


def link(url: str, text: str, title: str = "") -> str:
    return f'<a href="{url}" title="{title or url}" target="_blank" rel="noopener noreferrer">{text}</a>'


def code(text: str, language: str = "") -> str:
    label = f"Code, {language}" if language else "Code"
    return f'<div class="code"><pre tabindex="0" aria-label="{label}"><code>{text}</code></pre></div>'


MARKDOWN = {
    "": "",
    "a\nb  \nc\\\nd": "<p>a<br>b<br>c<br>d</p>",
    "a\r\n\r\nb\rc": "<p>a</p><p>b<br>c</p>",
    "*a* _b_ **c** __d__ ***e*** ~~f~~": "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
    "<em><strong>e</strong></em> <del>f</del></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*a **b***": "<p><em>a <strong>b</strong></em></p>",
    "snake_case_name 2 * 3 * 4 ~5 a*b*c": "<p>snake_case_name 2 * 3 * 4 ~5 a<em>b</em>c</p>",
    "**open and *unclosed": "<p>**open and *unclosed</p>",
    "**Ünï**。 „*ä*“": "<p><strong>Ünï</strong>。 „<em>ä</em>“</p>",
    r"\*a\* \\ \q": r"<p>*a* \ \q</p>",
    "`a*b*` `` ` `` `open": "<p><code>a*b*</code> <code>`</code> `open</p>",
    r"\(a_b*c*\) \[x\] $$y_1$$ 5$": r'<p><code class="math">\(a_b*c*\)</code> <code class="math">\[x\]</code> '
    r'<code class="math">$$y_1$$</code> 5$</p>',
    "# A *b* #\n####### no\n#no\n## C": '<h3 class="level-1">A <em>b</em></h3><p>####### no<br>#no</p>'
    '<h4 class="level-2">C</h4>',
    "a\n***\nb\n---": "<p>a</p><hr><p>b</p><hr>",
    "> a\nb\n> > c\n\nd": "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>",
    "- a\n- b\n  - c\n\nd": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>",
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n  - b\n2) c\n   d\ne": "<ol><li>a<ul><li>b</li></ul></li><li>c<br>d<br>e</li></ol>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "In\n2020. It was": "<p>In<br>2020. It was</p>",
    "* a\n* * *\n-b": "<ul><li>a</li></ul><hr><p>-b</p>",
    "- [x] a\n- [ ] b": '<ul><li class="task"><input type="checkbox" disabled="" aria-label="done">a</li>'
    '<li class="task"><input type="checkbox" disabled="" aria-label="open">b</li></ul>',
    "1. a\n   ```sh\n   x\n\n     y\n   ```\n2. b": "<ol><li>a" + code("x\n\n  y", "sh") + "</li><li>b</li></ol>",
    "a\n```\n<b> *x*\n~~~\n````\nb": "<p>a</p>" + code("&lt;b&gt; *x*\n~~~") + "<p>b</p>",
    "~~~js extra\nopen": code("open", "js"),
    "```python\nif x: # c\n  'y'\n```": code(
        '<span class="keyword">if</span> x: <span class="comment"># c</span>\n  <span class="string">\'y\'</span>',
        "python",
    ),
    "|a|b|\n|:-|-:|\n|1|`x`|\n|\\||": '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
    '<thead><tr><th class="left">a</th><th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td>'
    '<td class="right"><code>x</code></td></tr><tr><td class="left">|</td><td class="right"></td></tr></tbody>'
    "</table></div>",
    "a | b\nc | d": "<p>a | b<br>c | d</p>",
    "x <br> y<br/>z &amp; &lt;": "<p>x <br> y<br>z &amp;amp; &amp;lt;</p>",
    "[a *b*](https://x.org/c)": f"<p>{link('https://x.org/c', 'a <em>b</em>')}</p>",
    "[a](<http://x.org> 'title') [b](http://x.org/(d) \"t\")": f"<p>{link('http://x.org/', 'a')} "
    f"{link('http://x.org/(d)', 'b')}</p>",
    "[a [b](http://x.org) c](http://y.org)": f"<p>[a {link('http://x.org/', 'b')} c]"
    f"({link('http://y.org/', 'http://y.org')})</p>",
    "[](http://x.org) [http://a.org](http://b.org)": f"<p>{link('http://x.org/', 'http://x.org/')} "
    f"{link('http://b.org/', 'http://a.org')}</p>",
    "![pixel](https://x.org/p.png)": f"<p>{link('https://x.org/p.png', 'pixel')}</p>",
    "see https://x.org/a_b_(c)). **http://y.org** xhttp://z": f"<p>see {link('https://x.org/a_b_(c)', 'https://x.org/a_b_(c)')})."
    f" <strong>{link('http://y.org/', 'http://y.org')}</strong> xhttp://z</p>",
    "<https://x.org?a=1&b=2>": f"<p>{link('https://x.org/?a=1&amp;b=2', 'https://x.org?a=1&amp;b=2')}</p>",
}


def test_markdown(tab: Page) -> None:
    shown = tab.evaluate(f"{json.dumps(list(MARKDOWN))}.map(x => html(render(x)))")
    for text, expected, found in zip(MARKDOWN, MARKDOWN.values(), shown, strict=True):
        assert found == expected, text


#: What the words of random texts are joined by.
JOINTS = (
    " ", "\n", "\n\n", "\n\n\n", "*", "**", "_", "__", "~~", "`", "``", "\n```\n", "\n```js\n", "\n~~~\n",
    "\n- ", "\n  - ",
    "\n    - ", "\n1. ", "\n7) ", "\n> ", "\n> > ", "\n# ", "\n## ", "\n### ", "\n###### ", "\n- [x] ",
    "\n---\n", "\n| ", " | ", "|\n|-|-|\n|", "[", "]", "![",
    "](", ")", "](https://x.org/", "](javascript:", "](<data:text/html,", "](vbscript:", "](//x.org",
    "](JaVaScRiPt&#58;",
    "<script>", "</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<iframe srcdoc='",
    "<br>", "<a href='",
    "https://x.org/", "http://", "<https://x.org/", ">", "\\", "\\(", "\\)", "$$", "&lt;", "\t", "  \n",
    "\u202e", "\ud83d\ude00",
    "<style>", "<!--", "-->", "]]>", "\x00", "'", '"', '" onmouseover="alert(1)',
)  # fmt: skip
ALLOWED = {
    "A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "INPUT", "LI",
    "OL", "P", "PRE",
    "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL", "svg", "use",
}  # fmt: skip
ATTRIBUTES = {
    "aria-hidden", "aria-label", "checked", "class", "disabled", "href", "rel", "role", "start", "tabindex",
    "target", "title", "type",
}  # fmt: skip


def make_texts(count: int) -> list[str]:
    chosen = random.Random(1)
    texts = []
    for _ in range(count):
        joints = chosen.choices(JOINTS, k=chosen.randint(1, 40))
        texts.append("".join(f"{joint}w{number}w" for number, joint in enumerate(joints)))
    return texts


def test_random_markdown_is_safe_and_complete(tab: Page) -> None:
    texts = make_texts(3000)
    shown = tab.evaluate(
        f"{json.dumps(texts)}.map(text => {{ const root = render(text), all = [...root.querySelectorAll('*')];"
        "return [root.textContent, all.map(x => x.tagName), all.flatMap(x => x.getAttributeNames()),"
        "  [...root.querySelectorAll('a')].map(x => [x.href, x.rel])] })"
    )
    seen: set[str] = set()
    complete = 0
    for text, (content, tags, names, links) in zip(texts, shown, strict=True):
        seen |= set(tags)
        assert set(names) <= ATTRIBUTES, text
        assert all(url.startswith(("https://", "http://")) and "noopener" in rel for url, rel in links), text
        kept = content + "".join(url for url, _ in links)
        # Words after a fence are not shown, except the language; cells beyond the columns of a table are dropped.
        if not any(mark in text for mark in ("```", "~~~", "|")):
            assert all(word in kept for word in re.findall(r"w\d+w", text)), text
            complete += 1
    assert complete > 100
    assert seen == ALLOWED


def test_markdown_that_arrives_in_parts_ends_the_same(tab: Page) -> None:
    texts = [*MARKDOWN, *make_texts(150), "\n\n".join(MARKDOWN)]
    different = tab.evaluate(
        f"{json.dumps(texts)}.flatMap(text => {{ const root = make('div'), view = new MarkdownView(root), wrong = [];"
        "for (let at = 0; at <= text.length; at += 1 + at % 3) {"
        "  view.show(text.slice(0, at));"
        "  if (root.innerHTML !== render(text.slice(0, at)).innerHTML) wrong.push([text, at]) }"
        "return wrong })"
    )
    assert different == []


def test_blocks_that_have_ended_keep_their_nodes(tab: Page) -> None:
    tab.evaluate("var root = make('div'), view = new MarkdownView(root); view.show('a\\n\\n```\\nb\\n```\\nc')")
    tab.evaluate("var before = [...root.childNodes]; view.show('a\\n\\n```\\nb\\n```\\nc d\\n- e')")
    assert tab.evaluate("[...root.childNodes].map((x, at) => x === before[at])") == [True, True, False, False]


LENGTH = 60_000
LONG = [
    "*a ", "**a", "a* ", "*a* _b_ ", "_*", "[", "]", "[a](", "[a](b", "![", "<http://", "http://))))",
    "http://a.b/", "`a``b", "\\(", "$$ ",
    "> ", "> > >\n", "- ", "-\n", "1. a\n", "  - a\n", "|", "a|b\n", "|a|\n|-|\n", "```\n", "# ", "~~a", "\\",
    "<br", "a  \n", "\n", "* ", "\t",
]  # fmt: skip


def test_long_inputs_take_linear_time(tab: Page) -> None:
    """The browser must answer within 30 s; what is quadratic takes minutes."""
    for part in LONG:
        text = f"{json.dumps(part)}.repeat({LENGTH // len(part)})"
        assert tab.evaluate(f"render({text}) !== null"), part
    assert tab.evaluate("render(Array.from({length: 400}, (_, n) => '`'.repeat(n) + 'a').join('')) !== null")


@pytest.mark.parametrize("language", ["python", "js", "sql", "bash", "rust", "html", ""])
def test_colours_do_not_change_code(language: str, tab: Page) -> None:
    chosen = random.Random(2)
    parts = [
        "def ", "#", "//", "/*", "*/", "--", "'", '"', '"""', "`", "\\", "\n", "12.5", "x", " ", "return", "é",
        "\ud83d\ude00",
    ]  # fmt: skip
    codes = ["".join(chosen.choices(parts, k=60)) for _ in range(300)]
    changed = tab.evaluate(
        f"{json.dumps(codes)}.filter(code => {{ const to = make('code');"
        f"highlight(to, code, '{language}'); return to.textContent !== code }})"
    )
    assert changed == []
