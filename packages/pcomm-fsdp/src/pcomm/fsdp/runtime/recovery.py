"""After an error: tell the peers, and go on only if all ranks stopped at the same place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pcomm.core.errors import PcommError
from pcomm.fsdp.guards import running_model_errors
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.peers import Peers

__all__ = ["Recovery"]


class Recovery:
    """The failures of one sharded model, and its steps after them.

    Args:
        peers: The ranks that take part.

    Attributes:
        round_number: Number of failures that all ranks have left behind.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._failure = ""
        self._is_broken = False
        self.round_number = 0

    @property
    def is_due(self) -> bool:
        """True after a failure until `agree` returns."""
        return bool(self._failure)

    def peer_failure(self) -> str | None:
        """Message of a rank that has failed since all ranks last went on together. Local."""
        return self._peers.failure(round_number=self.round_number)

    def raise_if_peer_failed(self) -> None:
        """Raise if a rank has failed since all ranks last went on together. Local.

        Raises:
            PeerError: One has.
        """
        message = self.peer_failure()
        if message is not None:
            raise running_model_errors.peer_failed(message)

    def give_up(self, reason: str, groups: Collection[FlatGroup]) -> None:
        """Tell ranks that wait in this micro-batch, and bring groups to their state between steps.

        Args:
            reason: The error.
            groups: All parameter groups.
        """
        self._failure = self._failure or reason
        try:
            for group in groups:
                group.drain()
        except PcommError:
            # A collective in flight may write into its buffers at any time.
            self._is_broken = True
        self._peers.tell_failure(reason, round_number=self.round_number)
        for group in groups:
            group.unsharded.uninstall()
            if not self._is_broken:
                group.reset()

    def agree(self, issued: Mapping[str, int]) -> None:
        """Go on if the error left all ranks at the same place. Collective.

        Args:
            issued: Number of steps of each kind that this rank has taken.

        Raises:
            PeerError: A collective never ended, here or on another rank.
            DivergenceError: Ranks have issued different numbers of collectives.
        """
        error = running_model_errors.broken_collectives(self._failure) if self._is_broken else None
        counts = [f"{kind}s issued: {issued[kind]}" for kind in ("gather", "reduce")]
        self._peers.agree("fsdp: step after an error", counts, error=error)
        self._failure = ""
        self.round_number += 1

    def close(self) -> None:
        """Let go of the groups of the peers. Local."""
        self._peers = Peers([])
