"""TensorBoard, for those who have it installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

from pcomm.integration.metrics.sink import Row

__all__ = ["TensorBoardSink", "open_tensorboard"]


class TensorBoardSink:
    """Each number of a row as a scalar of its name.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or what has its two methods.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, row: Row) -> None:
        """Add every number but the step, at that step."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()


def open_tensorboard(folder: Path, *, keep_through: int | None = None) -> TensorBoardSink | None:
    """A sink that writes event files to `folder`, or None where TensorBoard is not installed.

    Args:
        folder: Made if absent.
        keep_through: A resumed run hides the rows of an earlier attempt after this step.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        logging.getLogger("pcomm").warning(
            "TensorBoard is installed and cannot be imported (%s); metrics.jsonl has every row.",
            error,
        )
        return None
    purge_step = None if keep_through is None else keep_through + 1
    return TensorBoardSink(module.SummaryWriter(str(folder), purge_step=purge_step))
