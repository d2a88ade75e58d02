"""The page at `/` in a real browser: a conversation that streams, and rows of metrics."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.testing.programs import Programs, wait_until
from pcomm.integration.llm import LLM

pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """A page of headless Chromium, told what to do through two pipes."""

    def __init__(self, programs: Programs, folder: Path, url: str) -> None:
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()

        def as_3_and_4() -> None:
            # Copies first, since one of the two may already be 3 or 4.
            ends = [os.dup(read_there), os.dup(write_there)]
            ends = [os.dup2(end, 20 + place) for place, end in enumerate(ends)]
            for place, end in enumerate(ends):
                os.dup2(end, 3 + place)

        assert BROWSER is not None
        programs.start(
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            stdin=-3,
            stdout=-3,
            stderr=-3,
            close_fds=False,
            preexec_fn=as_3_and_4,
        )
        os.close(read_there)
        os.close(write_there)
        self._rest, self._number, self._session = b"", 0, None
        target = self._call("Target.createTarget", url=url)["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        # A condition cannot be awaited in a page that is about to be replaced by another one.
        wait_until(lambda: self.evaluate("typeof by === 'function' && !!metrics"), "the page")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self._call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait in the page for a condition; the limit is that of the test."""
        loop = f"while (!({condition})) await new Promise(go => setTimeout(go, 20));"
        self.evaluate(f"(async () => {{ {loop} }})()")

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            *messages, self._rest = self._rest.split(b"\0")
            for place, text in enumerate(messages):
                found = json.loads(text)
                if found.get("id") == self._number:
                    self._rest = b"\0".join([*messages[place + 1 :], self._rest])
                    assert "result" in found, found
                    return dict(found["result"])
            part = os.read(self._read, 65536)
            assert part, "the browser has ended"
            self._rest += part


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no chromium on this machine")
    run = tiny_run(tmp_path, "GA")
    with (
        LLM(run, memory_bytes=2**20, max_model_len=512) as llm,
        LiveServer(llm, model_name="<b>tiny</b>") as server,
        Programs() as programs,
    ):
        browser = Browser(programs, tmp_path / "profile", server.url)
        try:
            yield browser
        finally:
            browser.close()


def test_a_conversation_and_its_metrics(page):
    page.until("by('model').textContent !== '…'")
    # A name is text, whatever it looks like.
    assert page.evaluate("by('model').textContent") == "<b>tiny</b>"
    page.evaluate("by('tokens').value = 20; by('prompt').value = '<i>word1</i>';")
    page.evaluate("by('form').requestSubmit()")
    page.until("document.querySelector('.assistant[data-done]')")
    written = page.evaluate("document.querySelector('.assistant').textContent")
    assert written
    assert page.evaluate("document.querySelector('.user').textContent") == "<i>word1</i>"
    assert page.evaluate("document.querySelectorAll('i, b').length") == 0
    assert page.evaluate("conversation[1].content") == written
    # The second question goes with the first and its answer.
    page.evaluate("by('prompt').value = 'word2'; by('form').requestSubmit()")
    page.until("document.querySelectorAll('.assistant[data-done]').length === 2")
    page.until("[...by('metrics').rows].some(row => /^written tokens[1-9]/.test(row.textContent))")
    # An error of the server is shown, and the page goes on.
    page.evaluate("by('prompt').value = 'x'.repeat(2000); by('form').requestSubmit()")
    page.until("document.querySelector('.error')")
    assert "context" in page.evaluate("document.querySelector('.error').textContent")
    page.evaluate("by('clear').click()")
    assert page.evaluate("[conversation.length, by('messages').children.length].join()") == "0,0"
    # Stop ends the text at once: the button works again, and nothing runs on.
    page.evaluate("by('tokens').value = 400; by('prompt').value = 'word1'")
    page.evaluate("by('form').requestSubmit(); by('stop').click()")
    page.until("running === null && !by('send').disabled")
    page.until("[...by('metrics').rows].some(row => row.textContent === 'running0')")
