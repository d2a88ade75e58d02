"""The command line: finding, loading and running subcommands, and how errors end it."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from pcomm.core import cli
from pcomm.core.errors import ConfigError


class Echo:
    name = "echo"
    help = "prints a word"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("word")

    def run(self, arguments: argparse.Namespace) -> int:
        match arguments.word:
            case "mistake":
                raise ConfigError("echo", found="a mistake", why="It is one.", fix="Mend it.")
            case "interrupt":
                raise KeyboardInterrupt
            case "bug":
                raise ZeroDivisionError
        print(arguments.word)
        return 7


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are installed: `echo`, and what a test appends."""
    module = ModuleType("fake_commands")
    module.echo = Echo()  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_commands", module)
    found = [EntryPoint("echo", "fake_commands:echo", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints(found).select(group=group))
    for name in ("PCOMM_LOG", "RANK"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("pcomm")
    handlers, level = list(logger.handlers), logger.level
    yield found
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("installed")
def test_a_command_gets_its_arguments_and_decides_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["echo", "hello"]) == 7
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.usefixtures("installed")
def test_a_pcomm_error_is_a_message_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["echo", "mistake"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "ConfigError: echo: a mistake\nIt is one.\nMend it.\n"
    assert captured.out == ""


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("line", [["--debug", "echo", "mistake"], ["echo", "--debug", "mistake"]])
def test_debug_shows_the_traceback(line: list[str]) -> None:
    with pytest.raises(ConfigError, match="a mistake"):
        cli.main(line)


@pytest.mark.usefixtures("installed")
def test_a_bug_is_never_turned_into_a_message() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.main(["echo", "bug"])


@pytest.mark.usefixtures("installed")
def test_interrupt_ends_with_130() -> None:
    assert cli.main(["echo", "interrupt"]) == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 100_000], ids=["at the end", "within the command"])
def test_a_reader_that_has_ended_is_no_traceback(count: int, unbuffered: str) -> None:
    program = f"""
import sys
from pcomm.core import cli
cli._run = lambda *_: [print("words") for _ in range({count})] and 0
sys.exit(cli.main(["echo"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        finished = subprocess.run(
            [sys.executable, "-c", program],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert finished.stderr == ""
    assert finished.returncode == 141


def test_a_broken_pipe_of_the_command_itself_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_run", run)
    with open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            cli.main(["echo", "hello"])


@pytest.mark.usefixtures("installed")
def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    assert "Did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["train", "generate"])
def test_a_command_that_is_not_installed_names_its_package(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--config", "x.toml"]) == 2
    told = capsys.readouterr().err
    assert "In a checkout run `python3 -m pip install ./packages/pcomm-core " in told
    assert "./integration`" in told


def test_a_command_that_cannot_be_imported_says_what_is_missing(
    installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(EntryPoint("train", "no_such_module_here:command", cli.GROUP))
    assert cli.main(["train"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("UnsupportedError: pcomm train: ModuleNotFoundError")
    assert "no_such_module_here" in error


def test_an_object_that_is_no_command_is_refused(
    installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(EntryPoint("number", "fake_commands:number", cli.GROUP))
    assert cli.main(["number"]) == 2
    assert "fake_commands:number is 3" in capsys.readouterr().err


def test_two_packages_cannot_bring_one_name(
    installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(EntryPoint("doctor", "fake_commands:echo", cli.GROUP))
    assert cli.main(["doctor"]) == 2
    assert "both bring it" in capsys.readouterr().err


def test_a_package_that_is_found_twice_brings_its_command_once(
    installed: list[EntryPoint],
) -> None:
    installed.append(EntryPoint("echo", "fake_commands:echo", cli.GROUP))
    assert cli.main(["echo", "hello"]) == 7


@pytest.mark.usefixtures("installed")
def test_a_misspelt_variable_stops_every_command_but_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCOMM_TIMOUT_S", "5")
    assert cli.main(["echo", "hello"]) == 2
    captured = capsys.readouterr()
    assert "Did you mean 'PCOMM_TIMEOUT_S'" in captured.err
    assert captured.out == ""
    assert cli.main(["doctor", "--help"]) == 0


@pytest.mark.usefixtures("installed")
def test_logging_takes_the_level_and_the_rank_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCOMM_LOG", "warning")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["echo", "hello"]) == 7
    logging.getLogger("pcomm.core.x").info("quiet")
    logging.getLogger("pcomm.core.x").warning("loud")
    assert capsys.readouterr().err == "WARNING rank 3 pcomm.core.x: loud\n"


@pytest.mark.usefixtures("installed")
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "  doctor " in shown
    assert "  echo      prints a word  (" in shown
    assert cli.main([]) == 2
    assert "  echo      prints a word  (" in capsys.readouterr().err
    assert cli.main(["echo", "--help"]) == 0
    assert "usage: pcomm echo" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_wrong_option_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "hello", "--loud"]) == 2
    assert cli.main(["--loud", "echo", "hello"]) == 2
    assert "unrecognized arguments: --loud" in capsys.readouterr().err
    assert cli.main(["echo", "hello", "--debgu=1"]) == 2
    assert "unrecognized arguments: --debgu=1; did you mean --debug?" in capsys.readouterr().err


def test_help_and_the_errors_of_a_command_line_need_no_torch() -> None:
    program = """
import sys
from pcomm.core import cli
codes = [cli.main(["--help"]), cli.main(["doctor", "--help"]), cli.main(["docter"])]
assert codes == [0, 0, 2], codes
assert "torch" not in sys.modules
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "home"),
    [
        *(
            (name, "pcomm-integration")
            for name in ("chat", "convert", "generate", "serve", "train")
        ),
        ("plan", "pcomm-ntp"),
    ],
)
def test_a_command_of_a_package_that_is_absent_names_the_package(
    name: str, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name]) == 2
    assert f"pcomm {name}: {home} is not installed" in capsys.readouterr().err
