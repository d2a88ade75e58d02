"""From a form, which is data, to a model that trains in it."""

from __future__ import annotations

from collections.abc import Mapping

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.group import Group
from pcomm.fsdp.bench.forms import Form, Fsdp2Form, OurForm
from pcomm.fsdp.bench.fsdp2 import Fsdp2
from pcomm.fsdp.bench.models import Problem
from pcomm.fsdp.bench.trainings import Sharding, Training
from pcomm.fsdp.bench.without_pairs import WithoutPairs
from pcomm.fsdp.settings.policy import CommPolicy

__all__ = ["make"]


def make(form: Form, problem: Problem, groups: Mapping[str, Group]) -> Training:
    """A new model in a form. Collective over the groups.

    Args:
        form: The form of the model.
        problem: The model.
        groups: Groups of the same ranks by what they are for: `"gather"`, `"reduce"` and
            `"other rail"`.
    """
    if isinstance(form, OurForm):
        return _make_ours(form, problem, groups)
    return _make_theirs(form, problem, groups)


def _make_ours(form: OurForm, problem: Problem, groups: Mapping[str, Group]) -> Training:
    gather, reduce = groups["gather"], groups[form.reduce_on]
    if not form.has_pairs:
        gather, reduce = (one.with_collectives(_without_pairs(one)) for one in (gather, reduce))
    comm = CommPolicy(prefetch=form.prefetch, prefetch_backward=form.prefetch_backward)
    return Sharding(problem, gather, reduce, comm)


def _make_theirs(form: Fsdp2Form, problem: Problem, groups: Mapping[str, Group]) -> Training:
    own = groups["gather"]
    assert own.process_group is not None
    reduce: Collectives | None = None
    if form.reduce == "all-to-all":
        reduce = _without_pairs(groups[form.reduce_on])
    elif form.reduce == "pairs":
        reduce = groups[form.reduce_on].collectives
    return Fsdp2(
        problem,
        own.process_group,
        gather=own.collectives if form.gather == "pairs" else None,
        reduce=reduce,
        prefetch=form.prefetch,
        waits_for_reduce=form.waits_for_reduce,
        num_kept=form.num_kept,
    )


def _without_pairs(group: Group) -> WithoutPairs:
    assert group.process_group is not None
    return WithoutPairs(group.process_group)
