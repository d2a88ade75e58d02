"""What is sent for the sums of gradients, over which groups, and when."""

from __future__ import annotations

import torch
from torch import nn

from ntp_support.tagged_sums import (
    TaggedModel,
    calls_of,
    on_tagged_ranks,
    plan_of_degrees,
    tags,
    whole_shapes,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.open_groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, Units, grad_groups, plan
from pcomm.ntp.sync.buckets import deal_out
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.params import SyncedParam

STRATEGIES: tuple[Strategy, ...] = ("interval", "gather-core")
DEGREES = [(4, 3), (3, 4), (4, 2), (3, 2, 4), (2, 3, 1), (3, 2), (3, 3), (1, 1), (4,), (4, 3, 3, 2)]


def test_bytes_are_those_of_an_all_reduce_over_replicas_and_none_inside_a_group() -> None:
    """2 (n-1)/n of a shard for n replicas: P/N of the parameters at degree N, and no other call."""
    made = plan_of_degrees((4, 3, 3, 2))
    split = [name for name in whole_shapes() if made.units_of(name)]
    split.remove("router")

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> None:
        with sync.accumulate():
            model.loss(tags(model.place.replica)).backward()
        sync.finish()
        named = dict(model.named_parameters())
        shard = sum(named[name].nbytes for name in split)
        everyone, sent = groups["ntp.all"], 0
        for key, group in groups.items():
            spy = group.collectives
            if not isinstance(key, str) or group is everyone or not isinstance(spy, SpyCollectives):
                continue
            assert set(spy.counts) == {"all_reduce"}
            assert len({made.place(rank).replica for rank in group.ranks}) == group.size == 4
            sent += sum(call.input_bytes for call in spy.calls)
            assert spy.sent_bytes == 2 * sum(c.input_bytes * 3 // 4 for c in spy.calls)
        assert sent == shard

    on_tagged_ranks(made, task)


def test_sums_start_during_backward_in_one_order() -> None:
    made = plan_of_degrees((3, 2))

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> tuple[int, int]:
        during: list[int] = []
        # The first parameter of the model is the last one to get its gradient.
        first = model.get_parameter("embedding.weight")
        first.register_hook(lambda _: during.append(len(calls_of(groups))))
        with sync.accumulate():
            model.loss(tags(model.place.replica)).backward()
        ended = len(calls_of(groups))
        sync.finish()
        assert len(calls_of(groups)) == ended
        return ended, max(during)

    for before_end, before_last in on_tagged_ranks(made, task, bucket_bytes=200).values():  # type: ignore[misc, attr-defined]
        assert 0 < before_last <= before_end


def test_buckets_start_in_the_order_in_which_they_are_complete() -> None:
    """Parameters of 16 bits between others: a bucket has one type, and is closed when full."""

    def param(name: str, dtype: torch.dtype, length: int) -> SyncedParam:
        parameter = nn.Parameter(torch.zeros(length, dtype=dtype))
        return SyncedParam(name, parameter, "", None, None, 0, True, torch.float32)

    wide, narrow = torch.float32, torch.bfloat16
    params = [
        *(param("a", wide, 4), param("b", narrow, 1), param("c", wide, 2)),
        *(param("d", wide, 2), param("e", narrow, 1), param("f", wide, 1)),
    ]
    dealt = [[one.name for one in own] for own in deal_out(params, 16, 1)]
    # 16 bytes are four elements of the sum; the others end with the first parameters.
    assert dealt == [["f", "d", "c"], ["e", "b"], ["a"]]
    assert [len(own) for own in deal_out(params, 1, 1)] == [1] * 6


def test_groups_are_one_for_each_set_of_ranks() -> None:
    for degrees in DEGREES:
        made = plan_of_degrees(degrees)
        for strategy in STRATEGIES:
            specs = grad_groups(made, strategy)
            sets = [spec.ranks for spec in specs]
            assert len(set(sets)) == len(sets)
            assert specs[0].axes == "ntp.all"
    # Units that divide by both: N1 + N2 - gcd(N1, N2) segments, and the group of all.
    topology = Topology({"dp": 2, "tp": 8})
    two = plan(topology, Failures.at(Coord(dp=0, tp=3)), {"w": Units.columns(56)})
    assert len(grad_groups(two)) == 1 + 8 + 7 - 1
