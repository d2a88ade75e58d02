"""Options of communicators: what was asked for, what is in force, and that it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pcomm.core.errors import ConfigError, DivergenceError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, CtaPolicy, GroupSpec, grant
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology

PAIR = Topology({"dp": 2, "tp": 1})


@ranks(2)
def test_explain_says_what_was_asked_granted_and_refused(rank: int) -> None:
    specs = [
        "dp",
        GroupSpec("dp", "gather", CommOptions(threads=1, max_ctas=4, timeout_s=30.0)),
        GroupSpec("tp", options=CommOptions(threads=3)),
        "dp_tp",
    ]
    with open_groups(PAIR, specs) as opened:
        table = [line.split("  ") for line in opened.explain().splitlines()]
        rows = [[cell.strip() for cell in line if cell] for line in table]
        assert rows[0] == (
            ["group", "role", "rank", "ranks", "communicator", "asked", "granted", "refused"]
        )
        assert rows[1] == ["dp", "-", f"{rank} of 2", "0,1", "gloo", "-", "-", "-"]
        assert rows[2] == [
            "dp",
            "gather",
            f"{rank} of 2",
            "0,1",
            "gloo_1_threads",
            "timeout_s=30.0, threads=1, max_ctas=4",
            "timeout_s=30.0, threads=1",
            "max_ctas=gloo has no such option",
        ]
        # A group of one has no communicator that could grant anything.
        alone = ["tp", "-", "0 of 1", str(rank), "none (identity)", "threads=3", "-", "-"]
        assert rows[3] == alone
        assert rows[4][4] == "that of dp"
        assert opened["dp", "gather"].asked == {"timeout_s": 30.0, "threads": 1, "max_ctas": 4}
        assert opened["dp", "gather"].granted == {"timeout_s": 30.0, "threads": 1}
        assert set(opened["dp", "gather"].refused) == {"max_ctas"}


@ranks(2)
def test_strict_raises_before_anything_is_made(rank: int) -> None:
    before = dict(dist.distributed_c10d._world.pg_map)
    specs = ["dp", GroupSpec("dp", "gather", CommOptions(max_ctas=4, collnet=True, strict=True))]
    with pytest.raises(UnsupportedError, match="max_ctas: gloo has no such option; collnet"):
        open_groups(PAIR, specs)
    assert dist.distributed_c10d._world.pg_map == before
    with open_groups(PAIR, [GroupSpec("dp", options=CommOptions(threads=1, strict=True))]):
        pass


@pytest.mark.parametrize(
    ("backend", "options", "refused"),
    [
        ("gloo", CommOptions(threads=1, timeout_s=5.0), set()),
        ("gloo", CommOptions(high_priority=True, collnet=True), {"high_priority", "collnet"}),
        ("nccl", CommOptions(threads=1), {"threads"}),
        ("fake", CommOptions(threads=1, min_ctas=1, timeout_s=5.0), {"threads", "min_ctas"}),
        ("gloo", CommOptions(interface="lo"), set()),
        ("nccl", CommOptions(interface="lo"), {"interface"}),
        ("fake", CommOptions(interface="lo"), {"interface"}),
    ],
)
def test_each_backend_grants_what_it_has(
    backend: str, options: CommOptions, refused: set[str]
) -> None:
    granted = grant(options, backend, group="dp")
    assert set(granted.refused) == refused
    assert set(granted.fields) == set(options.asked) - refused
    assert all(granted.refused.values())


class NcclOptions:
    """The options of a torch build with NCCL, as far as this one has no field `collnet_enable`."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)
        self.config.traffic_class = -1


class NewerNcclOptions(NcclOptions):
    """Those of a build that has the fields of NCCL 2.27, too."""

    def __init__(self) -> None:
        super().__init__()
        self.config.cta_policy = self.config.nvls_ctas = -1


@pytest.mark.parametrize(("policy", "number"), [("default", 0), ("efficiency", 1), ("zero", 2)])
def test_nccl_gets_a_policy_by_its_number(
    policy: CtaPolicy, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CommOptions(cta_policy=policy, nvls_ctas=7)
    for made, refused in ((NewerNcclOptions, set()), (NcclOptions, {"cta_policy", "nvls_ctas"})):
        nccl = SimpleNamespace(Options=made)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
        granted = grant(options, "nccl", group="dp")
        assert set(granted.refused) == refused
        if refused:
            assert "no field cta_policy" in granted.refused["cta_policy"]
            assert not hasattr(granted.pg_options.config, "cta_policy")
        else:
            assert granted.fields == {"cta_policy": policy, "nvls_ctas": 7}
            found = granted.pg_options.config
            assert (found.cta_policy, found.nvls_ctas) == (number, 7)


def test_no_other_policy_is_taken() -> None:
    with pytest.raises(ConfigError, match="default, efficiency, zero"):
        grant(CommOptions(cta_policy="none"), "nccl", group="dp")  # type: ignore[arg-type]


@ranks(2)
def test_a_policy_that_is_not_granted_is_said(rank: int) -> None:
    with open_groups(PAIR, [GroupSpec("dp", "gather", CommOptions(cta_policy="zero"))]) as opened:
        told = opened.explain().splitlines()[-1]
    assert "cta_policy=zero" in told
    assert "cta_policy=gloo has no such option" in told


@pytest.mark.parametrize("high_priority", [None, False, True])
def test_nccl_gets_each_option_that_it_has(
    high_priority: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = SimpleNamespace(Options=NcclOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    options = CommOptions(
        high_priority=high_priority,
        min_ctas=1,
        max_ctas=2,
        cga_cluster_size=4,
        traffic_class=3,
        collnet=True,
        threads=1,
    )
    granted = grant(options, "nccl", group="dp")
    assert granted.pg_options.is_high_priority_stream is bool(high_priority)
    assert vars(granted.pg_options.config) == {
        "min_ctas": 1,
        "max_ctas": 2,
        "cga_cluster_size": 4,
        "traffic_class": 3,
    }
    assert set(granted.refused) == {"collnet", "threads"}
    assert granted.fields.get("high_priority") is high_priority
    assert set(granted.fields) == set(options.asked) - {"collnet", "threads"}


@ranks(2)
def test_the_timeout_is_that_of_the_group(rank: int) -> None:
    specs = ["dp", GroupSpec("dp", "short", CommOptions(timeout_s=1.0))]
    with open_groups(PAIR, specs) as opened:
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                opened["dp", "short"].collectives.all_reduce(torch.ones(1))
        # The other communicator is as good as before.
        assert float(opened["dp"].collectives.all_reduce(torch.ones(1))) == 2.0


def enter(group: dist.ProcessGroup, roots: Sequence[int]) -> list[dist.Work]:
    """Start one scatter from each of `roots`, in that order, on the same group."""
    works = []
    for root in roots:
        parts = [torch.ones(1)] * 3 if dist.get_rank() == root else None
        work = dist.scatter(torch.empty(1), parts, src=root, group=group, async_op=True)
        assert work is not None
        works.append(work)
    return works


@pytest.mark.parametrize("threads", [None, 2, 1])
@ranks(3)
def test_one_thread_runs_collectives_in_order_and_two_run_them_at_once(
    rank: int, threads: int | None
) -> None:
    """Two scatters, of which the first cannot end before rank 2 enters it.

    The second goes from rank 0 to rank 1 without rank 2. So it ends, while rank 2 stays away,
    exactly if the group starts a collective before the one in front of it has ended.
    """
    store = dist.distributed_c10d._get_default_store()
    specs = [GroupSpec("dp", options=CommOptions(threads=threads))]
    with open_groups(Topology({"dp": 3}), specs) as opened:
        group = opened["dp"].process_group
        assert group is not None
        if rank == 2:
            store.wait(["rank 1 has seen enough"])
        first, second = enter(group, (2, 0))
        if rank == 1:
            # In order it never ends, so a longer wait cannot change the result of that case.
            end = time.monotonic() + (0.3 if threads == 1 else PATIENCE_S)
            while not second.is_completed() and time.monotonic() < end:
                time.sleep(0.002)
            assert second.is_completed() == (threads != 1)
            assert not first.is_completed()
            store.set("rank 1 has seen enough", "")
        first.wait()
        second.wait()


@ranks(2)
def test_a_group_may_have_a_backend_of_its_own(rank: int) -> None:
    # The control plane of a job on GPUs, on machines that have none.
    with open_groups(PAIR, [GroupSpec("dp", "control", backend="gloo")], backend="nccl") as opened:
        assert dist.get_backend(opened["dp", "control"].process_group) == "gloo"
        total = opened["dp", "control"].collectives.all_reduce(torch.ones(1))
        assert float(total) == 2.0


@ranks(2)
def test_each_node_may_name_its_interface_otherwise(rank: int) -> None:
    """Only which groups share one is agreed on, as that decides who shares a communicator."""
    mine, other = ("lo", None) if rank == 0 else (None, "lo")

    def spec(axes: str, role: str, interface: str | None, **options: Any) -> GroupSpec:
        return GroupSpec(axes, role, CommOptions(interface=interface, **options))

    for specs in (
        [spec("dp", "", mine)],
        # Two rails, named the other way round.
        [spec("dp", "gather", mine), spec("dp", "reduce", other), spec("dp_tp", "gather", mine)],
    ):
        with open_groups(PAIR, specs) as opened:
            for key in opened:
                assert float(opened[key].collectives.all_reduce(torch.ones(1))) == 2.0
            asked = opened[specs[0].axes, specs[0].role].asked
            assert asked == ({} if mine is None else {"interface": mine})
    # One of them has one communicator for both groups, and the other two.
    shared = [spec("dp", "gather", "lo"), spec("dp_tp", "gather", "lo" if rank == 0 else None)]
    with pytest.raises(DivergenceError, match="rail 1"):
        open_groups(PAIR, shared)
    # All other options are agreed on as before.
    with pytest.raises(DivergenceError, match="'threads': 2"):
        open_groups(PAIR, [spec("dp", "", mine, threads=1 + rank)])
    with pytest.raises(DivergenceError, match="strict"):
        open_groups(PAIR, [spec("dp", "", mine, strict=rank == 0)])
    with pytest.raises(DivergenceError, match="nccl"):
        open_groups(PAIR, [GroupSpec("dp", backend=["gloo", "nccl"][rank])])


@ranks(2)
def test_numbers_that_no_communicator_can_have_are_refused_on_every_rank(rank: int) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    wrong = [{"threads": 0}, {"threads": -1}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}]
    for fields in wrong:
        with pytest.raises(ConfigError, match=f"{next(iter(fields))}="):
            open_groups(PAIR, [GroupSpec("dp", options=CommOptions(**fields))])
    only_here = CommOptions(threads=0 if rank == 0 else 1)
    with pytest.raises(ConfigError if rank == 0 else PeerError, match="threads=0"):
        open_groups(PAIR, [GroupSpec("dp", options=only_here)])
    assert len(dist.distributed_c10d._world.pg_map) == before
