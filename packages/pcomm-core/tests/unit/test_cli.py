"""The command line: finding, loading and running subcommands, and how errors end it."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints, entry_points
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
        (
            "echo hello --debgu=1",
            ["unrecognized arguments: --debgu=1; --debgu: did you mean --debug?"],
        ),
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


@pytest.mark.parametrize("name", ["pcomm freeing", "of somebody else"])
def test_a_process_ends_beside_threads_of_groups_that_were_left(name: str) -> None:
    """A thread that Python's own end meets in torch's code would abort the process."""
    program = f"""
import atexit, sys, threading
from pcomm.core import cli
class Late:
    def __del__(self):
        print("Python's own end")
late = Late()
def run(*_):
    threading.Thread(target=threading.Event().wait, name={name!r}, daemon=True).start()
    print("words")
    return 75
cli._run = run
atexit.register(print, "at exit")
sys.argv = ["pcomm", "echo"]
sys.exit(cli.main())
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    ours = name.startswith("pcomm")
    said = ["words", "at exit"] if ours else ["words", "at exit", "Python's own end"]
    assert (finished.returncode, finished.stdout.splitlines()) == (75, said)
    assert finished.stderr == ""


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
    assert capsys.readouterr().err.endswith(" WARNING rank 3 pcomm.core.x: loud\n")


@pytest.mark.usefixtures("installed")
def test_help_lists_the_commands_and_which_are_not_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    (doctor,) = (line for line in shown.splitlines() if line.startswith("  doctor "))
    assert "pcomm-core" not in doctor
    assert "  echo      prints a word" in shown
    assert "(pcomm-ntp is not installed)" in shown
    assert "..." not in shown.replace("COMMAND ...", "")
    assert max(len(line.partition("  (")[0]) for line in shown.splitlines()) <= 80
    assert cli.main([]) == 2
    assert "  echo      prints a word" in capsys.readouterr().err
    assert cli.main(["echo", "--help"]) == 0
    assert "usage: pcomm echo" in capsys.readouterr().out


def test_what_help_says_of_pcomms_own_commands_is_of_those_that_are_there() -> None:
    listed = {name: home for group in cli._COMMANDS.values() for name, (home, _) in group.items()}
    for entry in entry_points(group=cli.GROUP):
        if entry.dist is not None and entry.dist.name.startswith("pcomm-"):
            assert listed[entry.name] == entry.dist.name


def test_an_option_shows_its_default_once_and_a_misspelt_one_is_named_beside_what_it_hides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = cli.OptionParser(prog="echo")
    parser.add_argument("--times", type=int, default=3, help="how often")
    parser.add_argument("--lengths", default=(1, 2), help="of each")
    parser.add_argument("--share", default="5%", help="of all")
    parser.add_argument("--word", default="a", help="what; default: the first letter")
    parser.add_argument("--other", help="another one")
    parser.add_argument("--loud", action="store_true", help="in capitals")
    parser.add_argument("--config", required=True, help="file")
    shown = " ".join(parser.format_help().split())
    for words in (
        "--times TIMES how often (default: 3) --lengths LENGTHS of each (default: 1,2)",
        "--share SHARE of all (default: 5%) --word WORD what; default: the first letter --other",
        "--other OTHER another one --loud in capitals --config CONFIG file",
    ):
        assert words in shown
    for line in ("--confg x", "-config x", "--confg=x", "--confg x --tims=-3"):
        with pytest.raises(SystemExit):
            parser.parse_args(line.split())
        told = capsys.readouterr().err
        assert f"{line.split()[0].partition('=')[0]}: did you mean --config?" in told
        assert "`echo --help` lists the options." in told
        assert ("--tims: did you mean --times?" in told) == ("tims" in line)
    assert parser.parse_args(["--conf", "x", "--times", "-2"]).times == -2


@pytest.mark.parametrize(
    ("word", "near"),
    [("--tiems", "--times"), ("--output", "--out"), ("--model", None), ("--lr", None)],
)
def test_only_an_option_that_may_be_meant_is_named(
    capsys: pytest.CaptureFixture[str], word: str, near: str | None
) -> None:
    parser = cli.OptionParser(prog="echo")
    parser.add_argument("--times")
    parser.add_argument("--out")
    parser.add_argument("--cluster")
    with pytest.raises(SystemExit):
        parser.parse_args([word, "x"])
    told = capsys.readouterr().err
    assert ("did you mean" in told) == (near is not None)
    assert near is None or f"{word}: did you mean {near}?" in told


def test_help_and_the_errors_of_a_command_line_need_no_torch() -> None:
    program = """
import sys
from pcomm.core import cli
assert cli.main(["--help"]) == 0
assert not any(name.startswith(("pcomm.integration", "pcomm.ntp")) for name in sys.modules)
codes = [cli.main(["--help"]), cli.main(["doctor", "--help"]), cli.main(["docter"])]
assert codes == [0, 0, 2], codes
assert "torch" not in sys.modules
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
