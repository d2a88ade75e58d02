"""Runs every Python block of the READMEs and the documentation, and checks their commands."""

import os
import subprocess
import sys
import tomllib

import pytest

from code_blocks import code_blocks, program
from pcomm.core.testing.patience import PATIENCE_S, scaled_s
from repository import ROOT, pages
from shell_words import commands, complaint

PAGES = {path.relative_to(ROOT).as_posix(): code_blocks(path.read_text()) for path in pages()}
LANGUAGES = {"python", "bash", "toml", "json", "text"}
NOT_RUN = [(page, b.line, b.not_run) for page, blocks in PAGES.items() for b in blocks if b.not_run]


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if program(blocks)])
def test_python_blocks_run_in_order_without_a_warning(page, tmp_path):
    script = tmp_path / (page.replace("/", "_").removesuffix(".md") + ".py")
    script.write_text(program(PAGES[page]))
    command = [sys.executable, "-W", "error", str(script)]
    environ = {**os.environ, "PYTHONWARNINGS": "error"}
    answer = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled_s(PATIENCE_S),
        check=False,
    )
    assert answer.returncode == 0, f"{page}, with its own line numbers:\n{answer.stderr}"


@pytest.mark.parametrize(("page", "line", "reason"), NOT_RUN)
def test_blocks_that_are_not_run_are_skipped_by_name(page, line, reason):
    pytest.skip(f"{page}:{line}: {reason}")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_shell_blocks_exist(page):
    blocks = [block for block in PAGES[page] if block.language == "bash"]
    found = {" ".join(c): complaint(c) for block in blocks for c in commands(block.text)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_name_a_language_that_is_checked(page):
    for block in PAGES[page]:
        assert block.language in LANGUAGES, f"{page}:{block.line}"
        if block.language == "toml":
            tomllib.loads(block.text)


PAGE = """\
First.
```python
a = 1
```
<!-- not run: it needs two GPUs -->
```python
b = 2
```
- indented
  ```python
  assert a == 1
  ```
"""


def test_program_keeps_the_lines_of_the_page_and_leaves_out_what_is_not_run():
    blocks = code_blocks(PAGE)
    assert [(b.line, b.not_run) for b in blocks] == [(3, ""), (7, "it needs two GPUs"), (11, "")]
    assert program(blocks).splitlines() == ["", "", "a = 1", *[""] * 7, "assert a == 1"]


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("python3 -m nox -s tests -- -k topology", ""),
        ("python3 -m nox -s teests", "no such nox session: teests"),
        ("python3 -m pip install -e './packages/pcomm-core[test]'", ""),
        (
            "python3 -m pip install ./packages/pcomm-cor",
            "no such folder with a package: ./packages/pcomm-cor",
        ),
        ("pcomm doctor --json", ""),
        ("pcomm doktor", "`pcomm doktor --help` fails"),
        ("pcomm doctor --jsno", "no such option: --jsno"),
        ("pcomm bench gdn-cp --quick", ""),
        ("pcomm bench gdn-cp --quik", "no such option: --quik"),
        ("pcomm bench gdn-pc", "`pcomm bench gdn-pc --help` fails"),
        ("python3 tools/largest.py", ""),
        ("python3 tools/smallest.py", "there is no file tools/smallest.py"),
        ("frobnicate", "no check knows the command 'frobnicate'"),
    ],
)
def test_complaint_names_the_word_that_does_not_exist(command, wrong):
    assert [complaint(words) for words in commands(command)] == [wrong]


def test_commands_are_split_at_operators_and_joined_at_backslashes():
    block = "# a comment\n$ A=1 cd x && \\\n  pcomm doctor | tail -1\n"
    assert commands(block) == [["cd", "x"], ["pcomm", "doctor"], ["tail", "-1"]]
