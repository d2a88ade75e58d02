"""The groups that hold the other shards of a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from pcomm.core.groups.group import Group
from pcomm.fsdp.guards import torch_function_errors

__all__ = ["GradientOrigin", "Origin", "alive"]


class GradientOrigin:
    """The groups that hold the other shards of one parameter group's gradients.

    Args:
        over: Groups of the ranks with other shards of the same gradients, or with other gradients
            of the parameter group.
        model_groups: All groups of the model, in the same order on all ranks.
        entire: Indices of the parameters that one rank holds entirely.

    Attributes:
        over: The groups of several ranks among them.
    """

    def __init__(
        self, over: Sequence[Group], model_groups: Sequence[Group], entire: frozenset[int]
    ) -> None:
        self.over = tuple(one for one in over if one.size > 1)
        self._model_groups = tuple(one for one in model_groups if one.size > 1)
        self._entire = entire

    @property
    def has_peers(self) -> bool:
        """True if the model has other ranks; each of them has to skip a step if this one does."""
        return bool(self._model_groups)

    def is_entire(self, index: int) -> bool:
        """True if one rank holds all of parameter `index` of the group."""
        return index in self._entire

    def spread_overflow(self, flag: Tensor) -> None:
        """Make a flag the largest of all ranks of the model, in place. Collective over them.

        Twice where there are several groups, so that it reaches ranks that share none.
        """
        for _ in range(2 if len(self._model_groups) > 1 else 1):
            for group in self._model_groups:
                group.collectives.all_reduce(flag, op="max", out=flag)


Origin = weakref.ReferenceType[GradientOrigin]


def alive(origin: Origin) -> GradientOrigin:
    """The origin of a gradient.

    Raises:
        UnsupportedError: The model is gone, and its groups with it.
    """
    found = origin()
    if found is None:
        raise torch_function_errors.gradient_without_groups()
    return found
