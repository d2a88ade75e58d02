"""Numbers of weights that a model cannot be computed with: NaN, and overflow of the dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError

__all__ = ["check_numbers", "overflows"]


def check_numbers(read: Tensor, dtype: torch.dtype, *, file: Path, name: str) -> None:
    """Refuse what was read of a tensor if the model would not have its numbers. Local.

    Infinities of the file are weights like others. One pass over the tensor, without a copy.

    Args:
        read: A slice of the tensor, in the dtype of the file.
        dtype: Dtype that the model has it in.
        file: File that it was read from, for the error.
        name: Its name there, for the error.

    Raises:
        ConfigError: The slice has NaN, or a finite number that is infinite in `dtype`.
    """
    if read.numel() and torch.aminmax(read)[0].isnan():
        raise ConfigError(
            f"model directory {file.parent}",
            found=f"{file.name}: NaN in {name}",
            why="Every token that this weight takes part in would be NaN.",
            fix=f"Copy {file.name} again from where the directory came from; if it is the same "
            "there, the training that wrote it had diverged.",
        )
    if overflows(read, dtype):
        raise ConfigError(
            f"model directory {file.parent}",
            found=f"{file.name}: numbers in {name} that are infinite as {_short(dtype)}",
            why=f"The file has it as {_short(read.dtype)}, and {_short(dtype)} ends at "
            f"{torch.finfo(dtype).max:g}.",
            fix="Load the weights as float32 or bfloat16: `--dtype float32`.",
        )


def overflows(values: Tensor, dtype: torch.dtype) -> bool:
    """True if a finite number of `values` is infinite in `dtype`. Local."""
    if not values.numel() or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return False
    ends = torch.stack(torch.aminmax(values))
    if ends.isinf().any():
        # An infinity hides the largest finite number.
        return bool((values.to(dtype).isinf() & values.isfinite()).any())
    return bool(ends.to(dtype).isinf().any())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
