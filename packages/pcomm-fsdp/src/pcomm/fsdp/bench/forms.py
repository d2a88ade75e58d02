"""The forms of training that are compared, as data. Needs no torch.

FSDP2's forms are a ladder: each has what the one before has and one thing more, up to a form that
has all that pcomm's have, on one communicator. So the ratio of two neighbours is what that one
thing is worth, and the last one is what pcomm is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "CHANGES",
    "COMPARED",
    "FORMS",
    "FSDP2",
    "LESS_MEMORY",
    "NO_PAIRS",
    "NO_PREFETCH",
    "ONE",
    "OURS",
    "THEIRS",
    "TUNED",
    "TUNED_TWO",
    "TUNED_TWO_RAILS",
    "TWO",
    "TWO_RAILS",
    "UNSHARDED",
    "Change",
    "Form",
    "Fsdp2Form",
    "OurForm",
]

ReduceOn = Literal["gather", "reduce", "other rail"]
"""Communicator of the reduces: that of the gathers, a second one on their rail, one on rail 2."""


@dataclass(frozen=True)
class Fsdp2Form:
    """A form of torch's fully_shard; the defaults are FSDP2 as shipped.

    Args:
        key: Its name on the command line.
        name: Its name in rows and tables.
        reduce: Torch's reduce-scatter (on gloo an all-reduce of which a part is kept), an
            all-to-all and a local sum (half the bytes), or pcomm's (those bytes, between pairs of
            ranks).
        gather: Torch's all-gather, or pcomm's.
        prefetch: Units gathered ahead by explicit lists, forward and backward; 0 for none.
        waits_for_reduce: True to end each reduce before the next unit computes. FSDP2 does
            that on a CPU, where it has no streams. With False a reduce is waited for after the
            next one was issued, as pcomm does it.
        num_kept: Last units that stay gathered from forward to backward.
        reduce_on: Communicator of the reduces.
    """

    key: str
    name: str
    reduce: Literal["torch", "all-to-all", "pairs"] = "torch"
    gather: Literal["torch", "pairs"] = "torch"
    prefetch: int = 0
    waits_for_reduce: bool = True
    num_kept: int = 0
    reduce_on: ReduceOn = "gather"


@dataclass(frozen=True)
class OurForm:
    """A form of pcomm's fully_shard.

    Args:
        key: Its name on the command line.
        name: Its name in rows and tables.
        prefetch: Units gathered ahead; the last `1 + prefetch` stay from forward to backward.
        prefetch_backward: Units gathered ahead in backward; None for `prefetch`.
        has_pairs: True to send large collectives between pairs of ranks. With False gathers are
            torch's, and reduces an all-to-all and a local sum.
        reduce_on: Communicator of the reduces.
    """

    key: str
    name: str
    prefetch: int = 1
    prefetch_backward: int | None = None
    has_pairs: bool = True
    reduce_on: ReduceOn = "reduce"


Form = Fsdp2Form | OurForm


@dataclass(frozen=True)
class Change:
    """One thing that two forms differ in.

    Args:
        name: Name of the change.
        after: Name of the form that has it.
        before: Name of the form that does not.
    """

    name: str
    after: str
    before: str


UNSHARDED = "unsharded"
"""The model in one process, always measured: it says how long computing takes."""

_SHIPPED = Fsdp2Form("fsdp2", "FSDP2")
_BYTES = replace(_SHIPPED, key="fsdp2-bytes", name="FSDP2 + all-to-all reduce", reduce="all-to-all")
_REDUCE = replace(_BYTES, key="fsdp2-reduce", name="FSDP2 + our reduce", reduce="pairs")
_GATHER = replace(_REDUCE, key="fsdp2-gather", name="FSDP2 + our gather", gather="pairs")
_AHEAD = replace(_GATHER, key="fsdp2-ahead", name="FSDP2 + prefetch lists", prefetch=1)
_OVERLAP = replace(
    _AHEAD, key="fsdp2-overlap", name="FSDP2 + reduces under way", waits_for_reduce=False
)
_TUNED = replace(_OVERLAP, key="fsdp2-tuned", name="FSDP2 fully tuned", num_kept=2)
_TUNED_TWO = replace(
    _TUNED, key="fsdp2-2-groups", name="FSDP2 fully tuned, 2 groups", reduce_on="reduce"
)
_TUNED_TWO_RAILS = replace(
    _TUNED, key="fsdp2-2-rails", name="FSDP2 fully tuned, 2 rails", reduce_on="other rail"
)
_ONE = OurForm("ours-1-group", "pcomm, 1 group", reduce_on="gather")
_NO_PAIRS = OurForm("ours-no-pairs", "pcomm, 2 groups, no pairs", has_pairs=False)
_NO_PREFETCH = OurForm("ours-no-prefetch", "pcomm, 2 groups, no prefetch", prefetch=0)
_LESS_MEMORY = OurForm("ours-less-memory", "pcomm, 2 groups, less memory", prefetch_backward=0)
_TWO = OurForm("ours-2-groups", "pcomm, 2 groups")
_TWO_RAILS = OurForm("ours-2-rails", "pcomm, 2 groups, 2 rails", reduce_on="other rail")

FORMS: tuple[Form, ...] = (
    _SHIPPED,
    _BYTES,
    _REDUCE,
    _GATHER,
    _AHEAD,
    _OVERLAP,
    _TUNED,
    _TUNED_TWO,
    _TUNED_TWO_RAILS,
    _ONE,
    _NO_PAIRS,
    _NO_PREFETCH,
    _LESS_MEMORY,
    _TWO,
    _TWO_RAILS,
)
"""All forms, in the order of tables. Those that do not say so use one rail."""

FSDP2, TUNED = _SHIPPED.name, _TUNED.name
TUNED_TWO, TUNED_TWO_RAILS = _TUNED_TWO.name, _TUNED_TWO_RAILS.name
ONE, NO_PAIRS, NO_PREFETCH = _ONE.name, _NO_PAIRS.name, _NO_PREFETCH.name
LESS_MEMORY = _LESS_MEMORY.name
TWO, TWO_RAILS = _TWO.name, _TWO_RAILS.name
THEIRS = tuple(form.name for form in FORMS if isinstance(form, Fsdp2Form))
OURS = tuple(form.name for form in FORMS if isinstance(form, OurForm))

CHANGES = (
    # From FSDP2 as shipped to pcomm on two rails: the product is the whole gain.
    Change("half the bytes in reduces", _BYTES.name, FSDP2),
    Change("pairs in reduces", _REDUCE.name, _BYTES.name),
    Change("pairs in gathers", _GATHER.name, _REDUCE.name),
    Change("gathers ahead", _AHEAD.name, _GATHER.name),
    Change("reduces beside computing", _OVERLAP.name, _AHEAD.name),
    Change("2 units kept", TUNED, _OVERLAP.name),
    Change("pcomm in place of FSDP2", ONE, TUNED),
    Change("separate communicators", TWO, ONE),
    Change("a rail for reduces", TWO_RAILS, TWO),
    # The same things in other surroundings.
    Change("FSDP2: separate communicators", TUNED_TWO, TUNED),
    Change("FSDP2: a rail for reduces", TUNED_TWO_RAILS, TUNED_TWO),
    Change("pcomm: pairs", TWO, NO_PAIRS),
    Change("pcomm: gathers ahead, 1 unit more kept", TWO, NO_PREFETCH),
    Change("pcomm: gathers ahead in backward alone", TWO, LESS_MEMORY),
)
"""The changes that tables take apart."""

COMPARED = (
    *((ours, FSDP2) for ours in OURS),
    (ONE, TUNED),
    (TWO, TUNED),
    (TWO, TUNED_TWO),
    (TWO_RAILS, TUNED),
    (TWO_RAILS, TUNED_TWO_RAILS),
    (TWO_RAILS, ONE),
)
"""Each of ours, and what it is compared with."""
