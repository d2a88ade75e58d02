"""`pcomm bench`: lists the benchmarks of the installed packages, or runs one.

A package brings one as an entry point of the group `pcomm.benchmarks` that names a
`pcomm.core.command.subcommands.Command`.
"""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points

from pcomm.core.command.subcommands import OptionParser, Subcommands, add_debug

__all__ = ["GROUP", "BenchCommand", "command"]

GROUP = "pcomm.benchmarks"

_HOMES = {
    "fsdp": "pcomm-fsdp",
    "gdn-cp": "pcomm-gdn-cp",
    "inference": "pcomm-inference",
    "ntp": "pcomm-ntp",
    "nvls": "pcomm-nvls",
    "serving": "pcomm-integration",
}


class BenchCommand:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "bench"
    help = "measure what the installed packages do on this machine"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the name of a benchmark; its options are its own."""
        parser.usage = "pcomm bench [-h] [--debug] [NAME ...]"
        parser.epilog = "`pcomm bench` lists them, `pcomm bench NAME --help` the options of one."
        parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark to run")
        parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the names of all benchmarks, or run the one that was asked for."""
        word = "pcomm bench"
        found = Subcommands.of(word, "benchmark", entry_points(group=GROUP), homes=_HOMES)
        if arguments.name is None:
            lines = found.lines() or ["  none: no installed package brings any"]
            print("\n".join(["benchmarks, and the package each is from:", *lines]))
            return 0
        benchmark = found.load(arguments.name)
        parser = OptionParser(prog=f"{word} {arguments.name}", description=benchmark.help)
        add_debug(parser, default=arguments.debug)
        benchmark.add_arguments(parser)
        return benchmark.run(parser.parse_args(arguments.options))


command = BenchCommand()
