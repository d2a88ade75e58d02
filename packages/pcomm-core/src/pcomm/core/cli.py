"""The `pcomm` command: finds the subcommand that was asked for and runs it.

The core owns the script, because two wheels cannot own one; other packages add subcommands
through entry points of the group `pcomm.commands`. Only the one that runs is imported, and by
`pcomm --help` all of them; their modules do not import torch. `pcomm bench` finds benchmarks
in the folders of a checkout, since they are no part of the wheels.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NoReturn, Protocol, runtime_checkable

from pcomm.core import __version__, environment
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError, near_misses
from pcomm.core.process import logs

__all__ = [
    "GROUP",
    "Command",
    "bench",
    "main",
    "what_to_install",
]


GROUP = "pcomm.commands"
_DOCTOR = EntryPoint("doctor", "pcomm.core.doctor.command:command", GROUP)
_BENCH = EntryPoint("bench", "pcomm.core.cli:bench", GROUP)
# The distribution of each command that may not be installed, for the error.
_HOMES = {
    **dict.fromkeys(("chat", "convert", "generate", "serve", "train"), "pcomm-integration"),
    "plan": "pcomm-ntp",
}
# Characters of what a command does, in a list of them.
_HELP_WIDTH = 80
# What pcomm-integration stands on.
_BELOW = ("pcomm-core", "pcomm-gdn-cp", "pcomm-fsdp", "pcomm-ntp", "pcomm-inference")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    Args:
        argv: Arguments without the name of the program; those of this process if absent.

    Returns:
        What the subcommand returns; 2 for a `PcommError` or a wrong option; 130 for Ctrl-C;
        141, as the shell says of SIGPIPE, where the reader of the output has ended, like `head`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Options before the subcommand are pcomm's own and take no value, so it is the first bare word.
    words = [index for index, word in enumerate(arguments) if not word.startswith("-")]
    split = words[0] if words else len(arguments)
    try:
        code = _run(arguments[:split], arguments[split:])
        # Here, where an error can still be told from the command's own.
        # Without a standard output there is none.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except PcommError as error:
        if "--debug" in arguments:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 141
    except SystemExit as stop:
        # argparse ends this way after --help (0) and after a wrong option (2).
        return stop.code if isinstance(stop.code, int) else 2


def _run(ours: Sequence[str], rest: Sequence[str]) -> int:
    commands = Subcommands.of(
        "pcomm", "command", entry_points(group=GROUP), own=(_BENCH, _DOCTOR), homes=_HOMES
    )
    is_asked = not rest or not {"-h", "--help"}.isdisjoint(ours)
    top = _top_parser(commands.described_lines() if is_asked else commands.lines())
    options = top.parse_args(ours)
    if not rest:
        top.print_help(sys.stderr)
        return 2
    # The doctor reports what is wrong with the variables, and so must not stop at it.
    if rest[0] != _DOCTOR.name:
        environment.check(os.environ)
        logs.configure(environment.log_level(), _rank(os.environ))
    command = commands.load(rest[0])
    parser = OptionParser(prog=f"pcomm {rest[0]}", description=command.help)
    add_debug(parser, default=options.debug)
    command.add_arguments(parser)
    arguments = parser.parse_args(rest[1:])
    return command.run(arguments)


def _top_parser(lines: Sequence[str]) -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pcomm",
        usage="pcomm [-h] [--version] [--debug] COMMAND ...",
        description="Communication for PyTorch: train, generate, measure, and look at the machine.",
        epilog="commands, and the package each is from:\n"
        + "\n".join(lines)
        + "\n\n`pcomm COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pcomm-core {__version__}")
    add_debug(parser, default=False)
    return parser


def _rank(environ: Mapping[str, str]) -> int:
    # Only for the log; what joins the job reads RANK strictly.
    text = environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _reader_is_gone() -> bool:
    """Whether the reader of the output is gone; the rest of it is then dropped."""
    if sys.stdout is None:
        return False
    # Asked of the system: without a buffer, nothing is left that a flush could fail with.
    asked = select.poll()
    asked.register(sys.stdout, 0)
    is_gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))
    if is_gone:
        # With one, the interpreter flushes once more at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return is_gone


@runtime_checkable
class Command(Protocol):
    """A subcommand or a benchmark: what an entry point of their groups names."""

    @property
    def name(self) -> str:
        """What the user types."""

    @property
    def help(self) -> str:
        """What it does, in one line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options on `parser`; `--debug` and `--help` are there already."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code; a `PcommError` becomes a message and exit code 2."""


@dataclass(frozen=True)
class Subcommands:
    """What is installed under one word, by name.

    Args:
        word: Words that the user types before the name: `pcomm`, `pcomm bench`.
        kind: Noun for one of the names in messages, in the singular: `command`.
        entries: Entry points by name.
        homes: Distribution of each name that may not be installed, for the error.
    """

    word: str
    kind: str
    entries: Mapping[str, EntryPoint]
    homes: Mapping[str, str]

    @classmethod
    def of(
        cls,
        word: str,
        kind: str,
        found: Iterable[EntryPoint],
        *,
        own: Iterable[EntryPoint] = (),
        homes: Mapping[str, str],
    ) -> Subcommands:
        """Those of `found`, and the core's own.

        Raises:
            ConfigError: Two packages bring different ones of one name.
        """
        entries = {entry.name: entry for entry in own}
        for entry in found:
            other = entries.setdefault(entry.name, entry)
            # One distribution can be found twice, when its source folder is on the path as well.
            if other.value != entry.value:
                raise ConfigError(
                    f"{word} {entry.name}",
                    found=f"{_distribution(other)} and {_distribution(entry)} both bring it",
                    why=f"One name can run one {kind}.",
                    fix="Uninstall one of the two packages.",
                )
        return cls(word, kind, entries, homes)

    def lines(self) -> list[str]:
        """One for each: its name, and the package that brings it."""
        return [f"  {name:<12} {_distribution(e)}" for name, e in sorted(self.entries.items())]

    def described_lines(self) -> list[str]:
        """One for each: its name, what it does, and its package; imports them all."""
        found = []
        for name, entry in sorted(self.entries.items()):
            try:
                help = self.load(name).help
            except PcommError:
                help = "cannot be loaded"
            what = textwrap.shorten(help, _HELP_WIDTH, placeholder=" ...")
            found.append(f"  {name:<9} {what}  ({_distribution(entry)})")
        return found

    def load(self, name: str) -> Command:
        """The one of this name; imports the package that brings it.

        Raises:
            ConfigError: There is none of this name.
            UnsupportedError: Its package is not installed, or cannot be imported; or what the
                entry point names is no `Command`.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise self._unknown(name)
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            home = _distribution(entry)
            raise UnsupportedError(
                f"{self.word} {name}",
                found=f"{type(error).__name__}: {error}",
                why=f"{home} brings this {self.kind} as {entry.value}, which cannot be loaded.",
                fix=f"Run `python3 -m pip install {what_to_install(home)}` again, or see the cause "
                "with --debug.",
            ) from error
        if not isinstance(command, Command):
            raise UnsupportedError(
                f"{self.word} {name}",
                found=f"{entry.value} is {command!r}",
                why=f"A {self.kind} has name, help, add_arguments(parser) and run(arguments).",
                fix=f"Tell the authors of {_distribution(entry)}; see pcomm.core.cli.Command.",
            )
        return command

    def _unknown(self, name: str) -> PcommError:
        if name in self.homes:
            return UnsupportedError(
                f"{self.word} {name}",
                found=f"{self.homes[name]} is not installed",
                why=f"That package brings the {self.kind}.",
                fix="In a checkout run `python3 -m pip install "
                f"{what_to_install(self.homes[name])}`.",
            )
        hint = "`pcomm --help`" if self.word == "pcomm" else f"`{self.word}`"
        return ConfigError(
            f"{self.word} {name}",
            found=f"no {self.kind} of that name",
            why=f"The {self.kind}s are those of the installed packages.",
            fix=f"{near_misses(name, {*self.entries, *self.homes})} {hint} lists them.",
        )


def _distribution(entry: EntryPoint) -> str:
    return "pcomm-core" if entry.dist is None else entry.dist.name


class OptionParser(argparse.ArgumentParser):
    """A parser whose error for a misspelt option names the nearest one."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2; see argparse."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in message.split() if message.startswith("unrecognized arguments") else ():
            near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


def add_debug(parser: argparse.ArgumentParser, *, default: bool) -> None:
    """Declare the option that every word has."""
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def what_to_install(distribution: str, extra: str = "") -> str:
    """The words for pip that bring a distribution: folders of a checkout for those of pcomm.

    They are on no package index, where a stranger could register such a name. So are those that it
    needs, which therefore come with it.

    Args:
        distribution: Its name, such as `pcomm-fsdp` or `numpy`.
        extra: An extra of it, such as `serve`.
    """
    if not distribution.startswith("pcomm-"):
        return distribution
    is_whole = distribution == "pcomm-integration"
    own = "./integration" if is_whole else f"./packages/{distribution}"
    needed = _BELOW if is_whole else ("pcomm-core",)
    words = [f"./packages/{name}" for name in needed if name != distribution]
    return " ".join([*words, f"'{own}[{extra}]'" if extra else own])


class _Bench:
    """`pcomm bench`; see `Command`."""

    name = "bench"
    help = "measure what the packages of a checkout do on this machine"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the name of a benchmark; its options are its own."""
        parser.usage = "pcomm bench [-h] [--debug] [NAME ...]"
        parser.epilog = "`pcomm bench` lists them, `pcomm bench NAME --help` the options of one."
        parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark to run")
        parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the names of all benchmarks, or run the one that was asked for."""
        word = "pcomm bench"
        found = Subcommands.of(word, "benchmark", _of_checkout(), homes={})
        if not found.entries:
            raise UnsupportedError(
                word,
                found=f"no benchmarks beside {Path(__file__).parent}",
                why="They are part of a checkout of pcomm, and of no wheel.",
                fix="In a checkout run `python3 -m pip install -e ./packages/pcomm-core`, and -e "
                "for the packages to measure.",
            )
        if arguments.name is None:
            print("\n".join(["benchmarks of this checkout:", *map("  {}".format, found.entries)]))
            return 0
        benchmark = found.load(arguments.name)
        parser = OptionParser(prog=f"{word} {arguments.name}", description=benchmark.help)
        add_debug(parser, default=arguments.debug)
        benchmark.add_arguments(parser)
        return benchmark.run(parser.parse_args(arguments.options))


def _of_checkout() -> list[EntryPoint]:
    """The benchmarks beside the sources that this module is imported from; none in a wheel."""
    above = Path(__file__).parents
    if len(above) < 6:
        return []
    root = above[5]
    places = [*root.glob("packages/*/benchmarks"), *root.glob("integration/benchmarks")]
    # Ranks import their tasks by name, from the path that they take over.
    sys.path += [str(place) for place in places if str(place) not in sys.path]
    modules = sorted(path.parent.name for at in places for path in at.glob("*_bench/command.py"))
    names = {module: module.removesuffix("_bench").replace("_", "-") for module in modules}
    return [EntryPoint(names[one], f"{one}.command:command", "benchmarks") for one in modules]


bench = _Bench()
