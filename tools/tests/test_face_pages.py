"""Every name of a face has one description in the reference, in or linked from its section."""

import re

import pytest

from face_pages import face_pages
from faces import ERRORS, faces, homes
from reference_pages import DOCS
from repository import ROOT


@pytest.mark.parametrize("module", faces())
def test_each_name_of_a_face_is_described_once(module):
    text = (DOCS / f"reference/{module.split('.')[1]}.md").read_text()
    section = text.split(f"\n## {module}\n")[1].split("\n## ")[0]
    for name, home in homes(faces()[module]).items():
        described = f"\n::: {home}.{name}\n"
        assert (described in section) != (f"[`{name}`][{home}.{name}]" in section)
        times = len(re.findall(rf"^::: {re.escape(home)}\.{name}$", text, re.MULTILINE))
        assert times == (home != ERRORS), f"{module}: {name}"
    assert ("pcomm.core" in module) == (f"\n::: {ERRORS}\n" in text)


def test_the_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in face_pages() if f"- {page}\n" not in navigation] == []
