"""A plan in words, for logs: which strategies, why, at what cost, and what was rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.packing.backend import choose_packing
from pcomm.gdn_cp.strategies.choice import Candidate, Choice
from pcomm.gdn_cp.strategies.cost import Sizes
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["describe_plan"]


def describe_plan(
    tokens: TokenLayout, rank: int, sizes: Sizes, mixers: Iterable[tuple[Choice, Strategy]]
) -> str:
    """Several lines; figures are those of one rank, for one layer of each mixer. Local.

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


def _mixer(choice: Choice, strategy: Strategy, rank: int, sizes: Sizes) -> Iterator[str]:
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


def _rejected(candidate: Candidate) -> str:
    if candidate.obstacle:
        return f"{candidate.strategy}: {candidate.obstacle}"
    return f"{candidate.strategy}: {candidate.time_us:.1f} us, {_traffic(candidate.traffic)}"
