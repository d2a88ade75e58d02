"""Names of the dtypes that weights may have."""

from __future__ import annotations

import torch

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["DTYPES", "dtype_of"]

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Dtypes by the name that options have for them; `auto` is that of the files."""


def dtype_of(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of a name; None for `auto`. Local.

    Raises:
        ConfigError: It is the name of no dtype that weights have.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(
            "LLM: dtype",
            found=f"{name!r}",
            why="Weights are floating-point numbers of one of these: " + ", ".join(DTYPES) + ".",
            fix=near_misses(name, DTYPES),
        )
    return DTYPES[name]
