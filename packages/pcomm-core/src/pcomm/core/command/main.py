"""The `pcomm` command: finds the subcommand that was asked for and runs it.

The core owns the script, because two wheels cannot own one; other packages add subcommands
through entry points of the group `pcomm.commands`. Only the one that runs is imported, and by
`pcomm --help` all of them; their modules do not import torch.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from pcomm.core import __version__
from pcomm.core.command.subcommands import OptionParser, Subcommands, add_debug
from pcomm.core.errors import PcommError
from pcomm.core.process import environment, logs

__all__ = ["GROUP", "main"]

GROUP = "pcomm.commands"

_DOCTOR = EntryPoint("doctor", "pcomm.core.doctor.command:command", GROUP)
_BENCH = EntryPoint("bench", "pcomm.core.command.bench.command:command", GROUP)

# The distribution of each command that may not be installed, for the error.
_HOMES = {
    **dict.fromkeys(("chat", "convert", "generate", "serve", "train"), "pcomm-integration"),
    "plan": "pcomm-ntp",
}


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
