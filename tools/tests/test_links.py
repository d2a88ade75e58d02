"""Checks what the pages at the root point to, as mkdocs does for docs/, and names of modules."""

import re
from pkgutil import resolve_name

import pytest

from repository import PACKAGES, ROOT, pages, project
from shell_words import sessions

PAGES = ["README.md", "CONTRIBUTING.md", *(f"{p.relative_to(ROOT)}/README.md" for p in PACKAGES)]


def headings(text):
    lines = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            name, _, heading = target.partition("#")
            file = (ROOT / page).parent / name if name else ROOT / page
            assert file.exists(), target
            assert not heading or heading in headings(file.read_text()), target


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_readme_begins_with_the_drawing_of_its_package(package):
    text, name = (package / "README.md").read_text(), project(package)["name"]
    (words, target), *_ = re.findall(r"!\[(.+)\]\((.+)\)", text)
    drawing = (package / target).resolve()
    assert drawing == ROOT / "docs" / "packages" / f"{name}.svg"
    assert text.index(target) < text.index("```")
    svg = drawing.read_text()
    assert f'<title id="title">{words}</title>' in svg
    # One style, with its dark colours.
    style = re.compile(r"<style>.*?</style>", re.DOTALL)
    whole = (ROOT / "docs" / "packages.svg").read_text()
    assert style.findall(svg) == style.findall(whole)


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_names_of_pages_are_there(page):
    for name in set(re.findall(r"`(pcomm(?:\.\w+){2,})`", page.read_text())):
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as problem:
            pytest.fail(f"{name}: {problem}")


def test_contributing_lists_the_sessions_of_the_noxfile():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    # These two are made by the sessions that need them.
    assert set(table) == sessions() - {"environment", "workshop"}
    assert len(table) == len(set(table))
