"""Which strategy costs least: a model of latency and bytes, the same integers on every rank.

It counts what is sent, not what is computed: the summaries of `state` and the waiting that an
imbalance causes are left out, and `gather`, which computes everything on every rank, is taken only
where nothing else works. Ties go to the strategy named first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pcomm.core.errors import ConfigError, PcommError, near_misses
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.specs import Spec, is_integer
from pcomm.gdn_cp.strategies.document_cuts import TOLERATED_IMBALANCE
from pcomm.gdn_cp.strategies.documents import DocumentsStrategy
from pcomm.gdn_cp.strategies.gather import GatherStrategy
from pcomm.gdn_cp.strategies.heads import HeadsStrategy
from pcomm.gdn_cp.strategies.state import StateStrategy
from pcomm.gdn_cp.strategies.strategy import Strategy, StrategyName, Traffic

__all__ = ["Candidate", "Choice", "Link", "Sizes", "choose", "decide"]

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "heads": HeadsStrategy,
    "docs": DocumentsStrategy,
    "state": StateStrategy,
    "gather": GatherStrategy,
}


@dataclass(frozen=True)
class Link:
    """What a collective costs: a fixed time, and a time for each byte that a rank sends.

    Args:
        latency_us: Microseconds of an empty collective.
        gb_per_s: 10^9 bytes that one rank sends in a second.

    Raises:
        ConfigError: A number that is not positive.
    """

    latency_us: float = 20.0
    gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        numbers = (self.latency_us, self.gb_per_s)
        if not all(isinstance(number, float | int) and number > 0 for number in numbers):
            raise ConfigError(
                "Link",
                found=f"latency_us={self.latency_us}, gb_per_s={self.gb_per_s}",
                why="A collective takes time, and a link carries bytes.",
                fix="Use positive numbers, those of the slowest link between the ranks.",
            )

    def time_us(self, traffic: Traffic) -> float:
        """Microseconds of communication, forward and backward."""
        return traffic.num_collectives * self.latency_us + traffic.sent_bytes / self.gb_per_s / 1e3


@dataclass(frozen=True)
class Sizes:
    """Sizes that the model needs and a specification does not have.

    Args:
        hidden_dim: Width of hidden states; None if unknown, and then `docs` cannot be weighed.
        element_bytes: Bytes of an element of activations: 1, 2, 4, 8 or 16.

    Raises:
        ConfigError: A width that is no integer >= 1, or bytes that no dtype has.
    """

    hidden_dim: int | None
    element_bytes: int

    def __post_init__(self) -> None:
        width = self.hidden_dim
        if width is not None and not (is_integer(width) and width >= 1):
            raise ConfigError(
                f"make_plan: hidden_dim={width!r}",
                found="no integer >= 1",
                why="It is the number of columns of hidden states, which strategy 'docs' sends.",
                fix="Pass the width of the model, or leave it away if it is unknown.",
            )
        if not (is_integer(self.element_bytes) and self.element_bytes in (1, 2, 4, 8, 16)):
            raise ConfigError(
                f"make_plan: element_bytes={self.element_bytes!r}",
                found="a size that no dtype has",
                why="It is the number of bytes of one number of the activations.",
                fix="Pass dtype.itemsize: 2 for bf16, 4 for fp32.",
            )


@dataclass(frozen=True)
class Candidate:
    """A strategy, and what became of it.

    Args:
        strategy: Its name.
        obstacle: Why it cannot or shall not be taken; empty if it can.
        time_us: Estimate for the rank that sends most; infinite if it cannot be taken.
        traffic: Of that rank.
    """

    strategy: StrategyName
    obstacle: str
    time_us: float = float("inf")
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class Choice:
    """The strategy of one mixer.

    Args:
        strategy: What was taken.
        reason: Why.
        rejected: The others that were weighed.
    """

    strategy: StrategyName
    reason: str
    rejected: tuple[Candidate, ...] = ()


def decide(
    spec: Spec,
    tokens: TokenLayout,
    strategy: Literal["auto"] | StrategyName,
    sizes: Sizes,
    link: Link,
) -> Choice:
    """The strategy that was asked for, or with `auto` the one that costs least.

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
        return choose(spec, tokens, sizes, link)
    if strategy == "state" and not spec.has_state:
        divides = spec.output.num_heads % tokens.size == 0
        return Choice("heads" if divides else "gather", "asked for 'state', and it has none")
    return Choice(strategy, "asked for")


def choose(spec: Spec, tokens: TokenLayout, sizes: Sizes, link: Link) -> Choice:
    """The strategy with the least time among those that work. The same on every rank."""
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
    traffic, time_us = _busiest(strategy, sizes, link, range(tokens.size))
    obstacle = ""
    if name == "docs" and sizes.hidden_dim is None:
        obstacle, time_us = "hidden_dim was not given, so its bytes are unknown", float("inf")
    elif strategy.imbalance > TOLERATED_IMBALANCE:
        # The others would wait for longer than the model, which counts only bytes, can weigh.
        obstacle = f"{strategy.imbalance:.0%} above the average on the busiest rank"
    elif name == "gather":
        obstacle = f"computes everything {tokens.size} times"
    return Candidate(name, obstacle, time_us, traffic)


def _busiest(
    strategy: Strategy, sizes: Sizes, link: Link, ranks: Iterable[int]
) -> tuple[Traffic, float]:
    each = [strategy.traffic(rank, sizes.element_bytes, sizes.hidden_dim) for rank in ranks]
    slowest = max(each, key=link.time_us)
    return slowest, link.time_us(slowest)
