"""Words after `pcomm`, and after `pcomm bench`: found through entry points, loaded when they run.

Packages add them in their metadata. Only the one that was asked for is imported, so listing them
needs neither torch nor the packages that bring them.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import NoReturn, Protocol, runtime_checkable

from pcomm.core.command.checkout import what_to_install
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError, near_misses

__all__ = ["Command", "OptionParser", "Subcommands", "add_debug"]

# Characters of what a command does, in a list of them.
_HELP_WIDTH = 80


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


class OptionParser(argparse.ArgumentParser):
    """A parser whose error for a misspelt option names the nearest one."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2; see argparse."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in message.split() if message.startswith("unrecognized arguments") else ():
            near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


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
                fix=f"Tell the authors of {_distribution(entry)}; "
                "see pcomm.core.command.subcommands.Command.",
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


def add_debug(parser: argparse.ArgumentParser, *, default: bool) -> None:
    """Declare the option that every word has."""
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def _distribution(entry: EntryPoint) -> str:
    return "pcomm-core" if entry.dist is None else entry.dist.name
