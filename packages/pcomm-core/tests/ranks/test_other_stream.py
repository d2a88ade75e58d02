"""Results that another stream waits for than the one they were issued on: what keeps their memory.

There is no GPU: streams are words, and what is recorded is noted.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives import distributed
from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.testing.on_ranks import ranks

# How many tensors an operation in flight reads and writes; a dense input is read where it lies.
CASES = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1, "all_to_all": 2, "broadcast": 1}


@pytest.mark.parametrize("waits_on", ["computing", "other"])
@pytest.mark.parametrize("operation", CASES)
@ranks(2)
def test_its_tensors_are_recorded_on_the_stream_that_waited(
    rank: int, operation: str, waits_on: str
) -> None:
    stream: list[str] = ["computing"]
    recorded: list[tuple[int, object]] = []

    def record(tensor: Tensor, on: object) -> None:
        recorded.append((tensor.data_ptr(), on))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_stream_of", lambda _: stream[0])
        patch.setattr(Tensor, "record_stream", record)
        assert dist.group.WORLD is not None
        collectives = DistributedCollectives(dist.group.WORLD)
        x = torch.arange(4.0) + rank
        pending = getattr(collectives, f"{operation}_async")(x)
        stream[0] = waits_on
        result = pending.wait()
        assert pending.wait() is result
    if waits_on == "computing":
        assert recorded == []
        return
    assert {on for _, on in recorded} == {"other"}
    count = CASES[operation]
    places = [place for place, _ in recorded]
    assert len(places) == len(set(places)) == count
    assert result.data_ptr() in places
    assert (x.data_ptr() in places) is (count == 2)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@ranks(2)
def test_so_are_those_between_an_operation_and_its_local_work(rank: int, operation: str) -> None:
    """Shards of unequal length go through a buffer, which is read behind the wait."""
    stream: list[str] = ["computing"]
    sizes: list[int] = []

    def record(tensor: Tensor, on: object) -> None:
        sizes.append(tensor.numel())

    x = torch.ones(4 if operation == "reduce_scatter" else (1, 3)[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_stream_of", lambda _: stream[0])
        patch.setattr(Tensor, "record_stream", record)
        assert dist.group.WORLD is not None
        collectives = DistributedCollectives(dist.group.WORLD)
        pending = getattr(collectives, f"{operation}_async")(x, sizes=(1, 3))
        stream[0] = "other"
        pending.wait()
    # What is sent, padded to 3 or as it is, and what arrives from both ranks.
    arrived = 2 * 3 if operation == "all_gather" else 2 * (1, 3)[rank]
    assert sizes == [3 if operation == "all_gather" else 4, arrived]


@ranks(2)
def test_on_a_cpu_there_is_no_stream(rank: int) -> None:
    assert dist.group.WORLD is not None
    collectives = DistributedCollectives(dist.group.WORLD)
    assert distributed._stream_of(torch.ones(1)) is None
    assert collectives.all_reduce_async(torch.ones(2)).wait().tolist() == [2.0, 2.0]
