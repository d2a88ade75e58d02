"""How transfers that run at once share the ports of their rails: max-min fair, as fluids.

A transfer alone runs at rate 1. Its *use* of a port is the share of that port that it takes at
rate 1, so the port that limits it is used fully. All rates rise together until a port is full; the
transfers on it stay there and the others rise on. Two transfers that need the same port fully get
half each; a reduce-scatter that sends much and an all-gather that receives much hardly meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Port", "Ports", "fair_rates"]


class Port(NamedTuple):
    """One direction of one rank's connection to a rail; `both` where the directions share."""

    rail: str
    rank_class: int
    direction: str


Uses = Mapping[int, float]
"""Use of one port by transfer."""


class Ports:
    """Which transfers run, on which ports, and at which rate."""

    def __init__(self) -> None:
        self._on_port: dict[Port, dict[int, float]] = {}
        self._of_transfer: dict[int, Mapping[Port, float]] = {}

    def start(self, transfer: int, use: Mapping[Port, float]) -> None:
        """Let a transfer run."""
        self._of_transfer[transfer] = use
        for port, share in use.items():
            self._on_port.setdefault(port, {})[transfer] = share

    def stop(self, transfer: int) -> set[int]:
        """End a transfer.

        Returns:
            Transfers that shared a port with it.
        """
        met: set[int] = set()
        for port in self._of_transfer.pop(transfer):
            on_port = self._on_port[port]
            del on_port[transfer]
            met.update(on_port)
        return met

    def rates(self, changed: Iterable[int]) -> dict[int, float]:
        """New rates of `changed` and of all that share ports with them, directly or not."""
        found: set[int] = set()
        rows: set[tuple[tuple[int, float], ...]] = set()
        todo = [transfer for transfer in changed if transfer in self._of_transfer]
        while todo:
            transfer = todo.pop()
            if transfer in found:
                continue
            found.add(transfer)
            for port in self._of_transfer[transfer]:
                on_port = self._on_port[port]
                # Ports of ranks that do the same give the same row, and one of them says it all.
                rows.add(tuple(sorted(on_port.items())))
                if len(on_port) > 1:
                    todo.extend(other for other in on_port if other not in found)
        return fair_rates([dict(row) for row in sorted(rows)])


def fair_rates(ports: Iterable[Uses]) -> dict[int, float]:
    """Max-min fair rates of the transfers that occur in `ports`.

    Args:
        ports: Share of each port that each transfer on it takes at rate 1.

    Returns:
        Rate by transfer, above 0 and at most 1 where some port is used fully at rate 1.
    """
    open_ports = [dict(uses) for uses in ports]
    room = [1.0] * len(open_ports)
    rates: dict[int, float] = {}
    level = 0.0
    while any(open_ports):
        demand = [sum(uses.values()) for uses in open_ports]
        rise = [r / d if d else float("inf") for r, d in zip(room, demand, strict=True)]
        step = min(rise)
        level += step
        full: set[int] = set()
        for place, uses in enumerate(open_ports):
            room[place] -= demand[place] * step
            # The port that gave the minimum is full by definition, whatever rounding says.
            if rise[place] <= step * (1 + 1e-12):
                full.update(uses)
        for transfer in sorted(full):
            rates[transfer] = level
        open_ports = [{t: u for t, u in uses.items() if t not in full} for uses in open_ports]
    return rates
