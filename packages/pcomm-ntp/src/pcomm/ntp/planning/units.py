"""What a parameter may be split into: units that stay whole, such as attention groups.

How fast a replica is, and how much a rank holds, follows from counts of units alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

from pcomm.core.errors import ConfigError, LayoutError, near_misses
from pcomm.core.layout import Layout, Run
from pcomm.ntp.planning.cuts import busiest, sizes

__all__ = ["KINDS", "Units", "find_units", "lies_as_planned", "memory_growth", "relative_speed"]


KINDS: Mapping[str, int] = {
    "gqa": 3,
    "gated": 2,
    "columns": 1,
    "vocab": 1,
    "fused": -1,
    "replicated": 0,
}
"""Number of sections of each kind, -1 for any of at least 1; each is a class method of `Units`."""


@dataclass(frozen=True)
class Units:
    """The units of one split dimension, made by one of the class methods.

    Args:
        kind: Name of the class method.
        count: Number of units, 0 if the parameter is replicated.
        sections: Positions of one unit in each section of the dimension. The sections lie one
            after another, as queries, keys and values of a fused projection do.
        work: Share of the step that is computed with these units, relative to the `work` of the
            others of a plan. It decides how much an uneven cut slows a replica down.

    Raises:
        ConfigError: An unknown kind, or a number that no parameter has.
    """

    kind: str
    count: int
    sections: tuple[int, ...]
    work: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"Units: kind {self.kind!r}",
                found=f"kinds {', '.join(KINDS)}",
                why="The kind says which rows belong together.",
                fix=near_misses(self.kind, KINDS),
            )
        wanted = KINDS[self.kind]
        is_complete = len(self.sections) == wanted or (wanted < 0 and len(self.sections) > 0)
        is_sound = is_complete and min(self.sections, default=1) > 0
        is_counted = self.count > 0 if self.is_split else self.count == 0
        if not is_counted or self.work < 0 or not is_sound:
            raise ConfigError(
                f"Units: {self.kind}",
                found=f"{self.count} units of {self.sections} positions, work {self.work}",
                why="There is at least one unit, of at least one position in each section; a "
                "replicated parameter has neither.",
                fix="Give sizes of at least 1 and work of at least 0, or Units.replicated().",
            )

    # -- kinds -----------------------------------------------------------------------------

    @classmethod
    def gqa(cls, *, q: int, kv: int, dim: int, work: int = 1) -> Units:
        """Fused query, key and value rows; a unit is one key head with all its query heads.

        Args:
            q: Number of query heads, a multiple of `kv`.
            kv: Number of key heads.
            dim: Rows of one head.
            work: Share of the step, relative to other units.
        """
        if kv < 1 or q < 1 or q % kv:
            raise ConfigError(
                f"Units.gqa: q={q}, kv={kv}",
                found="query heads that are no multiple of the key heads",
                why="Every key head serves the same number of query heads, which stay with it.",
                fix="Give q as a multiple of kv, both at least 1.",
            )
        return cls("gqa", kv, (q // kv * dim, dim, dim), work)

    @classmethod
    def gated(cls, columns: int, *, block: int = 1, work: int = 1) -> Units:
        """Rows `[gate; up]` of a gated MLP; gate row i and up row i stay on one rank.

        Args:
            columns: Rows of the gate, and of the up projection.
            block: Rows that stay together.
            work: Share of the step, relative to other units.
        """
        return cls("gated", _blocks("gated", columns, block), (block, block), work)

    @classmethod
    def columns(cls, columns: int, *, block: int = 1, work: int = 1) -> Units:
        """Plain columns or rows, such as the input of an MLP's second matrix.

        Args:
            columns: Length of the split dimension.
            block: Positions that stay together, such as the columns of a head.
            work: Share of the step, relative to other units.
        """
        return cls("columns", _blocks("columns", columns, block), (block,), work)

    @classmethod
    def fused(cls, count: int, *, sections: Sequence[int], work: int = 1) -> Units:
        """Sections side by side of which every unit has some positions in each.

        A key head of Gated DeltaNet in `[q; k; v; z; b; a]` with the value heads that it serves
        is such a unit, and so is a group of Mamba-2 with its heads.

        Args:
            count: Number of units.
            sections: Positions of one unit in each section, in the order of the sections.
            work: Share of the step, relative to other units.
        """
        return cls("fused", count, tuple(sections), work)

    @classmethod
    def vocab(cls, rows: int, *, block: int = 1, work: int = 0) -> Units:
        """Rows of a vocabulary, which keep their order over the ranks.

        Args:
            rows: Length of the vocabulary.
            block: Rows that stay together.
            work: Share of the step, relative to other units.
        """
        return cls("vocab", _blocks("vocab", rows, block), (block,), work)

    @classmethod
    def replicated(cls) -> Units:
        """A parameter that every rank of a tensor-parallel group holds whole."""
        return cls("replicated", 0, (), 0)

    # -- what it says ----------------------------------------------------------------------

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts."""
        return self.kind != "replicated"

    def layout(self, degree: int | Sequence[Fraction]) -> Layout:
        """Positions of each rank of a tensor-parallel group, in rank order.

        Args:
            degree: Number of ranks of equal speed, or the speed of each: the form of a group.

        Raises:
            LayoutError: A replicated parameter, or more ranks than units.
        """
        ranks = degree if isinstance(degree, int) else len(degree)
        self.check_degree(ranks)
        own = sizes(self.count, degree)
        return Layout.sections(Layout.uneven([n * size for size in own]) for n in self.sections)

    def sizes(self, degree: int | Sequence[Fraction]) -> tuple[int, ...]:
        """Number of units of each rank, for a degree or speeds."""
        return sizes(self.count, degree)

    def most_units(self, degree: int | Sequence[Fraction]) -> int:
        """Number of units of the rank that has most of them, for a degree or speeds."""
        if isinstance(degree, int):
            return -(-self.count // degree)
        return max(sizes(self.count, degree))

    def efficiency(self, degree: int | Sequence[Fraction]) -> Fraction:
        """Mean over maximum time of a rank: 1 if the cut is even, for a degree or speeds."""
        total = degree if isinstance(degree, int) else sum(degree, Fraction(0))
        return self.count / (total * busiest(self.count, degree))

    def check_degree(self, degree: int) -> None:
        """Raise `LayoutError` unless each of `degree` ranks can have at least one unit."""
        if not self.is_split or not 1 <= degree <= self.count:
            raise LayoutError(
                f"Units: {self.count} units ({self.kind}) over {degree} ranks",
                found="a replicated parameter" if not self.is_split else f"{self.count} units",
                why="Each rank of a tensor-parallel group has at least one whole unit.",
                fix=f"Use a tensor-parallel degree from 1 to {self.count}, or smaller units."
                if self.is_split
                else "Hold it whole on each rank.",
            )


def _blocks(kind: str, length: int, block: int) -> int:
    if block < 1 or length < 1 or length % block:
        raise ConfigError(
            f"Units.{kind}: {length} positions in blocks of {block}",
            found="no whole number of blocks",
            why="A block stays on one rank, so the dimension consists of whole blocks.",
            fix="Give a length that is a multiple of block, both at least 1.",
        )
    return length // block


def find_units(units: Sequence[tuple[str, Units]], name: str) -> tuple[str, Units] | None:
    """The key and the units of the parameter `name`; None if no key is or matches it.

    Args:
        units: Pairs of a key and its units. A key is a name, or a pattern of `fnmatch` in which
            `*` stands for any characters, `?` for one, and `[ab]` for one of several.
        name: Name of a parameter, or a key itself. A key that equals it comes before patterns.

    Returns:
        The first of the patterns that match, if they all say the same.

    Raises:
        ConfigError: Two patterns match and say different things.
    """
    for key, own in units:
        if key == name:
            return key, own
    found = [(key, own) for key, own in units if fnmatchcase(name, key)]
    for key, own in found[1:]:
        if own != found[0][1]:
            raise ConfigError(
                f"Plan.units_of: {name!r}",
                found=f"{found[0][0]!r} says {found[0][1]}, and {key!r} says {own}",
                why="A parameter is split in one way, and both patterns match its name.",
                fix=f"Narrow one of the patterns, or add {name!r} itself, which comes before both.",
            )
    return found[0] if found else None


def relative_speed(units: Sequence[Units], over: int | Sequence[Fraction], full: int) -> Fraction:
    """Time of a stage at the full degree over its time with the given ranks: 1 for a healthy one.

    The busiest rank sets the time: for each kind of units, its number of units over its speed and
    over their number, weighted by their work. Without any work, the speeds are added up.

    Args:
        units: Units of all parameters.
        over: Number of healthy ranks, or the speed of each rank.
        full: Tensor-parallel degree without failures.
    """

    def time(ranks: int | Sequence[Fraction]) -> Fraction:
        split = [u for u in units if u.is_split and u.work]
        longest = sum((u.work * busiest(u.count, ranks) / u.count for u in split), Fraction(0))
        total = Fraction(ranks) if isinstance(ranks, int) else sum(ranks, Fraction(0))
        return longest or 1 / total

    return time(full) / time(over)


def memory_growth(
    units: Mapping[str, Units],
    over: int | Sequence[Fraction],
    full: int,
    own_bytes: Mapping[str, int] | None = None,
) -> Fraction:
    """Bytes of split units on the fullest rank over those at the full degree, at most.

    Args:
        units: Units by name.
        over: Degree, or the speeds of the ranks.
        full: Tensor-parallel degree without failures.
        own_bytes: Bytes of each split name on a rank at the full degree. Without them all count as
            those that grow most.
    """
    grown = {
        name: Fraction(one.most_units(over), one.most_units(full))
        for name, one in units.items()
        if one.is_split
    }
    total = sum(own_bytes.values()) if own_bytes else 0
    if own_bytes and total:
        return sum((grown[name] * own for name, own in own_bytes.items()), Fraction(0)) / total
    return max(grown.values(), default=Fraction(1))


def lies_as_planned(declared: Layout, planned: Layout) -> bool:
    """Whether every rank holds the same positions in the same order, however cut into runs."""
    if (declared.length, declared.size) != (planned.length, planned.size):
        return False
    return list(map(_joined, declared.runs)) == list(map(_joined, planned.runs))


def _joined(runs: tuple[Run, ...]) -> list[Run]:
    """Runs with neighbours that touch joined into one."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
