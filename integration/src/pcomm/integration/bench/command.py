"""`pcomm bench serving`: models as they are served, beside transformers and beside their kernels.

Tokens/s of streams, steps of a tiny model, decoding by the length of the context, prompts that are
cached or long, and what HTTP adds. Cases of a part take turns in one process; only ratios of one
run mean much on a machine that others use too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pcomm.core.command.bench.options import (
    add_numbers,
    add_outputs,
    check_can_plot,
    given_numbers,
)
from pcomm.core.command.bench.results import write_results
from pcomm.core.errors import ConfigError
from pcomm.integration.bench.settings import PARTS, QUICK, Settings

__all__ = ["ServingBenchmark", "command"]

_DEFAULT = Settings()


class ServingBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "serving"
    help = "time models as they are served, beside transformers and beside their kernels alone"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        parts = "; ".join(f"{name}: {words}" for name, words in PARTS.items())
        add("--parts", metavar="NAME,NAME", help=f"what is measured (all). {parts}")
        add(
            "--model",
            type=Path,
            metavar="DIR",
            help="a Llama for `streams` and `prompt` (random weights of the shape of "
            f"{_DEFAULT.models.large.name})",
        )
        add_numbers(parser, "--streams", "texts at once", _DEFAULT.streams)
        add_numbers(parser, "--contexts", "tokens of context", _DEFAULT.contexts, metavar="T,T")
        add_numbers(parser, "--threads", "threads of torch", _DEFAULT.threads)
        add("--rounds", type=int, metavar="R", help=f"turns of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="tiny models and few rounds: no figures")
        add_outputs(parser, rows="these parts", picture="tokens/s and goals")
        add("--report", type=Path, metavar="FILE", help="write goals and what was reached there")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = _settings(arguments)
        if arguments.plot is not None:
            check_can_plot("serving")
        # torch is imported from here on.
        from pcomm.integration.bench.measure import measure
        from pcomm.integration.bench.plot import plot_serving
        from pcomm.integration.bench.report import report_of, rows_of, tables_of

        measured = measure(settings)
        print(tables_of(measured))
        print(f"\n{report_of(measured)}")
        write_results(arguments, rows_of(measured), partial(plot_serving, measured))
        if arguments.report is not None:
            arguments.report.parent.mkdir(parents=True, exist_ok=True)
            arguments.report.write_text(report_of(measured) + "\n")
            print(f"report: {arguments.report}")
        return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    base = QUICK if arguments.quick else _DEFAULT
    options = ("streams", "contexts", "threads")
    changes: dict[str, Any] = {**given_numbers("serving", arguments, options)}
    if arguments.parts is not None:
        changes["parts"] = tuple(arguments.parts.split(","))
    if arguments.rounds is not None:
        changes["rounds"] = arguments.rounds
    if arguments.model is not None:
        if not (arguments.model / "config.json").is_file():
            raise ConfigError(
                f"pcomm bench serving --model {arguments.model}",
                found="no config.json there",
                why="transformers reads the same model, from a Hugging Face directory.",
                fix="Give such a directory, or leave --model out for random weights.",
            )
        changes["model"] = arguments.model
    return replace(base, **changes)


command = ServingBenchmark()
