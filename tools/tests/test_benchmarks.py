"""Programs that measure: each one still finds what it imports, though no test lets it measure."""

from __future__ import annotations

import runpy
import sys

import pytest

from repository import PACKAGES

PROGRAMS = sorted(
    path
    for package in PACKAGES
    for path in package.glob("benchmarks/*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_finds_what_it_imports(program, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path])
    assert runpy.run_path(str(program), run_name="imported")["__doc__"]
