"""`pcomm bench inference`: what a step of decoding costs beside what it must do.

Four questions: what does an operation cost that does nothing on one rank; what does the engine
take for a step without a model; how long is a step of a model in plain PyTorch beside its matrix
products alone; and how long are these with each form of the weights. Only ratios of one run mean
much on a machine that others use too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from pcomm.core.command.bench.options import (
    add_numbers,
    add_outputs,
    check_can_plot,
    given_numbers,
)
from pcomm.core.command.bench.results import write_results
from pcomm.inference.bench.settings import SHAPES, Settings

__all__ = ["InferenceBenchmark", "command"]

_DEFAULT = Settings()
_QUICK = Settings(
    shapes=SHAPES[:1],
    streams=(1, 8),
    contexts=(64, 256),
    rows=(1, 8),
    product_rows=(1, 8),
    threads=(1,),
    rounds=7,
)


class InferenceBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "inference"
    help = "time steps of decoding beside their matrix products, and what engines need not pay"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add_numbers(parser, "--streams", "texts at once", _DEFAULT.streams)
        add_numbers(parser, "--contexts", "tokens of context", _DEFAULT.contexts, metavar="T,T")
        add_numbers(parser, "--rows", "requests without a model", _DEFAULT.rows)
        add_numbers(parser, "--threads", "threads of torch", _DEFAULT.threads)
        add("--rounds", type=int, metavar="R", help=f"steps of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="a tiny model and few rounds: no figures")
        add_outputs(parser, picture="ratios and tokens/s")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = _settings(arguments)
        if arguments.plot is not None:
            check_can_plot("inference")
        # torch is imported from here on.
        from pcomm.inference.bench.measure import measure
        from pcomm.inference.bench.plot import plot_decoding
        from pcomm.inference.bench.report import rows_of, tables_of

        measured = measure(settings)
        print(tables_of(measured))
        write_results(arguments, rows_of(measured), partial(plot_decoding, measured))
        return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT
    options = ("streams", "contexts", "rows", "threads")
    changes: dict[str, Any] = {**given_numbers("inference", arguments, options)}
    if arguments.rounds is not None:
        changes["rounds"] = arguments.rounds
    return replace(base, **changes)


command = InferenceBenchmark()
