"""The ranks that a command is about: axes, failed ranks, and slow ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.core.topology import Topology
from pcomm.ntp.commands.option_files import text_of
from pcomm.ntp.planning.failures import Failures

__all__ = ["add_cluster_options", "failures_of", "speeds_of", "topology_of"]


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """`--axes`, `--order`, `--failures`, `--failures-file`, `--speeds`."""
    parser.add_argument(
        "--axes",
        required=True,
        metavar="AXIS=SIZE,...",
        help="sizes of the axes, such as pp=2,dp=16,tp=8; the last one varies fastest",
    )
    parser.add_argument(
        "--order", metavar="AXIS,...", help="the axes, that of neighbouring ranks first"
    )
    parser.add_argument(
        "--failures",
        nargs="+",
        action="extend",
        default=[],
        metavar="RANK",
        help='failed ranks by coordinates, such as "dp=3,tp=5", or by number',
    )
    parser.add_argument(
        "--failures-file",
        type=Path,
        metavar="FILE",
        help='a JSON list of failed ranks, such as [17, "dp=3,tp=5"]',
    )
    parser.add_argument(
        "--speeds",
        nargs="+",
        action="extend",
        default=[],
        metavar="RANK:SPEED",
        help='slow ranks with their speed, that of a healthy one being 1: "dp=1,tp=2:0.5"',
    )


def topology_of(arguments: argparse.Namespace) -> Topology:
    """The ranks of `--axes`, in `--order`.

    Raises:
        ConfigError: Text that is not a list of `axis=size`.
        TopologyError: Sizes or an order that no topology has.
    """
    axes: dict[str, int] = {}
    for item in arguments.axes.split(","):
        axis, equals, size = (word.strip() for word in item.partition("="))
        if not axis or not equals or not (size.isascii() and size.isdigit()) or axis in axes:
            raise ConfigError(
                f"pcomm plan --axes {arguments.axes}",
                found=f"the item {item.strip()!r}",
                why="Axes are axis=size, each once, joined by commas.",
                fix="Write them like --axes pp=2,dp=16,tp=8.",
            )
        axes[axis] = int(size)
    order = arguments.order.split(",") if arguments.order else ()
    return Topology(axes, [axis.strip() for axis in order])


def failures_of(arguments: argparse.Namespace) -> Failures:
    """The failed ranks of `--failures` and `--failures-file` together.

    Raises:
        ConfigError: Text of another form, or a file that cannot be read.
    """
    named = Failures.parse(*arguments.failures)
    path = arguments.failures_file
    if path is None:
        return named
    more = Failures.from_json(text_of(path, "--failures-file", "the list of failed ranks"))
    return Failures(named.coords + more.coords, named.global_ranks + more.global_ranks)


def speeds_of(texts: Sequence[str], topology: Topology) -> dict[int, float]:
    """The speed of each rank that `--speeds` names.

    Raises:
        ConfigError: Text that is not `RANK:SPEED`, or two speeds of one rank.
        TopologyError: A rank that the topology does not have.
    """
    found: dict[int, float] = {}
    for text in texts:
        rank_text, colon, speed_text = text.rpartition(":")
        if not colon:
            raise _not_a_speed(text, "no colon")
        try:
            speed = float(speed_text)
        except ValueError:
            raise _not_a_speed(text, f"the speed {speed_text!r}") from None
        (rank,) = Failures.parse(rank_text).ranks(topology)
        if rank in found and found[rank] != speed:
            raise _not_a_speed(text, f"rank {rank} with speed {found[rank]} before")
        found[rank] = speed
    return found


def _not_a_speed(text: str, found: str) -> ConfigError:
    return ConfigError(
        f"pcomm plan --speeds {text}",
        found=found,
        why="A slow rank is named once, with a number above 0 and at most 1 behind a colon.",
        fix="Write it like --speeds dp=1,tp=2:0.5, or 17:0.5 for global rank 17.",
    )
