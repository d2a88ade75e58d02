"""Where copies of optimizer state may lie: hosts, and parts of these where they are too few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError, TopologyError
from pcomm.core.topology import Topology

__all__ = ["CopyPlace", "Hosts", "check_copies", "places_of"]


@dataclass(frozen=True)
class Hosts:
    """The host of each rank, and the number of owners.

    Args:
        copies: Number of owners of each unit.
        names: Host of each rank, by its global rank.

    Raises:
        ConfigError: Fewer than one copy.
    """

    copies: int
    names: Mapping[int, str]

    def __post_init__(self) -> None:
        check_copies(self.copies)

    @classmethod
    def of(cls, topology: Topology, copies: int, names: Mapping[int, str] | None = None) -> Hosts:
        """The hosts that are named, or each coordinate on `dp` as a host.

        Raises:
            ConfigError: Fewer than one copy.
            TopologyError: A rank of the topology has no host.
        """
        whole = Topology(topology.axes, topology.order, offset=topology.offset)
        if names is None:
            names = {one: f"dp={whole.coordinates(one)['dp']}" for one in whole.ranks}
        missing = [one for one in whole.ranks if one not in names]
        if missing:
            raise TopologyError(
                "Session: hosts",
                found=f"no host of rank {missing[0]}",
                why="Copies lie on different hosts, so each rank has one.",
                fix="Name the host of each rank, or none for each replica as a host.",
            )
        return cls(copies, dict(names))


def check_copies(copies: object) -> None:
    """Refuse a number of owners that is none. Local.

    Raises:
        ConfigError: Fewer than one, or no whole number.
    """
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise ConfigError(
            f"Session: copies={copies!r}",
            found="something other than a whole number of at least 1",
            why="It is the number of ranks that have the optimizer's state of a unit.",
            fix="Give 2 to survive the death of any one host, 1 to go back to a checkpoint, or "
            "None for the state of a unit on each rank that holds it.",
        )


CopyPlace = tuple[str, int]
"""A host, and which of its parts, where each of these counts as one."""


def places_of(
    ranks: Sequence[int], hosts: Hosts, replicas: Mapping[int, int]
) -> dict[int, CopyPlace]:
    """Where each rank is; a unit has one owner at a place. Local.

    Where there are fewer hosts than copies, replicas of a host are in several places; where these
    are too few, too, its ranks are.

    Args:
        ranks: Ranks that hold the same units.
        hosts: Host of each rank, and the number of copies.
        replicas: Replica of each rank.
    """
    on_host: dict[str, list[int]] = {}
    for rank in ranks:
        on_host.setdefault(hosts.names[rank], []).append(rank)
    parts = -(-hosts.copies // len(on_host))
    # First what may not be in two places is a replica, then a rank.
    for whole in (replicas, {rank: rank for rank in ranks}):
        number: dict[int, int] = {}
        for own in on_host.values():
            order = {one: at for at, one in enumerate(dict.fromkeys(whole[r] for r in own))}
            number.update({rank: order[whole[rank]] for rank in own})
        counts = [1 + max(number[rank] for rank in own) for own in on_host.values()]
        is_apart = sum(min(parts, count) for count in counts) >= hosts.copies
        if is_apart:
            break
    if len(on_host) == 1 or not is_apart:
        # Any two of them; of ranks there may be too few, too.
        parts = max(counts)
    return {rank: (hosts.names[rank], number[rank] % parts) for rank in ranks}
