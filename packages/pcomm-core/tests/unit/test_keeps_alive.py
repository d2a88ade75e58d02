"""What an operation reads lives until it is waited for, whatever the backend keeps itself.

Torch's functions are replaced by ones that remember their input weakly: gloo happens to hold it,
so that on real ranks a collective which forgets its copy would go unnoticed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.protocol import Pending


class FakeGroup:
    """What collectives ask a process group for."""

    group_desc = "stand-in"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class WeakWork:
    """An operation that reads `source` when it is waited for."""

    def __init__(self, source: Tensor) -> None:
        self.source = weakref.ref(source)
        self.was_waited_for = False

    def wait(self) -> bool:
        assert self.source() is not None, "the input was freed while it was read"
        self.was_waited_for = True
        return True


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[WeakWork]:
    """Every operation that torch was asked for."""
    asked: list[WeakWork] = []

    def reading(place: int) -> Callable[..., WeakWork]:
        def start(*arguments: Any, **options: Any) -> WeakWork:
            asked.append(WeakWork(arguments[place]))
            return asked[-1]

        return start

    # Torch 2.13 renamed two of them; both names are offered.
    for name, place in (
        ("all_gather_single", 1),
        ("all_gather_into_tensor", 1),
        ("reduce_scatter_single", 1),
        ("reduce_scatter_tensor", 1),
        ("all_to_all_single", 1),
        ("all_reduce", 0),
        ("broadcast", 0),
    ):
        monkeypatch.setattr(dist, name, reading(place), raising=False)
    return asked


# Temporaries; but for the first three not dense: only the operation knows the copy that is read.
OPERATIONS: dict[str, Callable[[DistributedCollectives, Tensor], Pending]] = {
    "dense all_gather": lambda c, x: c.all_gather_async(x),
    "dense reduce_scatter": lambda c, x: c.reduce_scatter_async(x),
    "dense all_to_all": lambda c, x: c.all_to_all_async(x),
    "all_gather": lambda c, x: c.all_gather_async(x.t()),
    "all_gather along a dim": lambda c, x: c.all_gather_async(x, dim=1),
    "all_gather uneven": lambda c, x: c.all_gather_async(x, sizes=[x.shape[0], 1]),
    "reduce_scatter": lambda c, x: c.reduce_scatter_async(x.t()),
    "reduce_scatter along a dim": lambda c, x: c.reduce_scatter_async(x, dim=1),
    "reduce_scatter uneven": lambda c, x: c.reduce_scatter_async(x.t(), sizes=[1, 3]),
    "all_to_all": lambda c, x: c.all_to_all_async(x.t()),
    "all_reduce": lambda c, x: c.all_reduce_async(x),
    "broadcast": lambda c, x: c.broadcast_async(x, source=1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_temporary_input_lives_until_the_wait(operation: str, works: list[WeakWork]) -> None:
    # Collectives hold their group weakly.
    group = FakeGroup()
    collectives = DistributedCollectives(cast(dist.ProcessGroup, group))
    pending = OPERATIONS[operation](collectives, torch.ones(4, 4))
    gc.collect()
    (work,) = works
    assert work.source() is not None
    pending.wait()
    assert work.was_waited_for
    # And no longer: what has been waited for holds the result alone.
    is_result = operation in ("all_reduce", "broadcast")
    assert (work.source() is not None) == is_result


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_an_input_that_was_copied_is_free_at_once(operation: str, works: list[WeakWork]) -> None:
    group = FakeGroup()
    collectives = DistributedCollectives(cast(dist.ProcessGroup, group))
    x = torch.ones(4, 4)
    original = weakref.ref(x)
    pending = OPERATIONS[operation](collectives, x)
    del x
    gc.collect()
    assert original() is None
    pending.wait()
    assert len(works) == 1
