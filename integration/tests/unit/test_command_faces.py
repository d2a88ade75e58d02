"""What commands say without a model: options, and paths that are none, before torch is loaded."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from pcomm.core.cli import GROUP, OptionParser

NAMES = ("chat", "convert", "generate", "serve")


@pytest.mark.parametrize("name", NAMES)
def test_each_option_says_what_it_does_and_its_default(name: str) -> None:
    (entry,) = {one.value: one for one in entry_points(group=GROUP, name=name)}.values()
    parser = OptionParser(prog=name)
    entry.load().add_arguments(parser)
    formatter = parser._get_formatter()
    silent = []
    for action in parser._actions:
        has_value = action.option_strings and action.nargs != 0 and not action.required
        shown = formatter._expand_help(action) if action.help else ""
        if not shown or (has_value and "default" not in shown):
            silent.append(action.option_strings)
        assert "None" not in shown
        assert action.default is argparse.SUPPRESS or shown.count("default") <= 1
    assert silent == []


def test_a_path_without_a_model_is_refused_before_torch_is_loaded() -> None:
    program = """
import sys
from pcomm.core.cli import main
for words in (["chat"], ["generate"], ["serve"], ["convert", "--out", "/nowhere/out"]):
    assert main([*words, "/nowhere/model"]) == 2, words
assert "torch" not in sys.modules
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("model /nowhere/model: no such folder") == len(NAMES)
