"""Compares the output of `pcomm plan` in the README of pcomm-ntp with what the command prints."""

import argparse
import shlex

import pytest

from code_blocks import code_blocks
from pcomm.ntp.commands.plan import command
from repository import ROOT

PAGE = ROOT / "packages" / "pcomm-ntp" / "README.md"


def test_the_plan_that_is_shown_is_the_one_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = {b.language: b.text for b in code_blocks(PAGE.read_text()) if "dp=16" in b.text}
    blocks |= {b.language: b.text for b in code_blocks(PAGE.read_text()) if "simulated:" in b.text}
    words = shlex.split(blocks["bash"].replace("\\\n", " "))
    assert words[:2] == ["pcomm", "plan"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(words[2:])) == 0
    assert capsys.readouterr().out.strip() == blocks["text"].strip()
