"""`pcomm bench fsdp`: sharded training over rate-limited links, next to torch FSDP2.

Ranks are processes of this machine, each in a network namespace of its own, so it needs root on
Linux. Gradients are compared with those of one process before anything is timed, and in every step
that is. Only ratios of one run mean much.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pcomm.core.command.bench.options import add_numbers, add_outputs, check_can_plot, numbers
from pcomm.core.command.bench.results import write_results
from pcomm.core.errors import ConfigError
from pcomm.fsdp.bench.forms import FORMS
from pcomm.fsdp.bench.settings import MODELS, Link, Settings

if TYPE_CHECKING:
    from pcomm.fsdp.bench.measure import Found

__all__ = ["FsdpBenchmark", "command", "settings_of"]

_DEFAULT = Settings()
_QUICK = Settings(ranks=(2,), links=(Link(2000.0, 4),), rounds=3, alone_rounds=3, is_small=True)


class FsdpBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "fsdp"
    help = "time sharded training over rate-limited links, next to torch FSDP2 (needs root)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add_numbers(parser, "--ranks", "data-parallel sizes", _DEFAULT.ranks)
        add("--models", metavar="NAME,NAME", help=f"what is trained ({','.join(MODELS)})")
        add(
            "--links",
            metavar="M[xB],...",
            help=f"Mbit/s of each link, and a larger batch beside it ({_words(_DEFAULT.links)})",
        )
        keys = ", ".join(form.key for form in FORMS)
        add("--forms", metavar="KEY,KEY", help=f"what is compared (all of {keys})")
        add("--rounds", type=int, metavar="R", help=f"turns of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="tiny models, few rounds: seconds, no figures")
        add_outputs(parser, picture="the times")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = settings_of(arguments)
        # torch is imported from here on.
        from pcomm.fsdp.bench.plot import plot_times
        from pcomm.fsdp.bench.report import rows_of, tables_of

        if arguments.plot is not None:
            check_can_plot("fsdp")
        found = _measure(settings)
        print(tables_of(settings, found))
        write_results(arguments, rows_of(found), partial(plot_times, found))
        return 0


def _measure(settings: Settings) -> list[Found]:
    from pcomm.core.process.local_ranks import run_local
    from pcomm.core.testing.namespaces import rated_network
    from pcomm.fsdp.bench.measure import measure_alone, measure_on_rank

    found: list[Found] = []
    for link in settings.links:
        for size in settings.ranks:
            with rated_network(size, num_rails=2, mbit_per_s=link.mbit_per_s) as network:
                found += run_local(measure_on_rank, size, (settings, link, network))[0]
    return [*run_local(measure_alone, 1, (settings,))[0], *found]


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the options ask for.

    Args:
        arguments: Parsed options.

    Raises:
        ConfigError: Numbers or names that cannot be measured.
    """
    base = _QUICK if arguments.quick else _DEFAULT
    return Settings(
        base.ranks if arguments.ranks is None else numbers("fsdp", "--ranks", arguments.ranks),
        base.models if arguments.models is None else tuple(arguments.models.split(",")),
        base.links if arguments.links is None else _links(arguments.links),
        base.forms if arguments.forms is None else tuple(arguments.forms.split(",")),
        base.rounds if arguments.rounds is None else arguments.rounds,
        base.alone_rounds,
        base.is_small,
    )


def _links(text: str) -> tuple[Link, ...]:
    """The links of `400,2000x4`."""
    found = []
    for word in text.split(","):
        rate, _, batch = word.partition("x")
        try:
            found.append(Link(float(rate), int(batch or 1)))
        except ValueError:
            raise ConfigError(
                f"pcomm bench fsdp --links {text}",
                found=f"{word!r}, which is no rate with a batch",
                why="A link is a number of Mbit/s, and where the batch is not the usual one, x and "
                "how many times as large it is.",
                fix=f"Write it like {_words(_DEFAULT.links)}.",
            ) from None
    return tuple(found)


def _words(links: Sequence[Link]) -> str:
    return ",".join(
        f"{link.mbit_per_s:g}" + (f"x{link.batch}" if link.batch > 1 else "") for link in links
    )


command = FsdpBenchmark()
