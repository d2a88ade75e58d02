"""Communicators of their own: gathers and reduces are on their way together, where that pays."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import TOKENS, Block, SmallModel, open_two, roles_of
from pcomm.core.collectives.instrumented import InstrumentedCollectives, SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.errors import PeerError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.core.topology import Topology
from pcomm.fsdp import separation as module
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.separation import Separation, measure_separation
from pcomm.fsdp.settings import CommPolicy, Roles

# -- the choice between one communicator and two; which way it goes is the machine's business ---

MEASURED = Separation("dp[gather]", "dp[reduce]", 0.1, 0.2, 0.3, 0.2, None)
SIZE, MOST = 2, 1024


@pytest.mark.parametrize(("saved", "pays"), [(0.0299, False), (0.0301, True)], ids=str)
def test_it_pays_from_three_percent_on(saved: float, pays: bool) -> None:
    assert replace(MEASURED, shared_s=100.0, separate_s=100.0 * (1 - saved)).pays == pays
    assert "gain 33.3%, extra memory unknown; separate" in MEASURED.describe()


@ranks(2)
def test_all_ranks_measure_the_same(rank: int) -> None:
    with open_two() as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        found = measure_separation(
            gather,
            reduce,
            num_elements=1000,
            gather_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        numbers = [found.gather_s, found.reduce_s, found.shared_s, found.separate_s]
        assert min(numbers) > 0
        mine = torch.tensor(numbers, dtype=torch.float64)
        assert torch.equal(gather.collectives.all_reduce(mine, op="max"), mine)


@pytest.mark.parametrize("separate_s", [0.2, 0.4])
@ranks(2)
def test_the_plan_follows_what_was_measured(rank: int, separate_s: float) -> None:
    measured = replace(MEASURED, separate_s=separate_s)
    before = module.measure_separation
    module.measure_separation = lambda *_args, **_options: measured
    try:
        with open_two() as groups:
            roles = roles_of(groups)
            model = SmallModel()
            sharded = fully_shard(model, roles, units=[Block], comm=CommPolicy("auto"))
            chosen = roles.reduce if measured.pays else roles.gather
            assert all(plan.reduce is chosen for plan in sharded.plans)
            assert str(sharded.report()).count(measured.describe()) == 1
            spy = chosen.collectives = SpyCollectives(chosen.collectives)
            model.loss(TOKENS).backward()
            assert spy.counts["reduce_scatter"] == 5
            assert ("all_gather" in spy.counts) != measured.pays
    finally:
        module.measure_separation = before


# -- how it is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_elements", [2, MOST - 2, MOST, MOST + 2], ids=str)
def test_a_buffer_is_measured_whole_up_to_32_mebibytes(
    monkeypatch: pytest.MonkeyPatch, num_elements: int
) -> None:
    assert module._MOST_BYTES == 32 << 20
    # As many bytes need seconds.
    monkeypatch.setattr(module, "_MOST_BYTES", MOST * 4)
    monkeypatch.setattr(module, "_ROUNDS", 1)

    def on_rank(virtual: VirtualCollectives) -> set[int]:
        spy = SpyCollectives(virtual)
        group = Group("dp", tuple(range(SIZE)), None, rank=virtual.rank).with_collectives(spy)
        options = {"gather_dtype": torch.float32, "reduce_dtype": torch.float32}
        measure_separation(
            group, group, num_elements=num_elements, device=torch.device("cpu"), **options
        )
        return {c.input_shape[0] for c in spy.calls if c.operation == "reduce_scatter"}

    assert run_virtual(on_rank, SIZE) == [{min(num_elements, MOST)}] * SIZE


CASES = [["gather: gather"], ["reduce: reduce"]]
BOTH = [["gather: reduce", "gather: gather"], ["reduce: reduce", "gather: gather"]]


class Recorder:
    """Collectives on which nothing is ever over until the device is synchronised."""

    rank, size = 0, 2

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def all_reduce(
        self, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.log.append(f"{self.name}: meet")
        return x

    def all_gather_async(self, x: torch.Tensor, *, out: torch.Tensor) -> Pending:
        self.log.append(f"{self.name}: gather")
        return Pending(lambda: self._end(out))

    def reduce_scatter_async(self, x: torch.Tensor) -> Pending:
        self.log.append(f"{self.name}: reduce")
        return Pending(lambda: self._end(x))

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("wait")
        return x


def test_the_clock_runs_from_the_end_of_the_meeting_to_the_end_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a collective returns when it is queued, so both ends need the device's word."""
    log: list[str] = []

    def read() -> float:
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(module, "_synchronise", lambda device: log.append("synchronise"))
    monkeypatch.setattr(time, "perf_counter", read)
    groups = []
    for name in ("gather", "reduce"):
        group = Group("dp", (0, 1), None, role=name)
        group.collectives = Recorder(name, log)  # type: ignore[assignment]
        groups.append(group)
    measure_separation(
        *groups,
        num_elements=64,
        gather_dtype=torch.float32,
        reduce_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert log.pop() == "gather: meet", "the ranks exchange their medians"
    runs: list[list[str]] = []
    for word in log:
        if word == "gather: meet":
            runs.append([])
        if runs:
            runs[-1].append(word)
    # Two to warm up, then five rounds of four cases.
    expected = [BOTH[0], BOTH[1], *([*CASES, *BOTH] * 5)]
    for run, issued in zip(runs, expected, strict=True):
        timed = ["clock", *issued, *["wait"] * len(issued), "synchronise", "clock"]
        # Before the meeting too: what the last run left must not be in this one.
        assert run[: len(timed) + 2] == ["gather: meet", "synchronise", *timed]
    assert all(run[-1] == "synchronise" for run in runs[:-1])


# -- gathers and reduces are on their way together, shown without a clock -----------------------

# Rank 1 joins a reduce only after a gather that was issued later has ended. That works if, and only
# if, rank 0's gather does not wait behind its reduce.

DEPTH = 6


class Late(InstrumentedCollectives):
    """Collectives that join each reduce when it is waited for, and after the last gather.

    Args:
        inner: What communicates.
        gathers: All gathers so far, shared by both roles.
        is_late: Whether to do so; if not, reduces start when they are issued.
    """

    def __init__(self, inner: Collectives, gathers: list[Pending], is_late: bool) -> None:
        super().__init__(inner)
        self._gathers, self._is_late = gathers, is_late

    def start(self, call: Call) -> Pending:
        """Keep a gather, and join a late reduce when it is waited for."""
        if self._is_late and call.operation == "reduce_scatter":
            return Pending(lambda: self._join(call))
        pending = super().start(call)
        if call.operation == "all_gather":
            self._gathers.append(pending)
        return pending

    def _join(self, call: Call) -> Tensor:
        self._gathers[-1].wait()
        return self.inner.run(call)


def late(group: Group, gathers: list[Pending], is_late: bool) -> Group:
    return group.with_collectives(Late(group.collectives, gathers, is_late))


def _flat(part: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, without the guard against taking it for the whole."""
    assert part.grad is not None
    return part.grad.as_subclass(Tensor).flatten()


def train_with_late_reduces(
    rank: int, width: int, *, is_separate: bool, timeout_s: float
) -> list[Tensor]:
    """Two steps, the second of them with late reduces on rank 1; the gradients of both."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))
    # One worker thread makes a queue of a communicator, as NCCL's are.
    options = CommOptions(threads=1, timeout_s=timeout_s)
    specs = [GroupSpec("dp", role, options) for role in ("gather", "reduce")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        gathers: list[Pending] = []
        gather = late(groups["dp", "gather"], gathers, False)
        own = groups["dp", "reduce" if is_separate else "gather"]
        wrapper = Late(own.collectives, gathers, False)
        roles = Roles(gather, own.with_collectives(wrapper))
        sharded = fully_shard(model, roles, units=[nn.Linear])
        found = []
        for step in range(2):
            wrapper._is_late = step == 1 and rank == 1
            sharded.zero_grad()
            model(torch.ones(4, width)).square().mean().backward()
            found.append(torch.cat([_flat(p) for p in sharded.parameters()]))
        return found


@pytest.mark.parametrize("width", [16, 512], ids=["by torch", "between pairs"])
@ranks(2)
def test_a_gather_goes_on_while_a_reduce_is_stuck(rank: int, width: int) -> None:
    first, second = train_with_late_reduces(rank, width, is_separate=True, timeout_s=PATIENCE_S)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("width", [16, 512], ids=["by torch", "between pairs"])
@ranks(2)
def test_on_one_communicator_it_does_not(rank: int, width: int) -> None:
    """The test above can fail: here the gather is behind the reduce, and time runs out."""
    with pytest.raises(PeerError):
        train_with_late_reduces(rank, width, is_separate=False, timeout_s=3)
