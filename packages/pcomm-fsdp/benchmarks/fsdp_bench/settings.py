"""What is compared, as data, and the settings of a run. Needs no torch.

FSDP2's forms are a ladder: each has what the one before has and one thing more, up to a form that
has all that pcomm's have, on one communicator. So the ratio of two neighbours is what that one
thing is worth, and the last one is what pcomm is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core_bench.runner import option
from pcomm.core.errors import ConfigError

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
_ONE_CALL = replace(
    _SHIPPED,
    key="fsdp2-one-call",
    name="FSDP2 + separate_communicators",
    reduce="pairs",
    gather="pairs",
    reduce_on="reduce",
)
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
    _ONE_CALL,
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
    Change("separate_communicators, one call", _ONE_CALL.name, FSDP2),
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


MODELS = ("linear", "transformer")


@dataclass(frozen=True)
class Widths:
    """Sizes of a model.

    Args:
        width: Width of hidden states.
        depth: Layers, each of which is a unit.
        rows: Rows of the batch of each rank; the transformer makes sequences of 32 of them.
    """

    width: int
    depth: int
    rows: int


@dataclass(frozen=True)
class LinkRate:
    """The rates of each rank's links, and the size of its computation.

    Args:
        mbit_per_s: Rate of a link, each way, in 10^6 bits a second.
        batch: Batch of each rank, in multiples of the model's usual rows. Bytes do not depend on
            it, so it sets how long a step computes for each byte.
    """

    mbit_per_s: float = 400.0
    batch: int = 1

    @property
    def bytes_per_s(self) -> float:
        """The rate of a link each way, headers included."""
        return self.mbit_per_s * 1e6 / 8

    @property
    def name(self) -> str:
        """As it stands in rows; empty for the first one that was ever measured."""
        if self == LinkRate():
            return ""
        giga, mega = f"{self.mbit_per_s / 1000:g} Gbit/s", f"{self.mbit_per_s:g} Mbit/s"
        return f"{giga if self.mbit_per_s >= 1000 else mega}, batch x{self.batch}"


def _words(links: Sequence[LinkRate]) -> str:
    return ",".join(
        f"{link.mbit_per_s:g}" + (f"x{link.batch}" if link.batch > 1 else "") for link in links
    )


def _links(text: str) -> tuple[LinkRate, ...]:
    """The links of `400,2000x4`."""
    found = []
    for word in text.split(","):
        rate, _, batch = word.partition("x")
        try:
            found.append(LinkRate(float(rate), int(batch or 1)))
        except ValueError:
            raise ConfigError(
                f"pcomm bench fsdp --links {text}",
                found=f"{word!r}, which is no rate with a batch",
                why="A link is a number of Mbit/s, and where the batch is not the usual one, x and "
                "how many times as large it is.",
                fix=f"Write it like {_words(_LINKS)}.",
            ) from None
    return tuple(found)


# On the first, communication takes far longer than computation; on the second, computation does.
_LINKS = (LinkRate(), LinkRate(2000.0, 4))


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = option((2, 4), "data-parallel sizes")
    models: tuple[str, ...] = option(MODELS, "what is trained", metavar="NAME,NAME")
    links: tuple[LinkRate, ...] = option(
        _LINKS,
        f"Mbit/s of each link, and a larger batch beside it ({_words(_LINKS)})",
        metavar="M[xB],...",
        parse=_links,
    )
    forms: tuple[str, ...] = option(
        tuple(form.key for form in FORMS), "what is compared", metavar="KEY,KEY"
    )
    rounds: int = option(5, "turns of each case", metavar="R")
    # On one rank, where a turn is short.
    alone_rounds: int = 41
    # Tiny models, which take no time and show nothing.
    is_small: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2 or max(self.ranks) > 16:
            raise ConfigError(
                f"pcomm bench fsdp --ranks {','.join(map(str, self.ranks))}",
                found="a number of ranks below 2 or above 16",
                why="One rank sends nothing, and is measured in every run; the ranks share the "
                "cores of this machine.",
                fix="Use numbers such as 2,4.",
            )
        _check_known("--models", self.models, MODELS)
        _check_known("--forms", self.forms, tuple(form.key for form in FORMS))
        if self.rounds < 3 or self.alone_rounds < 3:
            raise ConfigError(
                f"pcomm bench fsdp --rounds {min(self.rounds, self.alone_rounds)}",
                found="fewer than 3 rounds",
                why="The median of so few is a matter of luck.",
                fix="Use 5.",
            )
        for link in self.links:
            if not 1 <= link.mbit_per_s <= 100_000 or not 1 <= link.batch <= 64:
                raise ConfigError(
                    f"pcomm bench fsdp --links {link.mbit_per_s:g}x{link.batch}",
                    found="a rate or a batch out of range",
                    why="A link below 1 Mbit/s takes for ever, and one above 100 Gbit/s is no "
                    "limit here; a batch is 1 to 64 times the usual one.",
                    fix="Use 400,2000x4.",
                )
        if not self.links or len(set(self.links)) < len(self.links):
            raise ConfigError(
                "pcomm bench fsdp --links",
                found="no link, or one of them twice",
                why="Rows are told apart by rate and batch.",
                fix="Use 400,2000x4.",
            )

    def chosen_forms(self) -> list[Form]:
        """The forms that are compared, in the order of tables."""
        return [form for form in FORMS if form.key in self.forms]

    def widths(self, model: str, link: LinkRate | None = None) -> Widths:
        """Sizes of a model: 18 and 9 MiB of parameters, unless small ones were asked for."""
        batch = 1 if link is None else link.batch
        if self.is_small:
            # Shards of the linear one are large enough, on up to 4 ranks, to go between pairs.
            return Widths(512 if model == "linear" else 64, 3, 32 * batch)
        if model == "linear":
            return Widths(768, 8, 192 * batch)
        return Widths(224, 4, 128 * batch)


def place_of(num_ranks: int, model: str, link: LinkRate) -> str:
    """The place of a measurement, as it stands in rows."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    return ", ".join(filter(None, (ranks, model, link.name)))


def _check_known(option: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"pcomm bench fsdp {option} {','.join(names)}",
            found=f"unknown: {', '.join(unknown) or 'no name at all'}",
            why="Names are those of this benchmark.",
            fix=f"Use some of {','.join(known)}.",
        )
