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

__all__ = ["FORMS", "build_form", "obstacle"]

LOOPS = ("loop", "split loop")
FORMS = (*LOOPS, "fused", "heads", "docs", "state", "gather")

# Of one rank's maps, after the gather. Some hundred segments have more bytes than the tokens
# themselves, and all ranks of this machine share its memory.
_MOST_STATE_BYTES = 128 << 20
# Above so many sequences, forms that handle them one by one are timed with one kind of lengths.
_MOST_TWICE = 16
_MOST_KIND = 64


def build_form(name: str, numbers: Numbers, collectives: Collectives) -> Case | None:
    """The form of this name; None where it has nothing to exchange."""
    build: dict[str, Callable[[], Case | None]] = {
        "loop": lambda: _loop(numbers, slices, collectives),
        "split loop": lambda: _loop(numbers, split, collectives),
        "fused": lambda: _fused(numbers, collectives),
        "heads": lambda: heads_case(numbers, plan_of(numbers.cu_seqlens, collectives, "heads")),
        "docs": lambda: documents_case(numbers, plan_of(numbers.cu_seqlens, collectives, "docs")),
        "state": lambda: state_case(numbers, plan_of(numbers.cu_seqlens, collectives, "state")),
        "gather": lambda: gather_case(numbers, plan_of(numbers.cu_seqlens, collectives, "gather")),
    }
    return build[name]()


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


def _loop(numbers: Numbers, cut: Cut, collectives: Collectives) -> Case:
    exchange = partial(
        sequence_loop,
        cu_seqlens=numbers.cu_seqlens,
        cut=cut,
        collectives=differentiable(collectives),
    )
    return numbers.by_heads(exchange)


def _fused(numbers: Numbers, collectives: Collectives) -> Case:
    exchange = partial(
        fused_exchange,
        cu_seqlens_N=torch.tensor(numbers.cu_seqlens),
        columns_W=column_order(numbers.size),
        collectives=differentiable(collectives),
    )
    return numbers.by_heads(exchange)
