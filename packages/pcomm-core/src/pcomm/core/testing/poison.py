"""Fresh memory that is visibly not a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["poisoned_memory"]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN (the largest value for integers).

    Code that reads an element before it is written then fails a comparison instead of finding a
    zero by luck. Torch does this under deterministic algorithms, of which only this part is used:
    an operation without a deterministic form is not an error here.
    """
    # A module with a property, which type checkers do not see.
    memory: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # `torch.use_deterministic_algorithms` would import torch's compiler, which takes seconds in
    # each new process.
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
