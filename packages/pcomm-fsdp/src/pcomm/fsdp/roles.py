"""Which groups a scope of parameters communicates in, named by what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pcomm.core.group import Group
from pcomm.fsdp.policy import Precision
from pcomm.fsdp.strategy import Shard

__all__ = ["Roles", "Scope"]


@dataclass(frozen=True)
class Roles:
    """The groups of one scope.

    Args:
        gather: Ranks that share each parameter, and the communicator that gathers them.
        reduce: The same ranks in the same order; its communicator reduces gradients. With one of
            its own, gathers and reduces do not queue behind each other.
        replicate: HSDP: ranks that hold the same shard, one of each `gather` group.
    """

    gather: Group
    reduce: Group
    replicate: Group | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.gather.size * (1 if self.replicate is None else self.replicate.size)


@dataclass(frozen=True)
class Scope:
    """Parameters with groups or number formats of their own, such as those of experts.

    Args:
        selects: Given a parameter's name in the model and the parameter: does it belong here?
        roles: Its groups.
        divisor: By which the summed gradient is divided; None for that of the model. With expert
            parallelism that is right: an expert's gradient on one rank already holds the tokens of
            the whole expert-parallel group, so the sum over *its* replicas is that over all ranks.
        shard: None for that of the model.
        spread: Ranks that hold *other* parameters of this scope, such as the expert-parallel
            group; the norm of all gradients sums over them.
        precision: Number formats; None for those of the model. The inputs of units are cast, or
            not, as the model's say, since a unit may have parameters of several scopes.
    """

    selects: Callable[[str, nn.Parameter], bool]
    roles: Roles
    divisor: float | None = None
    shard: Shard | None = None
    spread: Group | None = None
    precision: Precision | None = None
