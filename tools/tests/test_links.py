"""Checks what the pages at the root point to; mkdocs does the same for docs/."""

import re

import pytest

from repository import PACKAGES, ROOT
from shell_words import sessions

PAGES = ["README.md", "CONTRIBUTING.md", *(f"{p.relative_to(ROOT)}/README.md" for p in PACKAGES)]


def headings(text):
    lines = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target.removeprefix("#") in headings(text), target
        elif "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_contributing_lists_the_sessions_of_the_noxfile():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    # `environment` is made by the sessions that need it.
    assert set(table) == sessions() - {"environment"}
    assert len(table) == len(set(table))
