"""What the page at `/` makes of a conversation: Markdown, what is kept, colours, keys, figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from integration_support.browser import chromium, open_page
from integration_support.short_runs import tiny_run
from pcomm.integration.llm import LLM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def llm(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    run = tiny_run(tmp_path_factory.mktemp("page"), "GA")
    with LLM(run, memory_bytes=2**20, max_model_len=512) as found:
        yield found


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with LiveServer(llm) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    page = open_page(browser, url)
    page.locator("#greeting", has_text="tiny").wait_for()
    yield page
    page.close()


@pytest.fixture(scope="module")
def drawer(browser: Browser, url: str) -> Iterator[Page]:
    """A page for functions of its script that keep nothing."""
    page = open_page(browser, url)
    page.locator("#greeting", has_text="tiny").wait_for()
    yield page
    page.close()


def html_of(page: Page, text: str) -> str:
    """What the page makes of an answer, as HTML."""
    draw = "text => { const at = show('assistant', text); return [at.innerHTML, at.remove()][0]; }"
    return str(page.evaluate(draw, text))


MARKDOWN = [
    ("plain <b>text</b> & more", "<p>plain &lt;b&gt;text&lt;/b&gt; &amp; more</p>"),
    ("# One\n### Three", "<h1>One</h1>\n<h3>Three</h3>"),
    ("a **b `c*` d** *e* 2*3*4", "<p>a **b <code>c*</code> d** <em>e</em> 2*3*4</p>"),
    ("**b** ***", "<p><strong>b</strong> ***</p>"),
    ("use `x < 1`", "<p>use <code>x &lt; 1</code></p>"),
    ("> said\n> so\n\nthen", "<blockquote><p>said\nso</p></blockquote>\n\n<p>then</p>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    (
        "- a\n  - b\n\n- c\n\nd",
        "<ul><li>a\n<ul><li>b</li></ul></li><li>c</li></ul>\n\n<p>d</p>",
    ),
    ("a\n---\nb", "<p>a</p>\n<hr>\n<p>b</p>"),
    (
        "So:\n| a | **b** |\n|:--|--:|\n| 1 | `x\\|y` | 3 |\n| 2 |\n\nend",
        '<p>So:</p>\n<table><tr><th>a</th><th style="text-align: right;"><strong>b</strong></th>'
        '</tr><tr><td>1</td><td style="text-align: right;"><code>x|y</code></td></tr>'
        "<tr><td>2</td></tr></table>\n\n<p>end</p>",
    ),
    # As many cells in the head as in the line below it, or it is text.
    ("a | b\n- | :-: | -\nc", "<p>a | b</p>\n<ul><li>| :-: | -</li></ul>\n<p>c</p>"),
    (
        "a | b\n--- | :-:\nc",
        '<table><tr><th>a</th><th style="text-align: center;">b</th></tr>'
        "<tr><td>c</td></tr></table>",
    ),
    ("a | b\n|---|---|---|", "<p>a | b\n|---|---|---|</p>"),
    (
        "[t](https://h.org/a?b=1&c) https://x.org.",
        '<p><a href="https://h.org/a?b=1&amp;c" target="_blank" rel="noopener noreferrer">t</a> '
        '<a href="https://x.org" target="_blank" rel="noopener noreferrer">https://x.org</a>.</p>',
    ),
]


def test_an_answer_is_shown_as_the_markdown_that_it_is(drawer):
    assert [html_of(drawer, text) for text, _ in MARKDOWN] == [html for _, html in MARKDOWN]
    # Text without markup keeps all of its lines, and those of a program their indentation.
    plain = "def main():\n    return 1\n\n\n2 * 3 * 4 a_b_c [1] (2)\n"
    read = "text => element('div', ...markdown(text)).textContent"
    assert drawer.evaluate(read, plain) == plain


HOSTILE = (
    "<img src=x onerror='window.stolen=1'>",
    "<script>window.stolen=1</script>",
    "```html\n<script>window.stolen=1</script>\n```",
    "[x](javascript:window.stolen=1) [y](JaVaScRiPt:1) [z](data:text/html,1) [w](vbscript:1)",
    '[x](https://a.org/"onmouseover="window.stolen=1)',
    "![i](https://a.org/track.png)",
    "**<b onclick=1>** `<i>` # <h1>\n- <iframe src=/>\n> <svg onload=1>",
    '|<img src=x>|" onclick="x|\n|---|:-:"onclick=1|\n|[x](javascript:1)|\n\n|<i>|\n|---|\n|<b>|',
)


def test_an_answer_cannot_bring_elements_attributes_or_schemes_of_its_own(drawer):
    known = {"p", "strong", "code", "pre", "figure", "figcaption", "span", "button", "a"}
    known |= {"ul", "li", "blockquote", "table", "tr", "th", "td"}
    found = drawer.evaluate(
        """texts => texts.map(text => element("div", ...markdown(text)))
        .flatMap(made => [...made.querySelectorAll("*")])
        .map(one => [one.localName, [...one.attributes].map(at => [at.name, at.value])])""",
        HOSTILE,
    )
    assert {name for name, _ in found} <= known
    attributes = {(name, key) for name, pairs in found for key, _ in pairs}
    assert attributes == {("a", key) for key in ("href", "rel", "target")} | {("button", "type")}
    links = [value for _, pairs in found for key, value in pairs if key == "href"]
    assert len(links) == 2
    assert all(link.startswith("https://a.org/") for link in links)
    assert drawer.evaluate("window.stolen") is None


def test_long_answers_without_partners_of_their_marks_are_drawn_in_time(drawer):
    """A search that tries every end for every beginning would need hours for these."""
    parts = (
        "*",
        "`",
        "[",
        "**a ",
        "[a](",
        "http://",
        "> ",
        "- ",
        "# ",
        "1. ",
        "~~~ ",
        "|",
        "-|",
        "- |",
        "|\n|-|\n",
    )
    wide = 12_000
    texts = [part * (60_000 // len(part)) for part in parts]
    texts += ["".join(" " * depth + "- x\n" for depth in range(400)), "> " * 3000 + "x"]
    # A wide head makes no cells in rows that are short.
    texts += ["a|" * wide + "\n" + "-|" * wide + "\n" + "b\n" * wide, "- a\n  ```\n" * 3000]
    for text in texts:
        assert drawer.evaluate("text => markdown(text).length", text) >= 1
    # Longer ones are shown as they came: 30,000 characters are the last that are read.
    for length, kind in ((30_000, "STRONG"), (30_001, "PRE")):
        text = "**a** " + "a\n" * ((length - 6) // 2) + "b" * (length % 2)
        assert len(text) == length
        names = drawer.evaluate(
            """text => { const at = show('assistant', text); at.remove();
            return [...at.querySelectorAll('*')].map(one => one.tagName); }""",
            text,
        )
        assert kind in names
        assert len(names) <= 2


def test_code_has_its_language_and_a_button_that_copies_it(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = "if x:\n    y = '<b>'\n\n# **no** heading"
    page.evaluate("text => show('assistant', text)", f"So:\n```python\n{code}\n```\nThat is it.")
    figure = page.locator("figure")
    assert figure.locator("span").text_content() == "python"
    assert figure.locator("code").text_content() == code
    figure.get_by_role("button").click()
    figure.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code
    # While a block is written, its end has not come yet.
    assert "<code>x = 1</code>" in html_of(page, "```\nx = 1")


@pytest.mark.parametrize("end", ["\n  ```\n- d", "\n```\n- d", ""], ids=["", "undented", "open"])
def test_code_of_an_item_belongs_to_it_wherever_its_lines_begin(end, drawer):
    shown = html_of(drawer, f"- a\n  - b:\n    ```py\nif x:\n    y\n\n1{end}\n- c")
    assert "<pre><code>if x:\n    y\n\n1" in shown
    read = """text => { const at = show('assistant', text); at.remove();
    return at.querySelectorAll(':scope > ul > li').length; }"""
    items = drawer.evaluate(read, f"1. x\n\n- ```py\na = 1\n\nb = 2{end}")
    assert items == (2 if end else 1)


def ask(page: Page, text: str, number: int) -> dict[str, Any]:
    """The body of the request of a message; its answer is the `number`th of the page."""
    page.fill("#prompt", text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#send")
    page.locator(".assistant[data-done]").nth(number - 1).wait_for()
    page.locator("#send:enabled").wait_for()
    return dict(json.loads(sent.value.post_data or ""))


def test_settings_and_the_conversation_are_sent_and_outlive_a_reload(page):
    for name, value in (("temperature", "0.5"), ("top_p", "0.9"), ("tokens", "7")):
        page.fill(f"#{name}", value)
    page.fill("#system", "Be short.")
    body = ask(page, "word1 *x*", 1)
    first = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "word1 *x*"}]
    sent = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "messages": first}
    assert {name: body[name] for name in sent} == sent
    page.locator(
        ".figures", has_text=re.compile(r"^\d+ tokens?, .*began after [\d.]+ s")
    ).wait_for()
    answer = page.evaluate("conversation[1].content")
    page.reload()
    page.locator(".user").wait_for()
    assert page.locator(".user").text_content() == "word1 *x*"
    assert page.evaluate("conversation[1].content") == answer
    assert [page.input_value(f"#{name}") for name in ("temperature", "top_p", "tokens")] == [
        *("0.5", "0.9", "7"),
    ]
    page.locator(".assistant").evaluate("one => one.dataset.done = 'yes'")
    body = ask(page, "word2", 2)
    assert body["messages"] == [
        *first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "word2"},
    ]
    page.click("#clear")
    page.reload()
    page.locator("#greeting", has_text="tiny").wait_for()
    assert page.evaluate("[conversation.length, by('messages').children.length]") == [0, 0]
    assert page.input_value("#system") == "Be short."


def test_tabs_keep_conversations_of_their_own(browser: Browser, url: str):
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.locator("#greeting", has_text="tiny").wait_for()
    page.fill("#tokens", "3")
    ask(page, "word1", 1)
    # Another tab begins with what was kept last, and goes its own way.
    other = context.new_page()
    other.goto(url)
    other.locator(".user", has_text="word1").wait_for()
    other.click("#clear")
    ask(other, "word2", 1)
    page.evaluate(
        "document.querySelectorAll('[data-done]').forEach(one => delete one.dataset.done)"
    )
    ask(page, "word3", 1)
    for tab, said in ((page, ["word1", "word3"]), (other, ["word2"])):
        tab.reload()
        tab.locator(".user", has_text=said[-1]).wait_for()
        assert tab.locator(".user").all_text_contents() == said
    context.close()


def test_a_question_without_an_answer_comes_back_into_the_box(page):
    page.fill("#prompt", "x" * 2000)
    page.click("#send")
    assert "context" in (page.locator(".error").text_content() or "")
    page.locator("#send:enabled").wait_for()
    assert page.input_value("#prompt") == "x" * 2000
    assert page.evaluate("conversation.length") == 0


def test_the_page_greets_lists_its_settings_and_fits_a_phone(browser, url):
    page = open_page(browser, url, width=390)
    greeting = page.locator("#greeting", has_text="512 tokens")
    greeting.wait_for()
    assert "no chat template" in (greeting.text_content() or "")
    page.evaluate("show('assistant', '```\\n' + 'x'.repeat(500) + '\\n```\\n' + 'y'.repeat(500))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in ("system", "temperature", "top_p", "tokens"):
        assert page.locator(f"#{name}").is_visible()
    assert not page.locator("#key").is_visible()
    page.close()


BACK = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 24, 28)"


def test_the_page_is_as_dark_as_the_system_until_the_switch_says_otherwise(browser, url):
    page = open_page(browser, url, is_dark=True)
    assert page.evaluate(BACK) == DARK
    page.emulate_media(color_scheme="light")
    assert page.evaluate(BACK) == LIGHT
    page.click("#theme")
    assert page.evaluate(BACK) == DARK
    page.reload()
    assert page.evaluate(BACK) == DARK
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(BACK) == LIGHT
    page.close()


def test_the_figures_are_asked_for_while_they_are_looked_at(page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.fill("#tokens", "5")
    ask(page, "word1", 1)
    rows = page.locator("#metrics tr")
    rows.filter(has_text=re.compile("^running0$")).wait_for(state="attached")
    page.click("#server summary")
    rows.filter(has_text=re.compile(r"^written tokens[1-9]\d*$")).wait_for()
    rows.filter(has_text=re.compile(r"^until the first token[\d]+ ms$")).wait_for()
    rows.filter(has_text=re.compile(r"^written now0.0 tokens/s$")).wait_for()
    stuck = json.dumps({"status": "a step has not returned for 61 s"})
    page.route("**/health", lambda route: route.fulfill(status=503, body=stuck))
    page.locator("#state", has_text="a step has not returned for 61 s").wait_for()
    page.unroute("**/health")
    page.locator("#state:empty").wait_for(state="attached")
    page.click("#server summary")
    assert set(asked) == {"completions", "metrics", "health"}


def test_a_key_is_asked_for_where_the_server_wants_one(browser: Browser, llm: LLM, url: str):
    # Another server of the same model, which is idle.
    with LiveServer(llm, api_key="secret") as server:
        page = open_page(browser, server.url)
        page.locator("#key").wait_for()
        assert "API key" in (page.locator("#state").text_content() or "")
        page.fill("#key", "secret")
        page.locator("#prompt").focus()
        page.locator("#greeting", has_text="tiny").wait_for()
        page.fill("#tokens", "3")
        ask(page, "word1", 1)
        assert page.locator("#state").text_content() == ""
        assert "secret" not in json.dumps(page.evaluate("({...localStorage})"))
        page.close()
