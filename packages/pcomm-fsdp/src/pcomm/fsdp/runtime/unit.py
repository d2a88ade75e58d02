"""A unit while the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.forward_pass import ForwardPass

__all__ = ["Unit"]


class Unit:
    """A module, its parameter groups, and its state in a micro-batch.

    Args:
        name: Its name in the model.
        module: The module.
        groups: Its parameter groups that communicate or convert.
        input_dtype: Dtype that floating-point inputs are cast to; None leaves them.

    Attributes:
        is_in_backward: True from the moment backward comes to it until backward has passed it.
        passes: Forwards that backward is in the unit for.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[FlatGroup],
        *,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.module, self.groups = name, module, tuple(groups)
        self.input_dtype = input_dtype
        self.passes: set[ForwardPass] = set()
        self.begin()

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self.is_in_backward = False
        self.passes.clear()
        for group in self.groups:
            group.begin()

    def has_passed(self) -> bool:
        """True if backward has passed all uses of the unit that it came for."""
        return all(one.has_passed(self.name) for one in self.passes)
