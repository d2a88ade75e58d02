"""`pcomm plan`: what a job does after failures, and what that costs, before it happens.

Other packages add modes to it through entry points of the group `pcomm.plan`; the name of one is
the option, without dashes, that chooses it.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

from pcomm.core.cli import Command
from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.topology import Topology
from pcomm.ntp.planning.degrees import Policy, Rounding
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.planning.units import KINDS, Units

__all__ = [
    "PlanCommand",
    "add_cluster_options",
    "add_units_options",
    "command",
    "failures_of",
    "speeds_of",
    "text_of",
    "topology_of",
    "units_of_options",
]

_MODES = "pcomm.plan"


class PlanCommand:
    """Plans a job with failed and slow ranks; starts nothing, and needs no torch."""

    name = "plan"
    help = (
        "Plan a job before it runs: the fastest layout of a training run (--model), or its "
        "tensor-parallel degrees after failures (--axes)."
    )

    @cached_property
    def modes(self) -> dict[str, Command]:
        """What other packages plan, by the option that chooses it."""
        return {entry.name: entry.load() for entry in entry_points(group=_MODES)}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options for the ranks, for the units, for what is printed, and those of the modes."""
        for mode in self.modes.values():
            mode.add_arguments(parser)
        if not self.modes:
            parser.epilog = "`--model`, for the fastest layout of a run, needs pcomm-integration."
        failures = parser.add_argument_group("--axes: degrees after failures, and their cost")
        add_cluster_options(failures)
        failures.add_argument(
            "--policy",
            choices=get_args(Rounding),
            default="max",
            help="use every surviving rank, or the fewest that are as fast (%(default)s)",
        )
        add_units_options(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the plan and its cost."""
        asked = [option for option in self.modes if getattr(arguments, option) is not None]
        asked += ["axes"] if arguments.axes is not None else []
        if len(asked) != 1:
            options = " or ".join(f"--{option}" for option in (*self.modes, "axes"))
            raise ConfigError(
                "pcomm plan",
                found=" and ".join(f"--{option}" for option in asked) or f"no {options}",
                why="One of them says what is planned: a training run, or ranks that have failed.",
                fix=f"Give one of {options}; `pcomm plan --help` lists what goes with each.",
            )
        if asked != ["axes"]:
            return self.modes[asked[0]].run(arguments)
        topology = topology_of(arguments)
        made = plan(
            topology,
            failures_of(arguments),
            units_of_options(arguments),
            Policy(arguments.policy),
            speeds=speeds_of(arguments.speeds, topology),
        )
        if arguments.json:
            print(json.dumps(_document(made), default=_number))
            return 0
        print(made.explain())
        cost = made.cost()
        idle = f", {len(made.idle_ranks)} surviving ranks idle" if made.idle_ranks else ""
        print(f"at most {cost.most_segments} groups sum the gradients of a parameter{idle}")
        return 0


def _document(made: NtpPlan) -> dict[str, Any]:
    """The plan, which `NtpPlan.from_json` reads again, and what was derived from it."""
    return {
        "plan": json.loads(made.to_json()),
        "degrees": made.degrees,
        "idle_ranks": made.idle_ranks,
        "replica_speeds": made.speeds,
        "cost": asdict(made.cost()),
        "swaps": [str(swap) for swap in made.packing.swaps],
    }


def _number(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{type(value).__name__} in a plan")


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """`--axes`, `--order`, `--failures`, `--failures-file`, `--speeds`."""
    parser.add_argument(
        "--axes",
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


def add_units_options(parser: argparse.ArgumentParser) -> None:
    """`--units`, or `--heads`, `--kv-heads`, `--head-dim`, `--mlp`, `--vocabulary`."""
    parser.add_argument(
        "--units",
        type=Path,
        metavar="FILE",
        help="JSON of the units of parameters, such as "
        '{"*.qkv.weight": {"kind": "gqa", "q": 32, "kv": 8, "dim": 128}}',
    )
    sizes = parser.add_argument_group("sizes of a model, instead of --units")
    sizes.add_argument("--heads", type=int, metavar="N", help="number of query heads")
    sizes.add_argument(
        "--kv-heads", type=int, metavar="N", help="number of key heads; without it --heads"
    )
    sizes.add_argument(
        "--head-dim", type=int, default=128, metavar="N", help="rows of a head (%(default)s)"
    )
    sizes.add_argument("--mlp", type=int, metavar="N", help="columns of the gated MLP")
    sizes.add_argument("--vocabulary", type=int, metavar="N", help="rows of the vocabulary")


def units_of_options(arguments: argparse.Namespace) -> dict[str, Units]:
    """The units that the options name.

    Attention and MLP are weighted by their multiplications for a token, where the heads together
    are as wide as the model. The vocabulary, which is there once and not in each layer, has no
    weight.

    Raises:
        ConfigError: No units, both a file and sizes, or sizes that no model has.
    """
    sizes = {name: getattr(arguments, name) for name in ("heads", "kv_heads", "mlp", "vocabulary")}
    given = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size is not None]
    if arguments.units is not None and given:
        raise ConfigError(
            f"pcomm plan --units {arguments.units}",
            found=f"{' '.join(given)} as well",
            why="The file describes all units, and the sizes would describe them again.",
            fix="Leave one of the two away.",
        )
    if arguments.units is not None:
        return units_from_json(text_of(arguments.units, "--units", "the units of parameters"))
    if given in ([], ["--kv-heads"]):
        raise ConfigError(
            "pcomm plan: units",
            found="neither --units nor --heads, --mlp or --vocabulary",
            why="How a cut comes out depends on what stays whole, such as heads.",
            fix="Give the sizes of the model, such as --heads 32 --kv-heads 8 --mlp 11008.",
        )
    heads, mlp = sizes["heads"] or 0, sizes["mlp"] or 0
    key_heads = heads if sizes["kv_heads"] is None else sizes["kv_heads"]
    dim, found = arguments.head_dim, {}
    if sizes["heads"] is not None:
        # Queries and the output are as wide as all heads, keys and values as the key heads.
        work = max(0, 2 * (heads + key_heads) * dim)
        found["attention"] = Units.gqa(q=heads, kv=key_heads, dim=dim, work=work)
    if sizes["mlp"] is not None:
        found["mlp"] = Units.gated(mlp, work=max(0, 3 * mlp))
    if sizes["vocabulary"] is not None:
        found["vocabulary"] = Units.vocab(sizes["vocabulary"])
    return found


def units_from_json(text: str) -> dict[str, Units]:
    """Units by name or pattern, from an object of objects.

    Each inner object has a `kind`, which is a class method of `Units`, and its arguments.

    Raises:
        ConfigError: Text of another form, or sizes that no parameter has.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _not_units(f"no JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise _not_units(f"{found!r} at the top")
    return {name: _one(name, entry) for name, entry in found.items()}


def _one(name: str, entry: Any) -> Units:
    if not isinstance(entry, dict):
        raise _not_units(f"{entry!r} for {name!r}")
    given = dict(entry)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"units of {name!r}: kind {kind!r}",
            found=f"kinds {', '.join(KINDS)}",
            why="The kind says which positions belong together.",
            fix=near_misses(str(kind), KINDS),
        )
    make: Callable[..., Units] = getattr(Units, kind)
    wanted = inspect.signature(make).parameters
    if unknown := sorted(set(given) - set(wanted)):
        raise ConfigError(
            f"units of {name!r}: {unknown[0]!r}",
            found=f"{kind} has {', '.join(wanted) or 'no arguments'}",
            why="The arguments are those of the class method of Units.",
            fix=near_misses(unknown[0], wanted),
        )
    missing = [n for n, own in wanted.items() if own.default is own.empty and n not in given]
    wrong = [n for n, value in given.items() if not _is_size(value, is_list=n == "sections")]
    if missing or wrong:
        what = f"no {missing[0]!r}" if missing else f"{wrong[0]}={given[wrong[0]]!r}"
        raise ConfigError(
            f"units of {name!r}: {kind}",
            found=what,
            why="Sizes are whole numbers, sections a list of them, and none but work and block "
            "may be left away.",
            fix=f"Give {(missing or wrong)[0]!r} as a whole number, or a list of them.",
        )
    return make(**given)


def _is_size(value: object, *, is_list: bool) -> bool:
    if is_list:
        return isinstance(value, list) and all(_is_size(one, is_list=False) for one in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _not_units(found: str) -> ConfigError:
    return ConfigError(
        "pcomm plan --units",
        found=found,
        why="Units are an object whose keys are names of parameters, or patterns.",
        fix='Write them like {"*.fc1.weight": {"kind": "gated", "columns": 11008}}.',
    )


def text_of(path: Path, option: str, content: str) -> str:
    """The text of a file.

    Args:
        path: Path of the file.
        option: Name of the option with its dashes, for the error.
        content: Content of the file, for the error.

    Raises:
        ConfigError: The file cannot be read, or is no text.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pcomm plan {option} {path}",
            found=f"{type(error).__name__}: {error}",
            why=f"The file has {content}.",
            fix="Give the path of a JSON file that can be read.",
        ) from error


command = PlanCommand()
