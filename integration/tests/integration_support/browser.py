"""Pages in a real browser: headless Chromium, driven by Playwright. Needs no torch.

Chromium is the system's, such as Debian's package. What Playwright would download is another one
and has to be fetched anew for each of its versions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["chromium", "open_page"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Root may not use the sandbox, /dev/shm of a container is small, and nothing leaves this machine.
_OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser that ends with the block; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"no {' or '.join(_NAMES)} on the path: `apt-get install chromium`")
    driver = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: `python3 -m pip install playwright`"
    )
    with driver.sync_playwright() as playwright:
        # Nothing is judged by time: the limit is that of the test.
        browser = playwright.chromium.launch(executable_path=program, args=_OPTIONS, timeout=0)
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Browser, url: str, *, width: int = 1280, is_dark: bool = False) -> Page:
    """A page in a profile of its own, which waits as long as the test may run.

    Wait with locators: `wait_for_function` evaluates text, which the pages of `pcomm serve` forbid.

    Args:
        browser: That of `chromium`.
        url: Address to open.
        width: Of the window, in CSS pixels: 1280 for a desktop, 390 for a phone.
        is_dark: Whether the system asks for dark colours.
    """
    scheme = "dark" if is_dark else "light"
    size = {"width": width, "height": 844}
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(0)
    page.goto(url)
    return page
