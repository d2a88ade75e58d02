"""How a step ends: applied by all ranks, or given up by all; and the generation that may follow."""

from __future__ import annotations

import torch

from pcomm.core.errors import ConfigError
from pcomm.ntp.session import misuse, store_errors
from pcomm.ntp.session.commit import commit
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.opening import EVERYONE
from pcomm.ntp.session.recovery import Recovery

__all__ = ["StepEnd"]


class StepEnd:
    """The end of each step of this rank.

    Args:
        recovery: State of this rank.
        membership: This process as a member of the job.
        device: Device of tensors between ranks.

    Attributes:
        asks_move: True if this rank asks for another generation at the end of its next step.
        until: Number of steps after which this rank attempts none.
    """

    def __init__(self, recovery: Recovery, membership: Membership, device: torch.device) -> None:
        self._recovery, self._membership, self._device = recovery, membership, device
        self.asks_move, self.until = False, 0
        self._is_asked = False

    def agree(self, max_norm: float | None = None) -> None:
        """Agree that all ranks are ready, and apply the step. Collective over all ranks.

        Args:
            max_norm: Norm by which the gradients were clipped, infinite where they were not; None
                on a rank without units.

        Raises:
            DivergenceError: Ranks differ in `max_norm` or `until`, or replicas have drifted apart.
            PeerError: Another rank failed.
        """
        recovery = self._recovery
        if recovery.opened is None:
            raise misuse.without("groups")
        with store_errors.told():
            asks_move = self.asks_move or self._membership.wants_in()
        recovery.check_drift()
        recovery.is_ready = True
        everyone = recovery.opened.every[EVERYONE].collectives
        settings = {"until": float(self.until), "max_norm": max_norm}
        self._is_asked = commit(asks_move, settings, everyone, self._device)
        recovery.apply()
        if recovery.sync is not None:
            recovery.sync.zero_grad()

    def follow(self, number: int, error: BaseException | None) -> bool:
        """Do what follows an attempt. Collective where the ranks begin another generation.

        Args:
            number: Number of its step.
            error: Error that left its `with` block, or None.

        Returns:
            Whether the error is taken.

        Raises:
            ConfigError: The step was not committed.
        """
        is_asked, self._is_asked = self._is_asked, False
        if error is not None:
            reason = self._recovery.setback(error)
        elif self._recovery.applied == number:
            raise ConfigError(
                f"Session: the attempt at step {number}",
                found="an end of the with block without commit()",
                why="A step that is not committed is not applied, and would come for ever.",
                fix="Call step.commit() at the end of the block.",
            )
        else:
            reason = "a process joins, or a rank asks for a change" if is_asked else None
        if reason is None:
            return False
        self.move(reason)
        return True

    def move(self, reason: str) -> None:
        """Begin another generation, which has all that this rank asked for. Collective."""
        self.asks_move = False
        self._recovery.move(reason)
