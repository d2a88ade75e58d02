"""Every package has a face: the names that its users import, and that the documents use."""

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from code_blocks import code_blocks
from faces import ERRORS, faces, homes, module_of
from repository import PACKAGES, ROOT, module_name, pages, sources


def pcomm_imports(source: str) -> Iterator[tuple[str, str]]:
    """`(module, name)` of everything that Python code takes from a package of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pcomm."):
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("module", faces())
def test_a_face_shows_what_type_checkers_see(module):
    found = importlib.import_module(module)
    typed = homes(faces()[module])
    assert typed
    assert sorted(typed) == found.__all__
    for name, home in typed.items():
        # A face shows what lies below it.
        assert home.startswith(f"{module}.")
        assert getattr(found, name) is getattr(importlib.import_module(home), name)
        assert name in dir(found)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        found.nothing  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_shows_5_to_18_names(package):
    module = module_name(package)
    assert module in faces()
    assert 5 <= len(importlib.import_module(module).__all__) <= 18


@pytest.mark.parametrize("module", faces())
def test_a_name_is_not_that_of_a_module_which_would_hide_it(module):
    beside = {p.stem if p.suffix == ".py" else p.name for p in faces()[module].parent.iterdir()}
    assert not beside & set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_import_from_faces_alone(page):
    shown = {*faces(), ERRORS}
    for block in code_blocks(page.read_text()):
        if block.language != "python":
            continue
        for module, name in pcomm_imports(block.text):
            assert module in shown, f"{page.name}: {name} of {module}"
    assert not re.search(r"from pcomm\.\w+\.\w+\.\w+ import", page.read_text())


def test_integration_imports_packages_by_their_faces():
    # What makes a face is no part of one, nor are all words about what is not installed.
    own = {"pcomm.core.face", "pcomm.core.cli"}
    shown = {*faces(), ERRORS, *own}
    inside = [p for p in sources() if module_of(p).startswith("pcomm.integration")]
    wrong = [
        f"{module_of(path)}: {name} of {module}"
        for path in inside
        for module, name in pcomm_imports(path.read_text())
        if not module.startswith("pcomm.integration") and module not in shown
    ]
    assert wrong == []
