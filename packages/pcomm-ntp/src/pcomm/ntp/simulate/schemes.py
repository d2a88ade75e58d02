"""What a job does with damaged domains, and the throughput that this leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError, near_misses
from pcomm.ntp.simulate.fleet import Fleet, positive

__all__ = ["SCHEMES", "Counts", "Scheme", "scheme_of", "throughputs"]

Counts = NDArray[np.int64]
"""Failed GPUs by domain: shape [states, domains]."""


@dataclass(frozen=True)
class Scheme:
    """A policy for damaged domains: a replica is dropped, or trains on at a lower degree.

    Each field is one of the terms that separate a policy from the ideal, so that each can be
    switched alone with `dataclasses.replace`.

    Args:
        name: Word for the rows.
        shrinks: True where a damaged replica trains on with the GPUs that are left, at the speed
            of its most damaged domain; False where it contributes nothing.
        packing: `"in_place"` leaves damaged domains in their replicas. `"in_order"` collects
            them into as few replicas as possible, in the order of their numbers.
            `"by_damage"` collects them with the most damaged ones first, so that equal damage
            shares a replica; no other order loses less.
        one_degree: True where the job knows a single reduced degree, that of its most damaged
            domain.
        local_batch: Number of micro-batches of a replica, of which a reduced one takes a whole
            number; None where its batch is exactly proportional to its speed.

    Raises:
        ConfigError: A local batch below 1.
    """

    name: str
    shrinks: bool
    packing: Literal["in_place", "in_order", "by_damage"]
    one_degree: bool = False
    local_batch: int | None = None

    def __post_init__(self) -> None:
        if self.local_batch is not None:
            positive("Scheme: local_batch", self.local_batch)

    def shares(self, speeds: Sequence[Fraction]) -> NDArray[np.float64]:
        """A replica's share of its full batch, by the failed GPUs of its most damaged domain."""
        if not self.shrinks:
            return np.array([1.0] + [0.0] * (len(speeds) - 1))
        if self.local_batch is None:
            return np.array([float(speed) for speed in speeds])
        whole = [Fraction(math.floor(self.local_batch * speed)) for speed in speeds]
        return np.array([float(number / self.local_batch) for number in whole])


SCHEMES = (
    Scheme("drop", shrinks=False, packing="in_place"),
    Scheme("drop packed", shrinks=False, packing="in_order"),
    Scheme("paper", shrinks=True, packing="in_order", one_degree=True, local_batch=8),
    Scheme("exact in place", shrinks=True, packing="in_place"),
    Scheme("exact", shrinks=True, packing="in_order"),
    Scheme("exact sorted", shrinks=True, packing="by_damage"),
)
"""Dropping replicas, nonuniform tensor parallelism as in arXiv 2504.06095, and with any degree."""


def scheme_of(name: str | Scheme) -> Scheme:
    """One of `SCHEMES` by its name, or the scheme itself.

    Raises:
        ConfigError: No scheme has this name.
    """
    if isinstance(name, Scheme):
        return name
    known = {scheme.name: scheme for scheme in SCHEMES}
    if name not in known:
        raise ConfigError(
            f"scheme {name!r}",
            found="no scheme has this name",
            why="A scheme says what happens to a replica with failed GPUs.",
            fix=near_misses(name, known),
        )
    return known[name]


def throughputs(
    counts: Counts,
    fleet: Fleet,
    scheme: Scheme,
    speeds: Sequence[Fraction],
    *,
    spare_domains: int = 0,
) -> NDArray[np.float64]:
    """The throughput in each state, relative to the job without a failure.

    Args:
        counts: Failed GPUs by domain; shape [states, domains].
        fleet: GPUs of the job.
        scheme: Policy for damaged domains.
        speeds: Speed of a domain by its failed GPUs, as `degree_speeds` returns it.
        spare_domains: Number of domains beside the job that replace its most damaged ones.

    Returns:
        Numbers in 0 to 1, shape [states].
    """
    if spare_domains:
        counts = _without_most_damaged(counts, spare_domains)
    if scheme.packing == "by_damage":
        ordered = -np.sort(-counts, axis=1)
    elif scheme.packing == "in_order":
        order = np.argsort(counts == 0, axis=1, kind="stable")
        ordered = np.take_along_axis(counts, order, axis=1)
    else:
        ordered = counts
    worst = ordered.reshape(len(counts), fleet.num_replicas, fleet.domains_per_replica).max(axis=2)
    if scheme.one_degree:
        worst = np.where(worst > 0, worst.max(axis=1, keepdims=True), 0)
    found: NDArray[np.float64] = scheme.shares(speeds)[worst].mean(axis=1)
    return found


def _without_most_damaged(counts: Counts, num_replaced: int) -> Counts:
    order = np.argsort(-counts, axis=1, kind="stable")[:, :num_replaced]
    repaired = counts.copy()
    np.put_along_axis(repaired, order, 0, axis=1)
    return repaired
