"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.gdn_cp import Plan, Spec
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.rotary import Rotation

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """Shared by the layers of one forward pass over packed sequences.

    Args:
        plan: The plan of the sequences, which tells what tokens belong together, and how they
            travel between context-parallel ranks.
        rotation: Rotation of the tokens that attention sees; None in a model without attention.
        has_stream_shares: True if the residual stream is split over tensor-parallel ranks. Then no
            strategy of the plan moves hidden states, and projections gather the tokens.
        balance: Counts for the balance losses of layers with experts; None without these.
    """

    plan: Plan
    rotation: Rotation | None
    has_stream_shares: bool = False
    balance: Balance | None = None

    def enter(self, spec: Spec, x: Tensor) -> Tensor:
        """Hidden states as the projections of a mixer want them; collective, see `Plan.enter`."""
        return x if self.has_stream_shares else self.plan.enter(spec, x)

    def leave(self, spec: Spec, y: Tensor) -> Tensor:
        """What `enter` undoes."""
        return y if self.has_stream_shares else self.plan.leave(spec, y)
