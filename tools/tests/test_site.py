"""Looks at the built documentation in a browser, as wide as a desktop's and as a phone's.

`nox -s docs` builds the site and runs this; without a built site there is nothing to look at.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integration_support.browser import chromium, open_page

if "PCOMM_SITE" not in os.environ:
    pytest.skip("`nox -s docs` looks at the site that it builds", allow_module_level=True)

SITE = Path(os.environ["PCOMM_SITE"])
WIDTHS = (1280, 390)
PAGES = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))

# Pictures below the window may wait to come into view, and what moves when the window becomes
# narrow takes its time: here all is in its place at once.
SETTLE = """async () => {
  document.head.insertAdjacentHTML('beforeend', '<style>* { transition: none !important }</style>');
  const images = [...document.images];
  for (const image of images) image.loading = 'eager';
  await Promise.all(images.map(image => image.complete || new Promise(done => {
    image.onload = image.onerror = done;
  })));
}"""

# Each page makes the index of the whole site anew, in a worker; tests of the search wait for it.
NO_SEARCH = "window.Worker = class extends EventTarget { postMessage() {} }"

# What is wrong with a page, as words.
FAULTS = """() => {
  const root = document.documentElement, found = [];
  for (const image of document.images)
    if (image.complete && image.naturalWidth === 0) found.push('no picture: ' + image.src);
  if (root.scrollWidth > root.clientWidth) {
    found.push(`scrolls sideways: ${root.scrollWidth} in ${root.clientWidth}`);
  }
  return found;
}"""

# The least contrast of text with what is behind it, and the text, as WCAG 2 defines it.
CONTRAST = """() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = color => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1);
    return paint.getImageData(0, 0, 1, 1).data;
  };
  const over = (front, back) => [0, 1, 2].map(
    i => (front[i] * front[3] + back[i] * (255 - front[3])) / 255);
  const behind = node => {
    if (!node) return [255, 255, 255];
    const color = rgba(getComputedStyle(node).backgroundColor);
    return color[3] === 255 ? [...color].slice(0, 3) : over(color, behind(node.parentElement));
  };
  const light = color => color.map(part => {
    const s = part / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  let least = [21, ''];
  for (const node of document.querySelectorAll('article :is(h1, h2, p, li, td, th, a, code)')) {
    if (!node.textContent.trim() || node.matches('.headerlink') || !node.offsetParent) continue;
    const back = behind(node);
    const front = over(rgba(getComputedStyle(node).color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, `${node.tagName} ${node.textContent.slice(0, 40)}`];
  }
  return least;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_every_page_is_whole_on_a_desktop_and_on_a_phone(browser, address):
    assert len(PAGES) > 40
    page, missing, faults = open_page(browser, address), [], []
    page.on("response", lambda answer: missing.append(answer.url) if answer.status > 399 else None)
    page.add_init_script(NO_SEARCH)
    widths = WIDTHS
    for name in PAGES:
        page.goto(f"{address}/{name}/")
        page.evaluate(SETTLE)
        for width in widths:
            page.set_viewport_size({"width": width, "height": 844})
            faults += [f"{name} at {width}: {fault}" for fault in page.evaluate(FAULTS)]
        # The next page begins as wide as this one ended.
        widths = widths[::-1]
    page.close()
    assert not faults
    assert not missing


def test_words_of_drawings_are_inside_of_them(browser, address):
    page = open_page(browser, address)
    drawings = sorted(SITE.rglob("*.svg"))
    assert len([path for path in drawings if path.name.startswith("pcomm-")]) == 7
    outside = """() => [...document.querySelectorAll('text')].filter(text => {
      const {x, width} = text.getBBox(), whole = document.rootElement.viewBox.baseVal.width;
      return x < 4 || x + width > whole - 4;
    }).map(text => text.textContent)"""
    for path in drawings:
        if "packages" in path.relative_to(SITE).as_posix():
            page.goto(f"{address}/{path.relative_to(SITE).as_posix()}")
            assert page.evaluate(outside) == [], path.name
    page.close()


def test_a_fault_is_found(browser, address):
    page = open_page(browser, address, width=390)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img id=bad src=/nowhere.png>')")
    page.wait_for_function("document.images[document.images.length - 1].complete")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<hr style=width:2000px>')")
    found = page.evaluate(FAULTS)
    assert [fault.split(":")[0] for fault in found] == ["no picture", "scrolls sideways"]
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_a_known_word_and_no_other(browser, address, width):
    for word, wanted in (("heartbeat", r"^\s*\d+ matching"), ("qqzzxxjj", r"^\s*No matching")):
        page = open_page(browser, address, width=width)
        if width == 390:
            page.click("label.md-header__button[for=__search]")
        # Typed, since the page reads its field when a key goes up or the field gets the focus:
        # on a phone the button has given it the focus before.
        page.locator(".md-search__input").press_sequentially(word)
        told = page.locator(".md-search-result__meta", has_text=re.compile("matching"))
        told.wait_for(state="attached")
        assert re.match(wanted, told.text_content()), f"{word}: {told.text_content()}"
        page.close()


@pytest.mark.parametrize("name", ["", "benchmarks/", "packages/pcomm-core/"])
def test_the_switch_changes_colours_and_text_stays_readable(browser, address, name):
    page, seen = open_page(browser, f"{address}/{name}", is_dark=True), {}
    page.evaluate(SETTLE)
    # From the system's colours to light, to dark, and back to the system's.
    for _ in range(3):
        scheme = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        ratio, text = page.evaluate(CONTRAST)
        assert ratio >= 4.5, f"{scheme}: {text}"
        seen[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("form[data-md-component=palette] label:visible").click()
    assert set(seen) == {"default", "slate"}
    assert len(set(seen.values())) == 2
    page.close()
