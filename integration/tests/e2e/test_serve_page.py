"""The page at `/` in a real browser: a conversation that streams, and rows of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from integration_support.browser import chromium, open_page
from integration_support.short_runs import tiny_run
from pcomm.integration.llm import LLM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of a server."""
    with chromium() as browser:
        run = tiny_run(tmp_path_factory.mktemp("page"), "GA")
        with (
            LLM(run, memory_bytes=2**20, max_model_len=512) as llm,
            LiveServer(llm, model_name="<b>tiny</b>") as server,
        ):
            yield browser, server.url


@pytest.fixture
def page(opened: tuple[Browser, str]) -> Iterator[Page]:
    page = open_page(*opened)
    yield page
    page.close()


def test_the_browser_finds_no_fault_with_the_page(page):
    faults = []
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.reload()
    page.locator("#model", has_text="tiny").wait_for()
    assert faults == []


def test_a_conversation_and_its_metrics(page):
    # A name is text, whatever it looks like.
    page.locator("#model", has_text=re.compile("^<b>tiny</b>$")).wait_for()
    page.fill("#tokens", "20")
    page.fill("#prompt", "<i>word1</i>")
    page.click("#send")
    answers = page.locator(".assistant[data-done]")
    answers.wait_for()
    written = answers.text_content()
    assert written
    assert page.locator(".user").text_content() == "<i>word1</i>"
    assert page.locator("i, b").count() == 0
    # Random text may have marks of Markdown in it.
    shown = "element('p', ...markdown(conversation[1].content)).textContent"
    assert page.evaluate(shown) == written
    # The second question goes with the first and its answer.
    page.fill("#prompt", "word2")
    page.click("#send")
    answers.nth(1).wait_for()
    page.click("#server summary")
    rows = page.locator("#metrics tr")
    rows.filter(has_text=re.compile("^written tokens[1-9]")).wait_for()
    # An error of the server is shown, above the form in a low window, too, and the page goes on.
    page.set_viewport_size({"width": 1000, "height": 400})
    page.evaluate("scrollTo(0, 0)")
    page.fill("#prompt", "x" * 2000)
    page.click("#send")
    assert "context" in page.locator(".error").text_content()
    page.locator("#send:enabled").wait_for()
    edges = [page.locator(one).bounding_box() for one in (".error", "#form")]
    assert edges[0]["y"] + edges[0]["height"] <= edges[1]["y"]
    page.click("#clear")
    assert page.evaluate("[conversation.length, by('messages').children.length]") == [0, 0]
    # Stop ends the text at once: the button works again, and nothing runs on.
    page.fill("#tokens", "400")
    page.fill("#prompt", "word1")
    page.evaluate("by('form').requestSubmit(); by('stop').click()")
    page.locator("#send:enabled").wait_for()
    assert page.evaluate("running") is None
    rows.filter(has_text=re.compile("^running0$")).wait_for()
