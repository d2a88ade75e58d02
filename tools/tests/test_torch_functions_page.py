"""The page of torch's functions around a sharded model has the rows that a test runs."""

import re
import runpy

from repository import ROOT

PAGE = ROOT / "docs" / "how-to" / "torch-functions-around-a-sharded-model.md"
ROWS = ROOT / "packages" / "pcomm-fsdp" / "tests" / "ranks" / "test_torch_functions.py"


def rows(heading: str) -> dict[str, str]:
    """Second cells by first cells of the table under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(.+?)` \| (.+) \|$", section, re.MULTILINE)
    assert len(found) == section.count("\n| `"), "a row that is not `function` | text"
    return dict(found)


def test_what_works_is_what_a_test_runs():
    assert list(rows("What works")) == list(runpy.run_path(str(ROWS))["WORKS"])


def test_what_raises_names_what_the_error_names():
    """The first function in the page's advice is in the error, or the advice has none."""
    page = rows("What raises")
    checked = runpy.run_path(str(ROWS))["RAISES"]
    assert list(page) == list(checked)
    for name, (_, use) in checked.items():
        word = re.search(r"\w+", use)
        assert word is not None
        is_same = page[name] in ("the same", "averages of `sharded.parameters()`, as above")
        assert is_same or word.group() in page[name], f"{name}: the error says {use}"
