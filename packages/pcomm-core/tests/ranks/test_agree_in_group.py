"""A group agrees on lines of text, through the store and without its communicator."""

from __future__ import annotations

import pytest

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ConfigError, DivergenceError, PeerError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import default_group, ranks
from pcomm.core.topology import Topology


def mistake() -> ConfigError:
    return ConfigError("test", found="something", why="Because.", fix="Do not.")


@ranks(4)
def test_groups_with_the_same_topic_do_not_hear_each_other(rank: int) -> None:
    with open_groups(Topology({"tp": 2, "cp": 2}), ["tp", "cp"]) as groups:
        for _ in range(2):
            for name in ("tp", "cp"):
                # Equal within each group, different between the two groups of a kind.
                other = groups["cp" if name == "tp" else "tp"].rank
                agree_in_group(groups[name], "test", [f"{name} beside rank {other}"])


@ranks(4)
def test_a_difference_is_an_error_in_its_group_only(rank: int) -> None:
    with open_groups(Topology({"tp": 2, "cp": 2}), ["tp", "cp"]) as groups:
        lines = ["same", "one" if rank == 3 else "other"]
        if 3 in groups["cp"].ranks:
            with pytest.raises(DivergenceError, match=r"line 2: .*'other', rank 3 has 'one'"):
                agree_in_group(groups["cp"], "test", lines)
        else:
            agree_in_group(groups["cp"], "test", lines)


@ranks(2)
def test_an_error_reaches_every_rank(rank: int) -> None:
    group = Group.from_process_group("cp", default_group())
    error = mistake() if rank == 1 else None
    with pytest.raises(ConfigError if rank == 1 else PeerError, match="something"):
        agree_in_group(group, "test", [], error=error)
