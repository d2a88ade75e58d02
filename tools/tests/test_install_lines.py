"""Checks every `pip install` of the pages, and has pip carry out the local ones as a dry run."""

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from unittest import mock

import pytest

from install_lines import install_complaint, install_lines, split_extras
from pcomm.core.cli import what_to_install
from repository import PACKAGES, ROOT, pages

LINES = {
    path.relative_to(ROOT).as_posix(): install_lines(path.read_text())
    for path in pages()
    if "pip install" in path.read_text()
}


@pytest.mark.parametrize("page", LINES)
def test_install_lines_name_what_is_meant(page):
    found = {" ".join(words): install_complaint(words) for words in LINES[page]}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def test_the_pages_with_install_lines_are_found():
    assert {"README.md", "CONTRIBUTING.md", "integration/README.md"} <= set(LINES)
    assert all(LINES.values())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_readme_says_what_torch_comes_with_the_package(package):
    """Gigabytes of CUDA that nobody has asked for, in a version that no test has seen."""
    text = " ".join((package / "README.md").read_text().split())
    assert "a torch with CUDA" in text
    assert "`--constraint constraints.txt`" in text
    assert "PIP_EXTRA_INDEX_URL=" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("session", ["train", "tests"])
def test_readme_has_the_two_commands_and_ci_takes_the_second_from_there(session):
    """A README without the line once ended CI after a second, before any test."""
    command = f"python3 -m pip install nox && python3 -m nox -s {session}"
    assert (ROOT / "README.md").read_text().splitlines().count(command) == 1
    assert "grep --max-count=1 'nox -s tests' README.md" in (ROOT / ".ci" / "run").read_text()
    assert f"def {session}(session: nox.Session)" in (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize(
    ("distribution", "extra"),
    [
        *((f"pcomm-{name}", "") for name in ("core", "fsdp", "gdn-cp", "inference", "integration")),
        ("pcomm-integration", "serve"),
        ("pcomm-inference", "structured"),
    ],
)
def test_what_messages_propose_comes_from_the_checkout_alone(distribution, extra):
    """With all that it needs: pip would look for the rest on the index, or take a stranger's."""
    words = shlex.split(what_to_install(distribution, extra))
    assert words
    assert install_complaint(words) == ""


def test_the_noxfile_says_what_it_needs_on_an_older_python():
    """It is run as that Python would, up to the first thing that this one has and that has not."""
    text = compile((ROOT / "noxfile.py").read_text(), "noxfile.py", "exec")
    with mock.patch.object(sys, "version_info", (3, 10, 12)), pytest.raises(SystemExit) as stopped:
        exec(text, {"__file__": str(ROOT / "noxfile.py")})
    assert "this is Python 3.10.12" in str(stopped.value)
    assert "needs Python 3.11 or newer" in str(stopped.value)


SOURCES_ALONE = """
import importlib, importlib.metadata as metadata
installed = metadata.version
def version(name):
    if name.startswith("pcomm-"):
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
for name in ("core", "fsdp", "gdn_cp", "inference", "integration", "ntp", "nvls"):
    print(importlib.import_module(f"pcomm.{name}").__version__)
"""


def test_packages_can_be_imported_from_sources_that_are_not_installed():
    done = subprocess.run(
        [sys.executable, "-c", SOURCES_ALONE], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["0+source"] * 7, done.stderr


def test_local_install_lines_are_carried_out_by_pip(tmp_path):
    """In an environment without any of our packages: pip reads them and would install them.

    One command for the words of all lines; without an index, and without what they depend on,
    which takes minutes.
    """
    words = sorted({word for lines in LINES.values() for line in lines for word in line})
    local = [word for word in words if word.startswith("./")]
    assert {split_extras(word)[0] for word in local} >= {"./integration", "./packages/pcomm-core"}
    # One requirement for each folder, with the extras of all lines.
    folders: dict[str, set[str]] = {}
    for word in local:
        folder, extras = split_extras(word)
        folders.setdefault(folder, set()).update(extras)
    asked = [f"{f}[{','.join(sorted(e))}]" if e else f for f, e in folders.items()]
    command = [_python_with_tools(tmp_path), "-m", "pip", "install", "--dry-run", "--no-deps"]
    command += ["--no-index", "--no-build-isolation", "--disable-pip-version-check", *asked]
    # Nor do sources on a path of this process count.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "does not provide the extra" not in answer.stderr
    (last,) = [line for line in answer.stdout.splitlines() if line.startswith("Would install")]
    assert len(last.split()) == len(["Would", "install"]) + len(folders)


def _python_with_tools(folder: Path) -> Path:
    """A new environment that has pip and hatchling, by links to those of this one."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(source).iterdir():
            # Nothing of ours, and no torch: only what builds a package.
            if found.name.split("-")[0] in {*_TOOLS} and not (site / found.name).exists():
                (site / found.name).symlink_to(found)
    return folder / "venv" / "bin" / Path(sys.executable).name


_TOOLS = ("pip", "hatchling", "packaging", "pathspec", "pluggy", "trove_classifiers")


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("```bash\npython3 -m pip install nox && python3 -m nox\n```", [["nox"]]),
        ("Run `pip install './integration[parquet]'`.", [["./integration[parquet]"]]),
        ("    pip install ./a \\\n        ./b   # both", [["./a", "./b"]]),
        ("`pip install a`, then `pip3 install b | tail`", [["a"], ["b"]]),
        ("nothing to install", []),
    ],
)
def test_commands_are_found_in_blocks_and_in_lines(page, lines):
    assert install_lines(page) == lines


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("./packages/pcomm-core", ""),
        ("-e './packages/pcomm-core[test]' ./packages/pcomm-fsdp", ""),
        ("nox", ""),
        ("integration", "write ./integration: the index may have a package of that name"),
        ("integration[parquet]", "write ./integration[parquet]: the index may"),
        ("packages/pcomm-core", "write ./packages/pcomm-core"),
        ("./packages/pcomm-cor", "no such folder with a package: ./packages/pcomm-cor"),
        ("./packages/pcomm-core[tset]", "./packages/pcomm-core has no extra tset"),
        ("pcomm-core", "pcomm-core would come from the index"),
        ("nxo", "nxo would come from the index"),
        ("./packages/pcomm-fsdp", "needs pcomm-core, which would come from the index"),
        ("--index-url https://example.org nox", "no check knows the option --index-url"),
    ],
)
def test_a_complaint_names_what_would_go_astray(line, wrong):
    (words,) = install_lines(f"pip install {line}")
    complaint = install_complaint(words)
    assert wrong in complaint
    assert bool(wrong) == bool(complaint)
