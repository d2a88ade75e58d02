"""All forms of the exchange of one pack, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.bench.exchange_case import Case, Numbers
from pcomm.gdn_cp.bench.fused_exchange import column_order, fused_exchange
from pcomm.gdn_cp.bench.planned_forms import (
    documents_case,
    gather_case,
    heads_case,
    plan_of,
    state_case,
)
from pcomm.gdn_cp.bench.sequence_loop import Cut, sequence_loop, slices, split
from pcomm.gdn_cp.bench.settings import SPEC, Pack
from pcomm.gdn_cp.layer_moves import Plan
from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = ["FORMS", "build_form", "obstacle"]

LOOPS: dict[str, Cut] = {"loop": slices, "split loop": split}
PLANNED: dict[StrategyName, Callable[[Numbers, Plan], Case | None]] = {
    "heads": heads_case,
    "docs": documents_case,
    "state": state_case,
    "gather": gather_case,
}
FORMS: tuple[str, ...] = (*LOOPS, "fused", *PLANNED)

# Of one rank's maps, after the gather. Some hundred segments have more bytes than the tokens
# themselves, and all ranks of this machine share its memory.
_MOST_STATE_BYTES = 128 << 20
# Above so many sequences, forms that handle them one by one are timed with one kind of lengths.
_MOST_TWICE = 16
_MOST_KIND = 64


def build_form(name: str, numbers: Numbers, collectives: Collectives) -> Case | None:
    """The form of this name; None where it has nothing to exchange."""
    for strategy, case_of in PLANNED.items():
        if strategy == name:
            return case_of(numbers, plan_of(numbers.cu_seqlens, collectives, strategy))
    if name == "fused":
        exchange = partial(
            fused_exchange,
            cu_seqlens_N=torch.tensor(numbers.cu_seqlens),
            columns_W=column_order(numbers.size),
        )
    else:
        exchange = partial(sequence_loop, cu_seqlens=numbers.cu_seqlens, cut=LOOPS[name])
    return numbers.by_heads(partial(exchange, collectives=differentiable(collectives)))


def obstacle(name: str, pack: Pack, collectives: Collectives) -> str:
    """Why a form is left out of a pack; empty if it is not."""
    # Their time is that of so many messages, so once is enough; it is seconds a round.
    if name in (*LOOPS, "state") and not pack.is_random and pack.num_sequences > _MOST_TWICE:
        return "timed with random lengths only"
    if name == "split loop" and pack.num_sequences > _MOST_KIND:
        return "it is to `loop` as with fewer sequences, and takes long"
    if name != "state":
        return ""
    traffic = plan_of(pack.cu_seqlens, collectives, "state").traffic(SPEC)
    # Forward every rank sends its maps to all others, and backward it sends what those had.
    gathered = traffic.backward_bytes + traffic.forward_bytes // (collectives.size - 1)
    if gathered > _MOST_STATE_BYTES:
        return f"each rank would gather {gathered / 1e6:.0f} MB of maps"
    return ""
