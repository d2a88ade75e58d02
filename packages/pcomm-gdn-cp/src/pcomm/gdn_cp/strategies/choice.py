"""The choice between the strategies, mixer by mixer: what was asked for, or what costs least.

The model counts what is sent, not what is computed: the summaries of `state` and the waiting that
an imbalance causes are left out, and `gather`, which computes everything on every rank, is taken
only where nothing else works. Ties go to the strategy named first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from pcomm.core.errors import ConfigError, PcommError, near_misses
from pcomm.gdn_cp.ops.backend import choose_packing
from pcomm.gdn_cp.specs import Spec, is_integer
from pcomm.gdn_cp.strategies.documents import TOLERATED_IMBALANCE, DocumentsStrategy
from pcomm.gdn_cp.strategies.head_share import Traffic
from pcomm.gdn_cp.strategies.state import StateStrategy
from pcomm.gdn_cp.strategies.strategy import GatherStrategy, HeadsStrategy, Strategy, StrategyName
from pcomm.gdn_cp.token_layout import TokenLayout

__all__ = ["Link", "Sizes", "StrategyChoice", "choose_strategy", "describe_plan", "make_strategy"]


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
class StrategyChoice:
    """The strategy of one mixer.

    Args:
        strategy: Name of the strategy.
        reason: Reason for it, for `Plan.describe`.
        rejected: The other strategies that were weighed.
    """

    strategy: StrategyName
    reason: str
    rejected: tuple[WeighedStrategy, ...] = ()


@dataclass(frozen=True)
class WeighedStrategy:
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


STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "heads": HeadsStrategy,
    "docs": DocumentsStrategy,
    "state": StateStrategy,
    "gather": GatherStrategy,
}


def choose_strategy(
    spec: Spec,
    tokens: TokenLayout,
    strategy: Literal["auto"] | StrategyName,
    sizes: Sizes,
    link: Link,
) -> StrategyChoice:
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
        return StrategyChoice(
            "heads" if strategy == "auto" else strategy, "one rank, so nothing moves"
        )
    if strategy == "auto":
        return _cheapest(spec, tokens, sizes, link)
    if strategy == "state" and spec.state is None:
        if spec.output.num_heads % tokens.size:
            return StrategyChoice("gather", "it keeps no state, and ranks do not divide its heads")
        return StrategyChoice("heads", "it keeps no state")
    return StrategyChoice(strategy, "asked for")


def _cheapest(spec: Spec, tokens: TokenLayout, sizes: Sizes, link: Link) -> StrategyChoice:
    found = [_weigh(strategy, spec, tokens, sizes, link) for strategy in STRATEGIES]
    sound = [c for c in found if not c.obstacle and c.strategy != "gather"]
    best = min(sound or found[-1:], key=lambda candidate: candidate.time_us)
    reason = (
        f"least by the model: {best.time_us:.1f} us forward and backward at "
        f"{link.latency_us:g} us a collective and {link.gb_per_s:g} GB/s"
        if sound
        else "nothing else works"
    )
    return StrategyChoice(best.strategy, reason, tuple(c for c in found if c is not best))


def _weigh(
    name: StrategyName, spec: Spec, tokens: TokenLayout, sizes: Sizes, link: Link
) -> WeighedStrategy:
    try:
        strategy = STRATEGIES[name](spec, tokens, 0)
    except PcommError as problem:
        return WeighedStrategy(name, problem.found)
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
    return WeighedStrategy(name, obstacle, time_us, traffic)


def make_strategy(name: StrategyName, spec: Spec, tokens: TokenLayout, rank: int) -> Strategy:
    """How the tensors of one mixer travel; on one rank they stay. Local.

    Raises:
        PcommError: The strategy does not work for this mixer and pack.
    """
    return Strategy(spec, tokens, 0) if tokens.size == 1 else STRATEGIES[name](spec, tokens, rank)


def describe_plan(
    tokens: TokenLayout, rank: int, sizes: Sizes, mixers: Iterable[tuple[StrategyChoice, Strategy]]
) -> str:
    """Multi-line summary: per-layer traffic of one rank, and why each strategy was taken. Local.

    Args:
        tokens: The pack.
        rank: The rank whose figures are shown.
        sizes: Width of hidden states and bytes of an element.
        mixers: The choice for each mixer, and the strategy that carries it out on this rank.
    """
    lines = [
        f"plan of rank {rank} of {tokens.size}: {tokens.num_sequences} sequences, "
        f"{tokens.num_tokens} tokens, {tokens.layout_name} between layers"
    ]
    for choice, strategy in mixers:
        lines += _mixer(choice, strategy, rank, sizes)
    return "\n".join(lines)


def _mixer(choice: StrategyChoice, strategy: Strategy, rank: int, sizes: Sizes) -> Iterator[str]:
    yield f"{strategy.spec}: {choice.strategy} ({choice.reason})"
    yield f"  {_traffic(strategy.traffic(rank, sizes.element_bytes, sizes.hidden_dim))}"
    if choice.strategy == "docs":
        known = "" if sizes.hidden_dim else "; bytes unknown without hidden_dim"
        yield f"  imbalance {strategy.imbalance:.1%}, {_cut(strategy.num_cut_documents)}{known}"
    if choice.strategy == "heads" and strategy.tokens.size > 1:
        yield f"  {_packing()}"
    yield from (f"  not {_rejected(candidate)}" for candidate in choice.rejected)


def _packing() -> str:
    on_cuda = choose_packing(torch.device("cuda"), torch.bfloat16)
    return f"packed by torch on the CPU, by {on_cuda.name} on CUDA ({on_cuda.reason})"


def _cut(num_documents: int) -> str:
    if not num_documents:
        return "no document is cut"
    return f"{num_documents} {'document is' if num_documents == 1 else 'documents are'} cut"


def _traffic(traffic: Traffic) -> str:
    if not traffic.num_collectives:
        return "nothing is sent"
    return (
        f"forward {_calls(traffic.forward)}, {traffic.forward_bytes:,} bytes sent; "
        f"backward {_calls(traffic.backward)}, {traffic.backward_bytes:,} bytes sent"
    )


def _calls(operations: Sequence[str]) -> str:
    return " + ".join(f"{count} {name}" for name, count in Counter(operations).items())


def _rejected(candidate: WeighedStrategy) -> str:
    if candidate.obstacle:
        return f"{candidate.strategy}: {candidate.obstacle}"
    return f"{candidate.strategy}: {candidate.time_us:.1f} us, {_traffic(candidate.traffic)}"
