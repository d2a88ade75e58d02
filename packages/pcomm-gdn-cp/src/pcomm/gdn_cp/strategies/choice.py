"""The choice between the strategies, mixer by mixer: what was asked for, or what costs least.

The model counts what is sent, not what is computed: the summaries of `state` and the waiting that
an imbalance causes are left out, and `gather`, which computes everything on every rank, is taken
only where nothing else works. Ties go to the strategy named first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pcomm.core.errors import ConfigError, PcommError, near_misses
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.cost import Link, Sizes
from pcomm.gdn_cp.strategies.document_cuts import TOLERATED_IMBALANCE
from pcomm.gdn_cp.strategies.documents import DocumentsStrategy
from pcomm.gdn_cp.strategies.gather import GatherStrategy
from pcomm.gdn_cp.strategies.heads import HeadsStrategy
from pcomm.gdn_cp.strategies.state import StateStrategy
from pcomm.gdn_cp.strategies.strategy import Strategy, StrategyName
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["Candidate", "Choice", "choose_strategy", "make_strategy"]

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "heads": HeadsStrategy,
    "docs": DocumentsStrategy,
    "state": StateStrategy,
    "gather": GatherStrategy,
}


@dataclass(frozen=True)
class Candidate:
    """A strategy that was weighed.

    Args:
        strategy: Name of the strategy.
        obstacle: Reason why it cannot or shall not be taken; empty if it can.
        time_us: Estimated communication of the slowest rank, in microseconds; infinite if the
            strategy cannot be taken.
        traffic: Traffic of that rank.
    """

    strategy: StrategyName
    obstacle: str
    time_us: float = float("inf")
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class Choice:
    """The strategy of one mixer.

    Args:
        strategy: Name of the strategy.
        reason: Reason for it, for `Plan.describe`.
        rejected: The other strategies that were weighed.
    """

    strategy: StrategyName
    reason: str
    rejected: tuple[Candidate, ...] = ()


def choose_strategy(
    spec: Spec,
    tokens: TokenLayout,
    strategy: Literal["auto"] | StrategyName,
    sizes: Sizes,
    link: Link,
) -> Choice:
    """The strategy that was asked for, or with `auto` the one that costs least. Local.

    Ranks that pass the same integers choose the same.

    Raises:
        ConfigError: No such strategy.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ConfigError(
            f"make_plan: strategy={strategy!r}",
            found="no such strategy",
            why="Tensors travel by one of the strategies, or by the one that costs least.",
            fix=near_misses(str(strategy), ("auto", *STRATEGIES)),
        )
    if tokens.size == 1:
        return Choice("heads" if strategy == "auto" else strategy, "one rank, so nothing moves")
    if strategy == "auto":
        return _cheapest(spec, tokens, sizes, link)
    if strategy == "state" and spec.state is None:
        divides = spec.output.num_heads % tokens.size == 0
        return Choice("heads" if divides else "gather", "asked for 'state', and it has none")
    return Choice(strategy, "asked for")


def _cheapest(spec: Spec, tokens: TokenLayout, sizes: Sizes, link: Link) -> Choice:
    found = [_weigh(strategy, spec, tokens, sizes, link) for strategy in STRATEGIES]
    sound = [c for c in found if not c.obstacle and c.strategy != "gather"]
    best = min(sound or found[-1:], key=lambda candidate: candidate.time_us)
    reason = (
        f"least by the model: {best.time_us:.1f} us forward and backward at "
        f"{link.latency_us:g} us a collective and {link.gb_per_s:g} GB/s"
        if sound
        else "nothing else works"
    )
    return Choice(best.strategy, reason, tuple(c for c in found if c is not best))


def _weigh(
    name: StrategyName, spec: Spec, tokens: TokenLayout, sizes: Sizes, link: Link
) -> Candidate:
    try:
        strategy = STRATEGIES[name](spec, tokens, 0)
    except PcommError as problem:
        return Candidate(name, problem.found)
    of_ranks = (
        strategy.traffic(r, sizes.element_bytes, sizes.hidden_dim) for r in range(tokens.size)
    )
    traffic = max(of_ranks, key=link.time_us)
    obstacle, time_us = "", link.time_us(traffic)
    if name == "docs" and sizes.hidden_dim is None:
        obstacle, time_us = "hidden_dim was not given, so its bytes are unknown", float("inf")
    elif strategy.imbalance > TOLERATED_IMBALANCE:
        # The model counts bytes only, and not the time that the other ranks wait.
        obstacle = f"{strategy.imbalance:.0%} above the average on the busiest rank"
    elif name == "gather":
        obstacle = f"computes everything {tokens.size} times"
    return Candidate(name, obstacle, time_us, traffic)


def make_strategy(name: StrategyName, spec: Spec, tokens: TokenLayout, rank: int) -> Strategy:
    """How the tensors of one mixer travel; on one rank they stay. Local.

    Raises:
        PcommError: The strategy does not work for this mixer and pack.
    """
    return Strategy(spec, tokens, 0) if tokens.size == 1 else STRATEGIES[name](spec, tokens, rank)
