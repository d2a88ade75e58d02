"""The `pcomm` command: finds the subcommand that was asked for and runs it.

The core owns the script, because two wheels cannot own one; other packages add subcommands
through entry points of the group `pcomm.commands`. Only the one that runs is imported; what
`pcomm --help` says of those that pcomm's own packages bring stands here, so that it is quick.
`pcomm bench` finds benchmarks in the folders of a checkout, since they are no part of the wheels.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import itertools
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

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
_STORE = EntryPoint("store", "pcomm.core.process.store_server:command", GROUP)
_BENCH = EntryPoint("bench", "pcomm.core.cli:bench", GROUP)
_WHOLE = "pcomm-integration"
# Commands as `pcomm --help` groups them: the distribution of each, and what it does.
_COMMANDS = {
    "train a model and use it": {
        "train": (_WHOLE, "train a language model on text files; resumes where it was stopped"),
        "plot": (_WHOLE, "draw the losses of runs in one picture, and say how they differ"),
        "generate": (_WHOLE, "continue a text with a trained model, or one of Hugging Face"),
        "chat": (_WHOLE, "talk with a model at this terminal"),
        "serve": (_WHOLE, "serve a model: OpenAI's API, and a page to chat in the browser"),
        "convert": (_WHOLE, "turn a trained model into a Hugging Face directory, or back"),
    },
    "before a long run": {
        "plan": ("pcomm-ntp", "show how ranks share a model, and what that costs"),
        "doctor": ("pcomm-core", "check this machine, and say how to mend what is missing"),
        "store": ("pcomm-core", "keep the store of a job that Slurm, Kubernetes or Ray starts"),
        "bench": ("pcomm-core", "measure the packages of a checkout on this machine"),
    },
}
# The distribution of each command that may not be installed, for the error.
_HOMES = {
    name: home
    for group in _COMMANDS.values()
    for name, (home, _) in group.items()
    if home != "pcomm-core"
}
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
    if argv is None:
        code = main(sys.argv[1:])
        _end_beside_threads(code)
        return code
    arguments = list(argv)
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
        logs.tell_error(error)
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


def _end_beside_threads(code: int) -> None:
    """End this process here, where threads may still be in torch's code for groups that were left.

    Python's own end would abort it: a thread that wants the interpreter then is ended in the middle
    of C++ code that cannot be left that way.
    """
    own = threading.current_thread()
    if any(one.name.startswith("pcomm ") for one in threading.enumerate() if one is not own):
        atexit._run_exitfuncs()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        os._exit(code)


def _run(ours: Sequence[str], rest: Sequence[str]) -> int:
    commands = Subcommands.of(
        "pcomm", "command", entry_points(group=GROUP), own=(_BENCH, _DOCTOR, _STORE), homes=_HOMES
    )
    is_asked = not rest or not {"-h", "--help"}.isdisjoint(ours)
    top = _top_parser(_overview(commands) if is_asked else "")
    options = top.parse_args(ours)
    if not rest:
        top.print_help(sys.stderr)
        return 2
    # The doctor reports what is wrong with the variables, and so must not stop at it.
    if rest[0] != _DOCTOR.name:
        environment.check(os.environ)
        logs.configure(
            environment.log_level(),
            _number("RANK", os.environ),
            size=_number("WORLD_SIZE", os.environ),
        )
    command = commands.load(rest[0])
    parser = OptionParser(prog=f"pcomm {rest[0]}", description=command.help)
    add_debug(parser, default=options.debug)
    command.add_arguments(parser)
    arguments = parser.parse_args(rest[1:])
    return command.run(arguments)


def _top_parser(overview: str) -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pcomm",
        usage="pcomm [-h] [--version] [--debug] COMMAND ...",
        description="Train language models on one or many processes, and use them.\n\n" + overview,
        epilog="`pcomm COMMAND --help` lists the options of a command, and their defaults.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pcomm-core {__version__}")
    add_debug(parser, default=False)
    return parser


def _overview(commands: Subcommands) -> str:
    """A line for each command, in groups; those of other packages come last, and are imported."""
    lines = []
    for title, group in _COMMANDS.items():
        lines.append(f"{title}:")
        for name, (home, what) in group.items():
            absent = "" if name in commands.entries else f"  ({home} is not installed)"
            lines.append(f"  {name:<10}{what}{absent}")
        lines.append("")
    others = commands.entries.keys() - {name for group in _COMMANDS.values() for name in group}
    if others:
        lines += ["of other packages:", *commands.described_lines(others)]
    return "\n".join(lines).rstrip()


def _number(name: str, environ: Mapping[str, str]) -> int:
    # Only for the log; what joins the job reads it strictly.
    text = environ.get(name, "0")
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

    def described_lines(self, names: Iterable[str] | None = None) -> list[str]:
        """One for each of `names`: the name, and what it does; imports them. All if absent."""
        found = []
        for name in sorted(self.entries if names is None else names):
            try:
                help = self.load(name).help
            except PcommError:
                help = "cannot be loaded"
            found.append(f"  {name:<9} {help}")
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
    """A parser that shows defaults, and whose error names the options nearest to misspelt ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _WithDefaults, **options})
        self._words: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]  # its overloads say less
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See argparse."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2; see argparse.

        Whatever is wrong may come of a misspelt name: an option that is required seems absent then.
        """
        known = [option for option in self._option_string_actions if option.startswith("--")]
        for word in self._words:
            name = word.partition("=")[0]
            if _OPTION.fullmatch(name) and not any(one.startswith(name) for one in known):
                near = _nearest(name.lstrip("-"), [option[2:] for option in known])
                message += f"; {name}: did you mean --{near}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options.\n")


def _nearest(word: str, known: Sequence[str]) -> str | None:
    """The one that `word` misspells: without their dashes, which any two options share.

    At a lower share of common letters a stranger is named, such as --help for --model.
    """
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.78)
    # Of short words a few letters are a large part: two that changed places, or more at the end.
    swapped = [one for one in known if sorted(one) == sorted(word)]
    longer = [one for one in known if len(one) > 2 and word.startswith(one)]
    return next(iter([*near, *swapped, *longer]), None)


# A word that is no option's value: not a negative number, nor a single letter.
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z_-]+")


class _WithDefaults(argparse.HelpFormatter):
    """Adds the default of an option to what is said of it, unless that says it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help or ""
        has_value = action.option_strings and action.nargs != 0
        is_known = action.default not in (None, argparse.SUPPRESS, "", [], ())
        if not has_value or not is_known or "default" in said:
            return said
        default = action.default
        shown = ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{said} (default: {shown.replace('%', '%%')})".lstrip()


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
        distribution: Name of the distribution, such as `pcomm-fsdp` or `numpy`.
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
        """Declare the names of benchmarks; their options are their own."""
        lines = _benchmarks().described_lines()
        parser.usage = "pcomm bench [-h] [--debug] [NAME ...] [--quick] [--plot DIR] ..."
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "\n".join(
            [
                "benchmarks of this checkout:" if lines else "There are benchmarks in a checkout.",
                *lines,
                "",
                "`pcomm bench NAME --help` lists the options of one. Those of several are given to",
                "each: `pcomm bench gdn-cp nvls --quick --plot pictures --csv rows.csv`.",
            ]
        )
        parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """List all benchmarks, or run those that were asked for, one after another."""
        found = _benchmarks()
        if not found.entries:
            raise UnsupportedError(
                found.word,
                found=f"no benchmarks beside {Path(__file__).parent}",
                why="They are part of a checkout of pcomm, and of no wheel.",
                fix="In a checkout run `python3 -m pip install -e ./packages/pcomm-core`, and -e "
                "for the packages to measure.",
            )
        words: list[str] = arguments.words
        names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        options = words[len(names) :]
        if not names:
            print("\n".join(["benchmarks of this checkout:", *found.described_lines()]))
            return 0
        # All options are read before the first one measures.
        asked = [self._asked(found, name, options, arguments.debug) for name in names]
        return max([benchmark.run(own) for benchmark, own in asked])

    def _asked(
        self, found: Subcommands, name: str, options: Sequence[str], debug: bool
    ) -> tuple[Command, argparse.Namespace]:
        """A benchmark and its options."""
        benchmark = found.load(name)
        parser = OptionParser(prog=f"{found.word} {name}", description=benchmark.help)
        add_debug(parser, default=debug)
        benchmark.add_arguments(parser)
        return benchmark, parser.parse_args(options)


def _benchmarks() -> Subcommands:
    return Subcommands.of("pcomm bench", "benchmark", _of_checkout(), homes={})


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
