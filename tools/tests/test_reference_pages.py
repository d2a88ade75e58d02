import re

import pytest

from pcomm.integration.config.sections import SECTIONS, keys
from reference_pages import DOCS, pages
from repository import ROOT

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_what_the_repository_holds(name):
    assert (DOCS / name).read_text() == PAGES[name], "run `python tools/reference_pages.py`"


def test_configuration_page_has_the_values_and_the_default_of_a_key():
    page = PAGES["reference/configuration.md"]
    assert page.count("\n## ") == len(SECTIONS)
    assert page.count("\n- `") == len(list(keys()))
    assert "\n- `sequence` (boolean; `false`): " in page


def test_environment_page_has_each_variable_that_the_sources_name():
    name = r"""["'](\w+)["']"""
    read = re.compile(rf"\b(?:environ|getenv)(?:\.\w+)?[\[(]{name}|{name} (?:not )?in os\.environ")
    sources = [path for path in ROOT.glob("**/src/**/*.py") if "testing" not in path.parts]
    found = {one for path in sources for pair in read.findall(path.read_text()) for one in pair}
    assert {"RANK", "TRITON_INTERPRET"} < found
    page = PAGES["reference/environment.md"]
    listed = re.findall(r"^(?:-|\|) `(\w+)`", page, re.MULTILINE)
    assert found - {""} - {*listed} == set()
