"""Where a benchmark leaves what it measured. Imports torch when it is called, and not before."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pcomm.core.testing.timing import Row

__all__ = ["write_results"]


def write_results(
    arguments: argparse.Namespace, rows: Sequence[Row], draw: Callable[[Path], None]
) -> None:
    """Write rows and picture where `--csv` and `--plot` say, and print the names of the files.

    Args:
        arguments: Parsed options, with those of `add_outputs`.
        rows: All rows of the run; those of the same benchmarks in the file are replaced.
        draw: Function that writes the picture to a path.
    """
    from pcomm.core.testing.timing import save_rows

    if arguments.csv is not None:
        save_rows(arguments.csv, rows)
        print(f"rows: {arguments.csv}")
    if arguments.plot is not None:
        draw(arguments.plot)
        print(f"picture: {arguments.plot}")
