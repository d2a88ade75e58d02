"""The state of a rank, and how it comes back to what it was when a step began."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.session.training_state import Built

__all__ = ["Held", "KeptBuffers"]


@dataclass(frozen=True)
class Held:
    """The state of one generation on this rank.

    Args:
        generation: Number of the generation.
        plan: Plan under which the state lies.
        built: Model and optimizer; None on a rank without units.
    """

    generation: int
    plan: Plan
    built: Built | None


class KeptBuffers:
    """Copies of a model's persistent buffers from the beginning of a step. Local.

    A forward changes buffers before it is known whether the step counts.
    """

    def __init__(self) -> None:
        self._step = 0
        self._copies: dict[str, Tensor] = {}

    def keep(self, step: int, model: nn.Module) -> None:
        """Copy the buffers of `model` at the beginning of `step`."""
        self._step = step
        self._copies = {name: one.clone() for name, one in _buffers_of(model).items()}

    def set_back(self, step: int, model: nn.Module) -> None:
        """Write the copies back if they are those of `step`, which is repeated."""
        if step == self._step:
            for name, one in _buffers_of(model).items():
                if name in self._copies:
                    one.copy_(self._copies[name])

    def drop(self) -> None:
        """Forget the copies."""
        self._step, self._copies = 0, {}


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that move with the state."""
    saved = model.state_dict(keep_vars=True)
    return {name: one.detach() for name, one in model.named_buffers() if name in saved}
