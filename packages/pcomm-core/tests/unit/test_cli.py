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


def test_a_command_gets_its_arguments_and_decides_the_exit_code(
    installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    # A package that is found twice brings its command once.
    installed.append(EntryPoint("echo", "fake_commands:echo", cli.GROUP))
    assert cli.main(["echo", "hello"]) == 7
    assert capsys.readouterr().out == "hello\n"
    assert cli.main(["echo", "mistake"]) == 2
    assert capsys.readouterr() == ("", "ConfigError: echo: a mistake\nIt is one.\nMend it.\n")
    for line in (["--debug", "echo", "mistake"], ["echo", "--debug", "mistake"]):
        with pytest.raises(ConfigError, match="a mistake"):
            cli.main(line)
    # A bug is never turned into a message.
    with pytest.raises(ZeroDivisionError):
        cli.main(["echo", "bug"])
    assert cli.main(["echo", "interrupt"]) == 130


IN_A_CHECKOUT = "In a checkout run `python3 -m pip install ./packages/pcomm-core "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("docter", ["Did you mean 'doctor'?"]),
        ("train --config x.toml", [IN_A_CHECKOUT, "./integration`"]),
        *(
            (name, [f"pcomm {name}: pcomm-integration is not installed"])
            for name in ("chat", "convert", "generate", "serve", "train")
        ),
        ("plan", ["pcomm plan: pcomm-ntp is not installed"]),
        ("missing", ["UnsupportedError: pcomm missing: ModuleNotFoundError", "no_such_module"]),
        ("number", ["fake_commands:number is 3"]),
        ("doctor", ["both bring it"]),
        ("echo hello --loud", ["unrecognized arguments: --loud"]),
        ("--loud echo hello", ["unrecognized arguments: --loud"]),
        ("echo hello --debgu=1", ["unrecognized arguments: --debgu=1; did you mean --debug?"]),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_says_why(
    line: str, words: list[str], installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("missing", "no_such_module_here:command"),
        ("number", "fake_commands:number"),
        ("doctor", "fake_commands:echo"),
    ):
        if line == name:
            installed.append(EntryPoint(name, value, cli.GROUP))
    assert cli.main(line.split()) == 2
    told = capsys.readouterr().err
    assert [word for word in words if word not in told] == []


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
