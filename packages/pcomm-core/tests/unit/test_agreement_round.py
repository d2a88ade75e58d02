"""A round of agreement that ends while the next generation begins."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pcomm.core.control.agreement_round import AgreementRound
from pcomm.core.errors import FencedError


@pytest.mark.parametrize("is_said", [True, False])
def test_what_was_said_before_the_next_generation_began_is_heard(is_said: bool) -> None:
    """A rank may read the text and begin the next generation between two looks of another one."""
    store, looks = dist.HashStore(), 0

    def check_fence() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            if is_said:
                round_.say("lines", "the same")
            raise FencedError("test", found="a generation", why="it has begun", fix="enter it")

    round_ = AgreementRound(
        store, "prefix", "topic", 0, (0, 1), timeout_s=3600.0, check_fence=check_fence
    )
    if is_said:
        assert round_.hear("lines") == "the same"
    else:
        with pytest.raises(FencedError):
            round_.hear("lines")
    assert looks == 2
