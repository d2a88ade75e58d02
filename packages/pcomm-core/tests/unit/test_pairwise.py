"""What one rank posts to its peers, and when: sends and receives that are only written down."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.distributed import OpenGroup
from pcomm.core.collectives.gloo import Pairs, PairwiseAllGather, PairwiseReduceScatter
from pcomm.core.testing.assertions import assert_equal


def numbers(rank: int, length: int, *, salt: int = 0) -> Tensor:
    """Whole numbers that differ per rank and element."""
    return ((torch.arange(length) * 7 + rank * 5 + salt) % 23).float()


class RecordedWork:
    """A transfer of `RecordedPairs`; what is received is there as soon as it is waited for."""

    def __init__(self, end: Callable[[], bool]) -> None:
        self._end = end

    def wait(self) -> bool:
        return self._end()


class RecordedPairs:
    """Rank 0 of `size`, whose peers send `streams`: all that each of them has for this rank."""

    def __init__(self, streams: dict[int, Tensor], *, is_aborted: bool = False) -> None:
        self.sources = sorted(streams, reverse=True)
        self.targets = sorted(streams)
        self.streams, self.is_aborted = streams, is_aborted
        self.log: list[str] = []
        self.num_open = self.most_open = 0
        self.places: set[int] = set()
        self.sent: dict[int, list[Tensor]] = {target: [] for target in self.targets}
        self._offsets = dict.fromkeys(streams, 0)

    def channel(self, kind: int) -> RecordedPairs:
        return self

    def send(self, x: Tensor, target: int) -> RecordedWork:
        self.log.append("send")
        self.sent[target].append(x.clone())
        return RecordedWork(lambda: True)

    def receive(self, x: Tensor, source: int) -> RecordedWork:
        self.log.append("receive")
        start = self._offsets[source]
        self._offsets[source] = start + len(x)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        assert x.is_contiguous()
        self.places.add(x.data_ptr())

        def end() -> bool:
            if self.is_aborted:
                return False
            x.copy_(self.streams[source][start : start + len(x)])
            self.num_open -= 1
            return True

        return RecordedWork(end)

    def wait(self, works: list[Any]) -> None:
        Pairs.wait(cast(Pairs, self), works)


@pytest.mark.parametrize(
    ("chunks_of_128_kib", "num_chunks"), [(1, 1), (2, 2), (3, 3), (4, 4), (20, 8)]
)
def test_a_sum_needs_three_places_for_each_peer_however_long_it_is(
    chunks_of_128_kib: int, num_chunks: int
) -> None:
    length = chunks_of_128_kib * 128 * 1024 // 4 - 3
    streams = {rank: numbers(rank, length) for rank in (1, 2, 3)}
    pairs = RecordedPairs(streams)
    parts = [numbers(0, length, salt=s) for s in range(4)]
    total = parts[0].clone()
    operation = PairwiseReduceScatter(cast(Pairs, pairs), parts, total)
    num_announced: list[int] = []
    has_announced = operation.begin()
    # What peers wait for comes first.
    num_first = 3 * min(num_chunks, 3)
    assert pairs.log[: num_first + 1] == ["receive"] * num_first + ["send"]
    assert has_announced == (num_chunks <= 3)
    operation.finish(lambda: num_announced.append(pairs.log.count("receive")))
    # Once, when nothing is left to announce.
    assert num_announced == ([] if has_announced else [3 * num_chunks])
    assert pairs.most_open == len(pairs.places) == num_first
    assert pairs.num_open == 0
    assert_equal(total, parts[0] + sum(streams.values()))
    for target in pairs.targets:
        assert len(pairs.sent[target]) == num_chunks
        assert_equal(torch.cat(pairs.sent[target]), parts[target])


def test_a_gather_receives_before_it_sends_and_nothing_that_is_empty() -> None:
    streams = {1: numbers(1, 7), 2: numbers(2, 0), 3: numbers(3, 5)}
    pairs = RecordedPairs(streams)
    parts = [numbers(0, 4), torch.empty(7), torch.empty(0), torch.empty(5)]
    operation = PairwiseAllGather(cast(Pairs, pairs), parts[0], parts)
    assert operation.begin()
    assert pairs.log == ["receive"] * 2 + ["send"] * 3
    operation.finish(pytest.fail)
    assert_equal(torch.cat(parts[1:]), torch.cat(list(streams.values())))


@pytest.mark.parametrize("kind", [PairwiseReduceScatter, PairwiseAllGather])
def test_an_aborted_transfer_is_an_error_and_no_result(
    kind: type[PairwiseReduceScatter] | type[PairwiseAllGather],
) -> None:
    """Torch tells of it by what `wait` returns; the memory holds whatever was there."""
    pairs = RecordedPairs({1: numbers(1, 4)}, is_aborted=True)
    parts = [torch.zeros(4), torch.zeros(4)]
    operation: PairwiseReduceScatter | PairwiseAllGather
    if kind is PairwiseReduceScatter:
        operation = PairwiseReduceScatter(cast(Pairs, pairs), parts, parts[0])
    else:
        operation = PairwiseAllGather(cast(Pairs, pairs), parts[0], parts)
    operation.begin()
    with pytest.raises(RuntimeError, match="aborted"):
        operation.finish(lambda: None)


def test_ranks_start_with_different_peers_and_a_tag_says_which_kind_it_is() -> None:
    """At each step every rank is the target of one other, and tags of kinds never meet."""
    groups = [StandInGroup(rank, 5) for rank in range(5)]
    pairs = [Pairs(OpenGroup(cast(Any, group))) for group in groups]
    for step in range(4):
        assert sorted(pair.targets[step] for pair in pairs) == list(range(5))
        for rank, pair in enumerate(pairs):
            # What is sent in a step is what the target receives first of what is left.
            assert pairs[pair.targets[step]].sources[step] == rank
    first, second = pairs[:2]
    chance = random.Random(0)
    kinds = [chance.randrange(2) for _ in range(100)]
    tags = [first.tag(kind) for kind in kinds]
    others = [second.tag(1 - kind) for kind in kinds]
    assert len({*tags, *others}) == 200
    # Torch takes 31 bits, and people take small ones.
    first.num_drawn = (1 << 31) - 1
    assert all(1 << 30 <= first.tag(kind) < 1 << 31 for kind in (0, 1, 1, 0))


class StandInGroup:
    """As much of a process group as `Pairs` asks for."""

    group_desc = "stand-in"

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
