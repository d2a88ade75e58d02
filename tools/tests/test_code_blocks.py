"""Runs every Python block of the READMEs and the documentation, and checks their commands."""

import ast
import configparser
import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest
import yaml

import warm_interpreter
from code_blocks import code_blocks, program
from pcomm.core.testing.programs import Programs
from repository import ROOT, pages
from shell_words import commands, complaint

PAGES = {path.relative_to(ROOT).as_posix(): code_blocks(path.read_text()) for path in pages()}
# That of nginx is run by the test of its page.
LANGUAGES = {"python", "bash", "toml", "json", "text", "yaml", "ini", "nginx"}
NOT_RUN = [(page, b.line, b.not_run) for page, blocks in PAGES.items() for b in blocks if b.not_run]


PROGRAMS = {page: text for page, blocks in PAGES.items() if (text := program(blocks))}


def variables(text):
    """The environment variables that a program sets in its first lines."""
    return tuple(re.findall(r'^os.environ\["(\w+)"\] = "(\w+)"', text, re.MULTILINE))


def imports(texts):
    """A program of what programs import; Dynamo is imported by the first optimizer of torch."""
    found = {"import torch._dynamo, torch.distributed.tensor": None}
    for text in texts:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found[ast.unparse(node)] = None
    # What is not there fails where it is used.
    return "".join(f"try:\n    {one}\nexcept ImportError:\n    pass\n" for one in found)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(script, folder)`: exit code and output of a program, as if in a fresh process.

    Programs that set the same variables are forks of one interpreter, which has them from its
    start: triton reads one of them when it is imported.
    """
    warm = {}
    with Programs() as programs:

        def interpreter(sets):
            if sets not in warm:
                file = tmp_path_factory.mktemp("warm") / "imports.py"
                file.write_text(imports(t for t in PROGRAMS.values() if variables(t) == sets))
                command = [sys.executable, "-W", "error", warm_interpreter.__file__, file]
                # One thread: for tensors of pages, several only wait for each other.
                environ = {**os.environ, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
                options = {"stdin": subprocess.PIPE, "stderr": None}
                warm[sets] = programs.start(*command, env=environ | dict(sets), **options)
            return warm[sets]

        def run(script, folder):
            printed, one = script.with_suffix(".txt"), interpreter(variables(script.read_text()))
            print(json.dumps([str(script), str(folder), str(printed)]), file=one.stdin, flush=True)
            return int(one.stdout.readline()), printed.read_text()

        yield run


@pytest.mark.parametrize("page", PROGRAMS)
def test_python_blocks_run_in_order_without_a_warning(page, run, tmp_path):
    script = tmp_path / (page.replace("/", "_").removesuffix(".md") + ".py")
    script.write_text(PROGRAMS[page])
    code, printed = run(script, tmp_path)
    assert code == 0, f"{page}, with its own line numbers:\n{printed}"


def test_a_program_that_fails_or_warns_says_so_and_the_next_one_runs(run, tmp_path):
    for name, text, words in (
        (
            "fails.py",
            "import sys\nsys.exit(__name__ + sys.argv[0])\n",
            f"__main__{tmp_path}/fails.py",
        ),
        ("warns.py", "import warnings\nwarnings.warn('old')\n", "UserWarning: old"),
    ):
        (tmp_path / name).write_text(text)
        code, printed = run(tmp_path / name, tmp_path)
        assert code == 1
        assert words in printed
    (tmp_path / "ends.py").write_text("import atexit\natexit.register(print, 'ended')\n")
    assert run(tmp_path / "ends.py", tmp_path) == (0, "ended\n")


def test_a_program_does_not_outlive_the_tests_that_asked_for_it(tmp_path):
    (imported := tmp_path / "imports.py").write_text("")
    endless, printed = tmp_path / "endless.py", tmp_path / "printed"
    os.mkfifo(printed)
    endless.write_text("import signal\nprint('runs', flush=True)\nsignal.pause()\n")
    with Programs() as programs:
        command = [sys.executable, warm_interpreter.__file__, imported]
        one = programs.start(*command, stdin=subprocess.PIPE, stderr=None)
        asked = json.dumps([str(endless), str(tmp_path), str(printed)])
        print(asked, file=one.stdin, flush=True)
        with printed.open() as told:
            assert told.readline() == "runs\n"
            # Its input ends, as it does when the process of the tests is killed.
            answers, _ = one.communicate()
            assert told.readline() == "", "the end of a file that the program had open"
    assert answers == f"{-signal.SIGKILL}\n"
    assert one.returncode == 0


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
        if block.language == "ini":
            configparser.RawConfigParser().read_string(block.text)
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))


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
        ("python3 tools/house.py", ""),
        ("python3 tools/horse.py", "there is no file tools/horse.py"),
        ("srun -n 2 bash -c 'RANK=$SLURM_PROCID exec pcomm doctor --json'", ""),
        ("srun bash -c 'exec pcomm doctor --jsno'", "no such option: --jsno"),
        ("frobnicate", "no check knows the command 'frobnicate'"),
    ],
)
def test_complaint_names_the_word_that_does_not_exist(command, wrong):
    assert [complaint(words) for words in commands(command)] == [wrong]


def test_commands_are_split_at_operators_and_joined_at_backslashes():
    block = "# a comment\n$ A=1 cd x && \\\n  pcomm doctor | tail -1\n"
    assert commands(block) == [["cd", "x"], ["pcomm", "doctor"], ["tail", "-1"]]
