"""Segments: ranges of units between the cuts of all forms, each with one owner per form.

With natural order in every replica, a segment lies on exactly one rank of each of them. So one
reduction over these owners sums its gradients, and nothing moves inside a tensor-parallel group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pcomm.ntp.planning.forms import Form, cuts, plain

__all__ = ["Segment", "SegmentGroup", "segment_groups", "segments"]


@dataclass(frozen=True)
class Segment:
    """Units `start` to `stop - 1`, which one rank holds in each group of a form.

    Args:
        start: First unit.
        stop: The unit after the last one.
        owners: Pairs of a form and the index, in a tensor-parallel group of this form, of the
            rank that holds the units; ascending by degree, then by form.
    """

    start: int
    stop: int
    owners: tuple[tuple[Form, int], ...]

    def owner(self, form: Form | int) -> int:
        """Index of the rank that holds the units in a group of this form, or plain degree."""
        return dict(self.owners)[plain(form) if isinstance(form, int) else form]


@dataclass(frozen=True)
class SegmentGroup:
    """Ranks whose gradients of one range of units are summed.

    Args:
        start: First unit; 0 for a replicated parameter.
        stop: The unit after the last one; 0 for a replicated parameter.
        ranks: Global ranks, ascending: the owner of the range in each tensor-parallel group, or
            all ranks of all groups for a replicated parameter.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]


def segments(count: int, forms: Iterable[Form | int]) -> tuple[Segment, ...]:
    """The segments of `count` units for all `forms` at once, ascending.

    For plain degrees N1 and N2 there are at most N1 + N2 - gcd(N1, N2).

    Args:
        count: Number of units, at least the largest degree.
        forms: Forms of tensor-parallel groups, or plain degrees; repeated ones count once.
    """
    distinct = {plain(form) if isinstance(form, int) else form for form in forms}
    ordered = sorted(distinct, key=lambda form: (len(form), form))
    boundaries = [(form, cuts(count, form)) for form in ordered]
    union = sorted({cut for _, own in boundaries for cut in own})
    return tuple(
        Segment(
            start, stop, tuple((form, bisect_right(own, start) - 1) for form, own in boundaries)
        )
        for start, stop in pairwise(union)
    )


def segment_groups(
    found: Sequence[Segment], groups: Sequence[tuple[int, Sequence[int]]]
) -> tuple[SegmentGroup, ...]:
    """The ranks that hold each segment, one of each tensor-parallel group.

    Args:
        found: Segments of a stage.
        groups: The index of its form among those of the stage, and the ranks that are used, of each
            tensor-parallel group.
    """
    sums = []
    for segment in found:
        # Owners stand in the order of the forms.
        owners = [index for _, index in segment.owners]
        ranks = sorted(own[owners[form]] for form, own in groups)
        sums.append(SegmentGroup(segment.start, segment.stop, tuple(ranks)))
    return tuple(sums)
