"""A plan in words, for logs: which strategies, why, at what cost, and what was rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pcomm.gdn_cp.packing.backend import choose_packing
from pcomm.gdn_cp.strategies.cost import Candidate
from pcomm.gdn_cp.strategies.strategy import Traffic

if TYPE_CHECKING:
    from pcomm.gdn_cp.layout.planned_pack import PlannedPack

__all__ = ["describe_plan"]


def describe_plan(plan: PlannedPack) -> str:
    """Several lines; figures are those of the plan's rank, of one layer of each mixer."""
    tokens = plan.tokens
    lines = [
        f"plan of rank {plan.rank} of {tokens.size}: {tokens.num_sequences} sequences, "
        f"{tokens.num_tokens} tokens, {tokens.layout_name} between layers"
    ]
    for spec, choice in zip(plan.specs, plan.choices, strict=True):
        lines.append(f"{spec}: {choice.strategy} ({choice.reason})")
        lines.append(f"  {_traffic(plan.traffic(spec))}")
        if choice.strategy == "docs":
            known = "" if plan.sizes.hidden_dim else "; bytes unknown without hidden_dim"
            cut = _cut(plan.num_straddlers(spec))
            lines.append(f"  imbalance {plan.imbalance(spec):.1%}, {cut}{known}")
        if choice.strategy == "heads" and plan.tokens.size > 1:
            lines.append(f"  {_packing()}")
        lines += [f"  not {_rejected(candidate)}" for candidate in choice.rejected]
    return "\n".join(lines)


def _packing() -> str:
    on_cuda = choose_packing(torch.device("cuda"), torch.bfloat16)
    return f"packed by torch on the CPU, by {on_cuda.name} on CUDA ({on_cuda.reason})"


def _cut(num_straddlers: int) -> str:
    if not num_straddlers:
        return "no document is cut"
    return f"{num_straddlers} {'document is' if num_straddlers == 1 else 'documents are'} cut"


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
