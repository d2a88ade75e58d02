"""The forms of `pcomm bench fsdp`: what differs between them is what their names say."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from fsdp_bench.settings import (
    CHANGES,
    COMPARED,
    FORMS,
    FSDP2,
    ONE,
    OURS,
    THEIRS,
    TUNED,
    TWO_RAILS,
    Form,
    Fsdp2Form,
    OurForm,
)
from pcomm.fsdp.settings import CommPolicy

BY_NAME = {form.name: form for form in FORMS}


def differences(one: Form, other: Form) -> set[str]:
    names = {field.name for field in fields(one)} - {"key", "name"}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def test_names_and_keys_tell_forms_apart() -> None:
    assert len(BY_NAME) == len({form.key for form in FORMS}) == len(FORMS)
    assert {*THEIRS, *OURS} == BY_NAME.keys()
    # They stand in lists with commas, and in rows before an @.
    assert not any("," in form.key or "@" in form.name for form in FORMS)


def test_the_first_steps_lead_from_fsdp2_to_pcomm_on_two_rails() -> None:
    path = CHANGES[: next(i for i, c in enumerate(CHANGES) if c.after == TWO_RAILS) + 1]
    assert path[0].before == FSDP2
    assert all(one.after == other.before for one, other in pairwise(path))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_is_one_thing(change: object) -> None:
    before, after = BY_NAME[change.before], BY_NAME[change.after]  # type: ignore[attr-defined]
    if isinstance(before, Fsdp2Form) and isinstance(after, OurForm):
        assert (before.name, after.name) == (TUNED, ONE)
        return
    assert len(differences(before, after)) == 1


def test_tuned_has_what_one_group_of_ours_has() -> None:
    """All that pcomm takes as an advantage; only then is the rest pcomm's own."""
    theirs, ours = BY_NAME[TUNED], BY_NAME[ONE]
    assert isinstance(theirs, Fsdp2Form)
    assert isinstance(ours, OurForm)
    comm = CommPolicy(prefetch=ours.prefetch)
    assert theirs.prefetch == comm.prefetch
    assert theirs.num_kept == 1 + comm.prefetch
    assert (theirs.reduce, theirs.gather, ours.has_pairs) == ("pairs", "pairs", True)
    assert not theirs.waits_for_reduce
    assert theirs.reduce_on == ours.reduce_on == "gather"
    assert differences(theirs, replace(theirs, key="x", name="y")) == set()


def test_each_of_ours_is_compared_with_fsdp2_as_shipped() -> None:
    assert {ours for ours, theirs in COMPARED if theirs == FSDP2} == set(OURS)
    assert {one for pair in COMPARED for one in pair} <= BY_NAME.keys()
