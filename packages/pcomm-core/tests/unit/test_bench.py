"""`pcomm bench`: the list of benchmarks, and how the words after a name reach one."""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pcomm.core import cli
from pcomm.core.errors import ConfigError


class Counting:
    name = "counting"
    help = "counts to a number"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--up-to", type=int, default=1)

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.up_to < 0:
            raise ConfigError("counting", found="below zero", why="It ends.", fix="Go up.")
        print(*range(arguments.up_to))
        return 7


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout that `pcomm` runs from, with the benchmarks `counting`, `toy-cars`, `broken`."""
    module = ModuleType("fake_benchmarks")
    module.counting = Counting()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_benchmarks", module)
    place = Path("packages", "pcomm-core", "src", "pcomm", "core", "cli.py")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / place))
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = "from fake_benchmarks import counting as command\n"
    for folder, name, text in (
        ("packages/pcomm-toy", "toy_cars_bench", found),
        ("packages/pcomm-toy", "broken_bench", "import no_such_module_here\n"),
        ("integration", "counting_bench", found),
    ):
        bench = tmp_path / folder / "benchmarks" / name
        bench.mkdir(parents=True)
        (bench / "__init__.py").touch()
        (bench / "command.py").write_text(text)
    for name in ("PCOMM_LOG", "RANK"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("pcomm")
    handlers, level = list(logger.handlers), logger.level
    yield tmp_path
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("checkout")
def test_without_a_name_it_lists_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "  broken    cannot be loaded",
        "  counting  counts to a number",
        "  toy-cars  counts to a number",
    ]
    assert cli.main(["bench"]) == 0
    assert capsys.readouterr().out.splitlines() == ["benchmarks of this checkout:", *lines]
    assert cli.main(["bench", "--help"]) == 0
    assert "\n".join(lines) in capsys.readouterr().out


@pytest.mark.usefixtures("checkout")
def test_several_run_with_the_same_options_if_all_know_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "toy-cars", "counting", "--up-to", "2"]) == 7
    assert capsys.readouterr().out == "0 1\n0 1\n"
    for words in (["counting", "countin"], ["counting", "broken"], ["counting", "--quick"]):
        assert cli.main(["bench", *words]) == 2
        assert capsys.readouterr().out == "", "one ran before the words of all were read"


@pytest.mark.parametrize("words", [[], ["gdn-cp", "--quick"]])
@pytest.mark.parametrize("is_at_the_top", [False, True])
def test_a_wheel_has_no_benchmarks_and_says_so(
    words: list[str],
    is_at_the_top: bool,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.rmtree(checkout)
    if is_at_the_top:  # as `pip install --target /app` leaves it
        monkeypatch.setattr(cli, "__file__", "/app/pcomm/core/cli.py")
    assert cli.main(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert "They are part of a checkout of pcomm, and of no wheel." in told
    assert "pip install -e ./packages/pcomm-core" in told


@pytest.mark.usefixtures("checkout")
def test_the_words_after_the_name_are_the_benchmarks_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "counting", "--up-to", "3"]) == 7
    assert capsys.readouterr().out == "0 1 2\n"
    assert cli.main(["bench", "counting", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: pcomm bench counting" in shown
    assert "--up-to" in shown
    assert cli.main(["bench", "counting", "--down-to", "3"]) == 2
    assert "unrecognized arguments: --down-to 3" in capsys.readouterr().err


@pytest.mark.usefixtures("checkout")
def test_errors_are_messages_unless_they_are_debugged(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["counting", "--up-to", "-1"]
    assert cli.main(["bench", *line]) == 2
    assert capsys.readouterr().err == "ConfigError: counting: below zero\nIt ends.\nGo up.\n"
    for words in (["bench", *line, "--debug"], ["bench", "--debug", *line]):
        with pytest.raises(ConfigError, match="below zero"):
            cli.main(words)


@pytest.mark.usefixtures("checkout")
def test_unknown_names_and_broken_packages_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "countin"]) == 2
    error = capsys.readouterr().err
    assert "no benchmark of that name" in error
    assert "Did you mean 'counting'?" in error
    assert "`pcomm bench` lists them" in error
    assert cli.main(["bench", "broken"]) == 2
    assert "pcomm bench broken: ModuleNotFoundError" in capsys.readouterr().err


def test_the_list_needs_no_torch() -> None:
    program = """
import sys
from pcomm.core import cli
listed = 0 if cli._of_checkout() else 2
assert [cli.main(["bench"]), cli.main(["bench", "nothing-like-it"])] == [listed, 2]
assert "torch" not in sys.modules
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
