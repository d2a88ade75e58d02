"""Where a rank stands in a run, and which part of each batch its replica takes."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core import Group, Topology
from pcomm.integration.config_resolved import Resolved
from pcomm.ntp import Plan

__all__ = ["RunPlace"]


@dataclass(frozen=True)
class RunPlace:
    """Where this rank stands; made by `uniform` or `planned`.

    Args:
        replica: Data-parallel rank.
        num_replicas: Number of data-parallel ranks.
        cp: Context-parallel rank.
        tp: Rank in its tensor-parallel group.
        shares: Rows that each replica takes of a batch, where they differ; empty for as many each.
        token_multiple: Number that the tokens of a micro-batch are filled up to a multiple of: 1
            where the configuration makes them one.
        rank: Global rank, failed ranks counted.
    """

    replica: int
    num_replicas: int
    cp: int
    tp: int
    shares: tuple[int, ...]
    token_multiple: int
    rank: int

    @classmethod
    def uniform(cls, config: Resolved, topology: Topology, everyone: Group) -> RunPlace:
        """The place of a rank of which no other has failed. Local."""
        at = topology.coordinates(everyone.rank)
        return cls(at["dp"], config.parallel.dp, at["cp"], at["tp"], (), 1, everyone.rank)

    @classmethod
    def planned(cls, config: Resolved, plan: Plan, everyone: Group) -> RunPlace:
        """The place of a rank that `plan` uses. Local.

        Args:
            config: The configuration.
            plan: The plan; its replicas take rows by their speeds.
            everyone: Group of all ranks that the plan uses, with their numbers in its topology.
        """
        rank, train = everyone.ranks[everyone.rank], config.train
        place, at = plan.place(rank), plan.topology.coordinates(rank)
        shares = plan.token_shares(train.global_batch_tokens, multiple=train.sequence_length)
        # Replicas that have lost all of their ranks are not counted.
        tokens = {replica: share for replica, share in enumerate(shares) if share}
        splits = place.degree if config.parallel.sequence else 1
        return cls(
            list(tokens).index(place.replica),
            len(tokens),
            at["cp"],
            place.index,
            tuple(n // train.sequence_length for n in tokens.values()),
            config.parallel.cp * splits,
            rank,
        )
