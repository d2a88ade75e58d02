"""`pcomm bench inference`: what a step of decoding costs beside what it must do.

Four questions: what does an operation cost that does nothing on one rank; what does the engine
take for a step without a model; how long is a step of a model in plain PyTorch beside its matrix
products alone; and how long are these with each form of the weights. Only ratios of one run mean
much on a machine that others use too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pcomm.core.command.bench.options import check_can_plot, numbers
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
        add("--streams", metavar="N,N", help=f"texts at once ({_list(_DEFAULT.streams)})")
        add("--contexts", metavar="T,T", help=f"tokens of context ({_list(_DEFAULT.contexts)})")
        add("--rows", metavar="N,N", help=f"requests without a model ({_list(_DEFAULT.rows)})")
        add("--threads", metavar="N,N", help=f"threads of torch ({_list(_DEFAULT.threads)})")
        add("--rounds", type=int, metavar="R", help=f"steps of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="a tiny model and few rounds: no figures")
        add("--csv", type=Path, metavar="FILE", help="replace the rows of this benchmark there")
        add("--plot", type=Path, metavar="FILE", help="draw ratios and tokens/s as a PNG")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = _settings(arguments)
        if arguments.plot is not None:
            check_can_plot("inference")
        # torch is imported from here on.
        from pcomm.core.testing.timing import save_rows
        from pcomm.inference.bench.measure import measure
        from pcomm.inference.bench.plot import plot_decoding
        from pcomm.inference.bench.report import rows_of, tables_of

        measured = measure(settings)
        print(tables_of(measured))
        if arguments.csv is not None:
            save_rows(arguments.csv, rows_of(measured))
            print(f"rows: {arguments.csv}")
        if arguments.plot is not None:
            plot_decoding(measured, arguments.plot)
            print(f"picture: {arguments.plot}")
        return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT

    def chosen(option: str, default: tuple[int, ...]) -> tuple[int, ...]:
        text = getattr(arguments, option)
        return default if text is None else numbers("inference", f"--{option}", text)

    return Settings(
        shapes=base.shapes,
        streams=chosen("streams", base.streams),
        contexts=chosen("contexts", base.contexts),
        prompt=base.prompt,
        rows=chosen("rows", base.rows),
        product_rows=base.product_rows,
        threads=chosen("threads", base.threads),
        rounds=base.rounds if arguments.rounds is None else arguments.rounds,
    )


def _list(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


command = InferenceBenchmark()
