"""The `pcomm` command: finds the subcommand that was asked for and runs it.

The core owns the script, because two wheels cannot own one; other packages add subcommands
through entry points of the group `pcomm.commands`. Only the one that runs is imported, so
`pcomm --help` needs neither torch nor the packages that it lists.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from pcomm.core import __version__, env, logs
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError, near_misses

__all__ = ["GROUP", "Command", "main"]

GROUP = "pcomm.commands"

_DOCTOR = EntryPoint("doctor", "pcomm.core.doctor.command:command", GROUP)

# Who brings a command that is not installed, so that the error can say it.
_HOMES = {"generate": "pcomm-integration", "train": "pcomm-integration"}


@runtime_checkable
class Command(Protocol):
    """A subcommand; an entry point of the group `pcomm.commands` names an object of this kind."""

    @property
    def name(self) -> str:
        """What the user types after `pcomm`."""

    @property
    def help(self) -> str:
        """What it does, in one line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options on `parser`; `--debug` and `--help` are there already."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code; a `PcommError` becomes a message and exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    Args:
        argv: Arguments without the name of the program; those of this process if absent.

    Returns:
        What the subcommand returns; 2 for a `PcommError` or a wrong option; 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Options before the subcommand are pcomm's own and take no value, so it is the first bare word.
    words = [index for index, word in enumerate(arguments) if not word.startswith("-")]
    split = words[0] if words else len(arguments)
    try:
        return _run(arguments[:split], arguments[split:])
    except PcommError as error:
        if "--debug" in arguments:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        # argparse ends this way after --help (0) and after a wrong option (2).
        return stop.code if isinstance(stop.code, int) else 2


def _run(ours: Sequence[str], rest: Sequence[str]) -> int:
    commands = _commands(entry_points(group=GROUP))
    top = _top_parser(commands)
    options = top.parse_args(ours)
    if not rest:
        top.print_help(sys.stderr)
        return 2
    # The doctor reports what is wrong with the variables, and so must not stop at it.
    if rest[0] != _DOCTOR.name:
        env.check(os.environ)
        logs.configure(env.log_level(), _rank(os.environ))
    command = _load(rest[0], commands)
    parser = argparse.ArgumentParser(prog=f"pcomm {rest[0]}", description=command.help)
    _add_debug(parser, default=options.debug)
    command.add_arguments(parser)
    arguments = parser.parse_args(rest[1:])
    return command.run(arguments)


def _top_parser(commands: Mapping[str, EntryPoint]) -> argparse.ArgumentParser:
    lines = []
    for name, entry in sorted(commands.items()):
        lines.append(f"  {name:<12} {_distribution(entry)}")
    parser = argparse.ArgumentParser(
        prog="pcomm",
        usage="pcomm [-h] [--version] [--debug] COMMAND ...",
        description="Communication for PyTorch: train, generate, and look at the machine.",
        epilog="commands, and the package each is from:\n"
        + "\n".join(lines)
        + "\n\n`pcomm COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pcomm-core {__version__}")
    _add_debug(parser, default=False)
    return parser


def _add_debug(parser: argparse.ArgumentParser, *, default: bool) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def _commands(found: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    """Entry points by name.

    Raises:
        ConfigError: Two packages bring different commands of one name.
    """
    commands = {_DOCTOR.name: _DOCTOR}
    for entry in found:
        other = commands.setdefault(entry.name, entry)
        # One distribution can be found twice, when its source folder is on the path as well.
        if other.value != entry.value:
            raise ConfigError(
                f"pcomm {entry.name}",
                found=f"{_distribution(other)} and {_distribution(entry)} both bring it",
                why="One name can run one command.",
                fix="Uninstall one of the two packages.",
            )
    return commands


def _load(name: str, commands: Mapping[str, EntryPoint]) -> Command:
    entry = commands.get(name)
    if entry is None:
        raise _unknown(name, commands)
    try:
        command = entry.load()
    except (ImportError, AttributeError) as error:
        home = _distribution(entry)
        raise UnsupportedError(
            f"pcomm {name}",
            found=f"{type(error).__name__}: {error}",
            why=f"{home} brings this command as {entry.value}, which cannot be loaded.",
            fix=f"Run `python3 -m pip install {home}` again, or see the cause with --debug.",
        ) from error
    if not isinstance(command, Command):
        raise UnsupportedError(
            f"pcomm {name}",
            found=f"{entry.value} is {command!r}",
            why="A command has name, help, add_arguments(parser) and run(arguments).",
            fix=f"Tell the authors of {_distribution(entry)}; see pcomm.core.cli.Command.",
        )
    return command


def _unknown(name: str, commands: Mapping[str, EntryPoint]) -> PcommError:
    if name in _HOMES:
        return UnsupportedError(
            f"pcomm {name}",
            found=f"{_HOMES[name]} is not installed",
            why="That package brings the command.",
            fix=f"Run `python3 -m pip install {_HOMES[name]}`.",
        )
    return ConfigError(
        f"pcomm {name}",
        found="no command of that name",
        why="The commands are those of the installed packages.",
        fix=near_misses(name, {*commands, *_HOMES}) + " `pcomm --help` lists them.",
    )


def _distribution(entry: EntryPoint) -> str:
    return "pcomm-core" if entry.dist is None else entry.dist.name


def _rank(environ: Mapping[str, str]) -> int:
    # Only for the log; what joins the job reads RANK strictly.
    text = environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0
