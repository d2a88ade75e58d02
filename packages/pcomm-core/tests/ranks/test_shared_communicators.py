"""Several handles around one communicator, at sizes on both sides of core's threshold.

Operations of a communicator are matched by their order, so what keeps the order (tags, the queue)
belongs to the communicator and not to the handle that an operation is issued through.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ClosedError
from pcomm.core.groups.device_mesh import device_mesh, groups_from_device_mesh
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

# Elements of a shard: torch's own operation, pairs with one piece, pairs with several.
SIZES = [1024, 128 * 1024, 512 * 1024]


def values(x: Tensor) -> set[float]:
    """The smallest and the largest: one number where all are equal."""
    return {x.min().item(), x.max().item()}


def two_at_once(one: Collectives, other: Collectives, length: int) -> None:
    """Reduce-scatters and gathers under way through both, waited for in the other order."""
    whole = length * one.size
    sums = [
        one.reduce_scatter_async(torch.full((whole,), 1.0)),
        other.reduce_scatter_async(torch.full((whole,), 100.0)),
        one.reduce_scatter_async(torch.full((whole,), 10000.0)),
    ]
    gathered = [
        other.all_gather_async(torch.full((length,), 1.0 + other.rank)),
        one.all_gather_async(torch.full((length,), 100.0 + one.rank)),
    ]
    for pending, value in reversed(list(zip(sums, [1.0, 100.0, 10000.0], strict=True))):
        assert values(pending.wait()) == {one.size * value}
    for pending, first in reversed(list(zip(gathered, [1.0, 100.0], strict=True))):
        parts = pending.wait().view(one.size, length)
        assert [values(part) for part in parts] == [{first + r} for r in range(one.size)]


def spied(group: Group) -> Collectives:
    return SpyCollectives(group.collectives)


def opened_twice(groups: Groups) -> tuple[Group, Group]:
    return groups["dp"], groups["dp_cp"]


def around_ours(groups: Groups) -> tuple[Group, Group]:
    process_group = groups["dp"].process_group
    assert process_group is not None
    return groups["dp"], Group.from_process_group("again", process_group)


def around_theirs(groups: Groups) -> tuple[Group, Group]:
    process_group = dist.new_group([0, 1])
    groups.before_close(lambda: dist.destroy_process_group(process_group))
    first = Group.from_process_group("first", process_group)
    # A handle that is made and dropped on one rank alone must not set that rank back.
    if dist.get_rank() == 0:
        del first
        gc.collect()
        first = Group.from_process_group("first", process_group)
    return first, Groups.from_process_groups({"second": process_group})["second"]


def with_others(groups: Groups) -> tuple[Group, Group]:
    return groups["dp"], groups.with_collectives(spied)["dp_cp"]


def through_a_mesh(groups: Groups) -> tuple[Group, Group]:
    return groups["dp"], groups_from_device_mesh(device_mesh(groups, ["dp"]))["dp"]


HANDLES: dict[str, Callable[[Groups], tuple[Group, Group]]] = {
    "opened_twice": opened_twice,
    "around_ours": around_ours,
    "around_theirs": around_theirs,
    "with_others": with_others,
    "through_a_mesh": through_a_mesh,
}


@pytest.mark.parametrize("handles", HANDLES)
@ranks(2)
def test_two_handles_of_one_communicator_do_not_mix_up_their_messages(
    rank: int, handles: str
) -> None:
    with open_groups(Topology({"dp": 2, "cp": 1}), ["dp", "dp_cp"]) as groups:
        one, other = HANDLES[handles](groups)
        assert one.process_group is other.process_group
        for length in SIZES:
            two_at_once(one.collectives, other.collectives, length)


@ranks(3)
def test_uneven_and_differentiable_operations_share_the_order_too(rank: int) -> None:
    sizes = [100 * 1024, 200 * 1024, 1024]
    with open_groups(Topology({"dp": 3, "cp": 1}), ["dp", "dp_cp"]) as groups:
        one, other = groups["dp"].differentiable, groups["dp_cp"].differentiable
        x = torch.ones(sum(sizes), requires_grad=True)
        y = torch.ones(sum(sizes), requires_grad=True)
        first = one.reduce_scatter_async(x, sizes=sizes)
        second = other.reduce_scatter_async(y * 10, sizes=sizes)
        assert values(second.wait()) == {30.0}
        assert values(first.wait()) == {3.0}
        total: Tensor = first.wait().sum() * (rank + 1) + second.wait().sum() * (rank + 2)
        total.backward()
        for leaf, weights in ((x, [1.0, 2.0, 3.0]), (y, [20.0, 30.0, 40.0])):
            assert leaf.grad is not None
            found = [values(part) for part in leaf.grad.split(sizes)]
            assert found == [{weight} for weight in weights]


def num_threads() -> int:
    """Those of Python and of gloo, whose polling threads and workers Python does not know."""
    return len(os.listdir("/proc/self/task"))


@ranks(2)
def test_closing_ends_communicators_and_threads_though_handles_are_kept(rank: int) -> None:
    kept: list[Group] = []
    before = num_threads()
    for _ in range(3):
        groups = open_groups(Topology({"dp": 2, "cp": 1}), ["dp", "dp_cp", ("dp", "gather")])
        # Both kinds of operations have run, and one is abandoned with its handle.
        two_at_once(groups["dp"].collectives, groups["dp_cp"].collectives, SIZES[-1])
        groups["dp", "gather"].collectives.all_gather(torch.ones(SIZES[1]))
        handles = [groups["dp"], groups["dp", "gather"]]
        kept += handles
        communicators = [weakref.ref(handle.process_group) for handle in handles]
        groups.close()
        assert num_threads() == before
        assert [communicator() for communicator in communicators] == [None, None]
    for group in kept:
        for length in SIZES[:2]:
            with pytest.raises(ClosedError, match=r"pcomm:dp.* closed"):
                group.collectives.all_reduce(torch.ones(length))
            with pytest.raises(ClosedError, match="closed"):
                group.collectives.all_gather(torch.ones(length))
            with pytest.raises(ClosedError, match="closed"):
                group.collectives.reduce_scatter_async(torch.ones(2 * length))
            with pytest.raises(ClosedError, match="closed"):
                group.differentiable.all_to_all(torch.ones(2 * length))
        with pytest.raises(ClosedError, match="closed"):
            _ = group.process_group


@ranks(2)
def test_what_stands_on_a_group_ends_before_its_communicator(rank: int) -> None:
    log: list[str] = []
    topology = Topology({"dp": 2, "tp": 1})
    with open_groups(topology, ["dp", "tp"]) as groups:
        dp = groups["dp"]

        def stop() -> None:
            log.append(f"sum {float(dp.collectives.all_reduce(torch.ones(())))}")

        dp.before_close(stop)
        take_back = groups["tp"].before_close(lambda: log.append("taken back"))
        groups["tp"].before_close(lambda: log.append("one rank"))
        groups.with_collectives(spied)["dp"].before_close(lambda: log.append("spied"))
        take_back()
        take_back()
        assert log == []
    assert log == ["spied", "one rank", "sum 2.0"]
