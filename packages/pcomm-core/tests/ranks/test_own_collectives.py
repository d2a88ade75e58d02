"""Groups whose operations are the caller's: made once for each communicator, or on no rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ClosedError, ConfigError, PcommError, PeerError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

WAIT_S = 120.0
SQUARE = Topology({"tp": 2, "cp": 1, "dp": 2})
# `dp` and `cp_dp` share a communicator, and `cp` has none.
SPECS = ["tp", "cp", "dp", ("dp", "gather"), "cp_dp"]


class Own(SpyCollectives):
    """Collectives with memory of their own, that say when they are closed."""

    def __init__(self, group: Group, log: list[str]) -> None:
        super().__init__(group.collectives)
        self.key, self.log = group.key, log
        self.memory = SymmetricMemory.open(group, 64)
        log.append(f"open {self.key}")

    def close(self) -> None:
        # What was opened before it is still there, on this rank at least.
        assert self.memory.buffer().numel() == 64
        self.log.append(f"close {self.key}")


class Meeting(Own):
    """They meet once more when they close, as all ranks have them."""

    def close(self) -> None:
        assert self.inner.all_reduce(torch.ones(1)).item() == self.size
        super().close()


@ranks(4)
def test_each_communicator_gets_one_and_every_group_of_it_uses_that(rank: int) -> None:
    log: list[str] = []
    made: dict[str, Own] = {}

    def make(group: Group) -> Collectives:
        made[group.key] = Meeting(group, log)
        return made[group.key]

    with open_groups(SQUARE, SPECS, timeout_s=WAIT_S, collectives=make) as groups:
        assert log == ["open tp", "open dp", "open dp[gather]"]
        groups.before_close(lambda: log.append("before"))
        assert groups["tp"].collectives is made["tp"]
        assert groups["dp"].collectives is groups["cp_dp"].collectives is made["dp"]
        assert groups["dp", "gather"].collectives is made["dp[gather]"]
        assert isinstance(groups["cp"].collectives, IdentityCollectives)
        own = made["dp"]
        x = torch.ones(4, requires_grad=True)
        # Two in the forward, of two groups, and one in the backward of each.
        for name in ("dp", "cp_dp"):
            groups[name].differentiable.all_reduce(x).sum().backward()
        assert own.counts == {"all_reduce": 4}
        assert x.grad is not None
        assert x.grad.tolist() == [4.0] * 4
        # Instruments go around it.
        watched = groups.with_collectives(lambda group: SpyCollectives(group.collectives))
        watched["dp"].collectives.all_reduce(torch.ones(1))
        assert own.counts == {"all_reduce": 5}
        assert made["tp"].counts == {}
    assert log[3:] == ["before", "close dp[gather]", "close dp", "close tp"]
    for found in made.values():
        with pytest.raises(ClosedError):
            found.memory.buffer()


@ranks(4)
def test_what_fails_on_one_rank_opens_no_groups_on_any(rank: int) -> None:
    before = dict(dist.distributed_c10d._world.pg_map)
    for key in ("tp", "dp[gather]"):
        for culprit in (0, 3):
            log: list[str] = []

            def make(
                group: Group, key: str = key, culprit: int = culprit, log: list[str] = log
            ) -> Collectives:
                own = Own(group, log)
                if group.key == key and rank == culprit:
                    raise ConfigError("test", found="no make", why="It is a test.", fix="None.")
                return own

            with pytest.raises(PcommError) as caught:
                open_groups(SQUARE, SPECS, timeout_s=WAIT_S, collectives=make)
            assert type(caught.value) is (ConfigError if rank == culprit else PeerError)
            assert f"an error on rank {culprit}" in str(caught.value) or rank == culprit
            assert "no make" in str(caught.value)
            assert getattr(caught.value, "__notes__", []) == []
            assert dist.distributed_c10d._world.pg_map == before
            # The failed one has nothing to close; others were closed with what they stand on.
            opened = [line.split()[1] for line in log if line.startswith("open")]
            closed = [line.split()[1] for line in log if line.startswith("close")]
            failed = [key] if rank == culprit else []
            assert closed == [name for name in reversed(opened) if name not in failed]
            # A communicator of the rank that failed is not begun by the others.
            if key == "tp" and rank == culprit:
                assert opened == ["tp"]
    with open_groups(SQUARE, SPECS, timeout_s=WAIT_S) as groups:
        assert groups["dp"].collectives.all_reduce(torch.ones(1)).item() == 2


@ranks(2)
def test_what_it_returns_has_to_fit(rank: int) -> None:
    wrong: list[tuple[Callable[[Group], object], str]] = [
        (lambda group: None, "NoneType, for rank"),
        (lambda group: IdentityCollectives(), "rank 0 of 1, for rank"),
    ]
    for make, words in wrong:
        with pytest.raises(ConfigError, match=f"group dp: {words} {rank} of 2"):
            open_groups(Topology({"dp": 2}), ["dp"], collectives=make)  # type: ignore[arg-type]
    # The group's own are left as they are, and not closed twice.
    with open_groups(
        Topology({"dp": 2}), ["dp"], collectives=lambda group: group.collectives
    ) as groups:
        kept = groups["dp"].collectives
        groups.before_close(lambda: kept.all_reduce(torch.ones(1)))
        assert kept.all_reduce(torch.ones(1)).item() == 2


def test_one_rank_makes_none() -> None:
    def refuse(group: Group) -> Collectives:
        raise AssertionError("there is no communicator")

    with open_groups(Topology({"dp": 1}), ["dp"], collectives=refuse) as groups:
        assert isinstance(groups["dp"].collectives, IdentityCollectives)
