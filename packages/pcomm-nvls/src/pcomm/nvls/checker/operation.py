"""Operations of a sequence, the place of a CTA in it, and what a protocol is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from typing import Protocol as StructuralType

from pcomm.core.errors import ConfigError
from pcomm.nvls.checker.steps import Step


@dataclass(frozen=True)
class Operation:
    """One operation that every rank launches, as one kernel on the rank's only stream.

    Args:
        kind: Name of the operation; the protocol knows its meaning.
        counts: Number of elements of each rank's segment; its length is the number of ranks.
        ctas: Number of CTAs, the same on all ranks, or one number for each rank.
        slot: Slot that was fixed beforehand, as for an operation in a captured graph, or None if
            the protocol's rotation chooses it.
        seam: True if the host does not know which slot the operation before it used: the first
            one of a captured graph, and the first one outside after a graph was replayed.
        root: Rank that receives, for operations with one receiver.
    """

    kind: str
    counts: tuple[int, ...]
    ctas: int | tuple[int, ...] = 1
    slot: int | None = None
    seam: bool = False
    root: int = 0

    def __post_init__(self) -> None:
        ctas = self.ctas if isinstance(self.ctas, tuple) else (self.ctas,) * self.size
        wrong = not self.counts or len(ctas) != self.size or min(*ctas, *self.counts) < 0
        if wrong or not 0 <= self.root < self.size:
            raise ConfigError(
                f"Operation: {self.kind!r}",
                found=f"counts {self.counts}, ctas {self.ctas}, root {self.root}",
                why="Each rank has a number of elements and of CTAs, none below 0.",
                fix="Give one count for each rank, and one number of CTAs for all or for each.",
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    def ctas_of(self, rank: int) -> int:
        """Number of CTAs that a rank launches."""
        return self.ctas[rank] if isinstance(self.ctas, tuple) else self.ctas

    def segment(self, rank: int) -> range:
        """Elements of a rank's segment, when the segments of all ranks lie one after another."""
        start = sum(self.counts[:rank])
        return range(start, start + self.counts[rank])

    def __str__(self) -> str:
        text = f"{self.kind}{list(self.counts)}"
        if self.ctas != 1:
            text += f" x{self.ctas} CTAs"
        if self.slot is not None:
            text += f" in slot {self.slot}"
        return text + (" after a seam" if self.seam else "")


class Place(NamedTuple):
    """A CTA of an operation on a rank.

    Attributes:
        number: Number of the operation in the sequence, from 0.
        rank: Rank.
        cta: Number of the CTA on the rank.
    """

    number: int
    rank: int
    cta: int


class Protocol(StructuralType):
    """The steps of each CTA; a generator function will do."""

    def __call__(self, operations: Sequence[Operation], place: Place, /) -> Iterable[Step]:
        """Return the steps of one CTA in program order.

        Args:
            operations: The whole sequence. A protocol of a real workspace depends on the
                operations up to `place.number` alone.
            place: Operation, rank and CTA in question.
        """
        ...
