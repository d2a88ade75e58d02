"""The form of every replica and stage, from degrees and slow ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pcomm.core.topology import Topology
from pcomm.ntp.planning.degrees import size_of, survivors
from pcomm.ntp.planning.forms import Form, is_plain, plain, relative
from pcomm.ntp.planning.rank_speeds import RankSpeeds, combined

__all__ = ["FormTable"]


@dataclass(frozen=True)
class FormTable:
    """Forms by stage, few of which differ.

    Args:
        slow_rates: Speeds of the ranks of a replica and stage in which a slow rank is used.
        forms: The distinct forms of each stage, ascending by degree, then by form.
        indices: The index in `forms` of each stage (first index) and replica (second index); -1 of
            a replica that is dropped.
    """

    slow_rates: Mapping[tuple[int, int], Form]
    forms: tuple[tuple[Form, ...], ...]
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, topology: Topology, degrees: Sequence[Sequence[int]], slow: RankSpeeds
    ) -> FormTable:
        """Those of the degrees by replica and stage."""
        rates = _slow_rates(topology, degrees, slow) if slow else {}
        table, indices = [], []
        for stage in range(size_of(topology, "pp")):
            weighted = {at[0]: relative(own) for at, own in rates.items() if at[1] == stage}
            used = {own[stage] for replica, own in enumerate(degrees) if replica not in weighted}
            distinct = {*map(plain, used - {0}), *weighted.values()}
            forms = tuple(sorted(distinct, key=lambda form: (len(form), form)))
            by_degree = {len(form): index for index, form in enumerate(forms) if is_plain(form)}
            own = [by_degree.get(each[stage], -1) for each in degrees]
            for replica, form in weighted.items():
                own[replica] = forms.index(form)
            table.append(forms)
            indices.append(tuple(own))
        return cls(rates, tuple(table), tuple(indices))


def _slow_rates(
    topology: Topology, degrees: Sequence[Sequence[int]], slow: RankSpeeds
) -> dict[tuple[int, int], Form]:
    groups: dict[tuple[int, int], list[Form]] = {}
    for domain, rates in survivors(topology, slow).items():
        place = dict(domain)
        groups.setdefault((place["dp"], place.get("pp", 0)), []).append(rates)
    found = {
        (replica, stage): combined(own, degrees[replica][stage])
        for (replica, stage), own in groups.items()
        if degrees[replica][stage]
    }
    return {at: rates for at, rates in found.items() if min(rates) < 1}
