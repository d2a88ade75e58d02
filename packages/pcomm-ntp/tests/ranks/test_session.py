"""Sessions whose ranks are killed, stopped, and come back, against one process that is not."""

from __future__ import annotations

import math
import multiprocessing as mp
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ntp_support import small_training
from ntp_support.counted_training import count_in_session
from ntp_support.resilient_training import (
    PRELOAD,
    Fault,
    train_in_session,
    train_two,
    train_with_store,
)
from ntp_support.seen_training import Seen, assert_seen
from ntp_support.session_events import (
    die_at_the_end,
    from_the_start,
    hold_for_failure,
    hold_for_joins,
    host_store,
    save_state,
    slow_down_at,
    stop_with_a_newcomer,
)
from pcomm.core import Groups, Topology
from pcomm.core.errors import ConfigError, FencedError, TopologyError
from pcomm.core.process import RankPlace, RankReport, ResilientRanks
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing.programs import scaled_s, wait_until
from pcomm.ntp import (
    Failures,
    NtpPlan,
    Policy,
    Session,
    StateLostError,
    StoreLostError,
    TrainState,
    Units,
)
from pcomm.ntp.session import Timeouts
from pcomm.ntp.session.failure_detection import SuspectedFailure
from pcomm.ntp.session.training_state import StateTransfer

TOPOLOGY = Topology({"dp": 2, "tp": 2})


def run_ranks(size: int, task: Callable[..., Any], *args: Any) -> dict[int, RankReport]:
    """Reports of ranks that do a task, of which some may end on the way."""
    with ResilientRanks(size, preload=PRELOAD) as ranks:
        ranks.start(task, args)
        return ranks.wait(timeout_s=scaled_s(60.0))


def assert_survivors(reports: Mapping[int, RankReport], until: int) -> dict[int, Any]:
    """What the ranks that finished saw, which is what one process would."""
    found = {rank: report.result for rank, report in reports.items() if report.has_finished}
    assert_seen(found, until)
    return found


def test_kills_in_forward_in_recovery_and_within_the_optimizer() -> None:
    # The second one strikes while the ranks that are left recover from the first.
    faults = (Fault(1, "forward", 1), Fault(5, "build", 1), Fault(2, "optimizer", 2))
    topology = Topology({"dp": 2, "tp": 3})
    reports = run_ranks(6, train_in_session, topology, 4, faults)
    seen = assert_survivors(reports, 4)
    assert sorted(seen) == [0, 3, 4]
    for own in seen.values():
        assert own.gone == dict.fromkeys((1, 2, 5), "killed by SIGKILL")
        assert own.generations[-1] == (0, 3, 4)


def test_ranks_that_did_not_hear_that_all_are_ready_follow_those_that_did() -> None:
    # Rank 0 applies the step and goes on, rank 1 meets an error; nobody is gone.
    faults = (Fault(1, "ready", 1, 0), Fault(0, "backward", 3, 0))
    reports = run_ranks(2, train_in_session, Topology({"dp": 2, "tp": 1}), 4, faults)
    seen = assert_survivors(reports, 4)
    assert [one.step for one in seen[0].steps] == [0, 1, 2, 3]
    assert [one.step for one in seen[1].steps] == [0, 2, 3]
    assert seen[1].generations == [(0, 1)] * 3
    assert not seen[0].gone


@pytest.mark.parametrize("setbacks", [4, 5])
def test_an_error_in_every_generation_is_raised_in_the_end(setbacks: int) -> None:
    faults = [Fault(0, "forward", 1, 0), *(Fault(0, "build", 1 + n, 0) for n in range(setbacks))]
    reports = run_ranks(2, train_in_session, Topology({"dp": 1, "tp": 2}), 2, faults)
    if setbacks < 5:
        assert assert_survivors(reports, 2)[0].generations == [(0, 1), (0, 1)]
    else:
        assert "build: nothing" in str(reports[0].error)
        assert not reports[1].has_finished


def test_a_replica_that_dies_whole_is_missed_and_comes_back() -> None:
    faults = (Fault(2, "forward", 1), Fault(3, "forward", 1))
    hold = partial(hold_for_joins, counts={3: 2})
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (TOPOLOGY, 5, faults, None, hold))
        ranks.wait([2, 3], timeout_s=scaled_s(60.0))
        for rank in (2, 3):
            ranks.join_again(rank)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    seen = assert_survivors(reports, 5)
    assert sorted(seen) == [0, 1, 2, 3]
    assert (0, 1) in seen[0].generations
    assert seen[0].generations[-1] == (0, 1, 2, 3)
    # Its ranks alone had all tokens of a step.
    assert max(one.count for one in seen[0].steps) == small_training._TOKENS


def test_two_sessions_in_one_process_do_not_disturb_each_other() -> None:
    ours, theirs = mp.Pipe()
    host = mp.get_context("forkserver").Process(target=host_store, args=(theirs,), daemon=True)
    host.start()
    port = ours.recv()
    reports = run_ranks(
        2, train_two, port, Topology({"dp": 2, "tp": 1}), 4, Fault(1, "forward", 2, 0)
    )
    host.kill()
    host.join()
    assert all(report.has_finished for report in reports.values()), reports
    for number, generations in enumerate((2, 1)):
        seen = {rank: report.result[number] for rank, report in reports.items()}
        assert_seen(seen, 4)
        assert all(len(own.generations) == generations for own in seen.values())


def test_a_stopped_rank_is_fenced_and_a_new_process_takes_its_place() -> None:
    faults = (Fault(1, "backward", 1, signal.SIGSTOP),)
    hold = partial(hold_for_joins, counts={2: 1, 3: 2})
    # The only test that waits for time to pass: for a process that neither ends nor beats.
    timeouts = Timeouts(heartbeat_s=0.05, dead_after_s=scaled_s(2.0))
    first, other = ({"timeouts": timeouts, "facts": {"digest": word}} for word in ("a", "b"))
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (TOPOLOGY, 5, faults, first, hold))
        ranks.place(0).store().wait(["pcomm/generation/1"])
        ranks.kill(1, signal.SIGCONT)
        stopped = ranks.wait([1], timeout_s=scaled_s(60.0))[1]
        assert isinstance(stopped.error, FencedError)
        # Other software is refused by name, and the others wait for no one.
        ranks.join_again(1, (TOPOLOGY, 5, (), other))
        refused = ranks.wait([1], timeout_s=scaled_s(60.0))[1]
        assert isinstance(refused.error, ConfigError)
        assert refused.error.found == "digest is b here and a in the job"
        ranks.join_again(1)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    seen = assert_survivors(reports, 5)
    assert sorted(seen) == [0, 1, 2, 3]
    assert seen[0].generations == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)], seen[0].reasons
    assert seen[1].generations == [(0, 1, 2, 3)]
    assert "no heartbeat" in seen[0].gone[1]


def test_a_state_that_is_lost_with_its_ranks_is_restored_or_an_error() -> None:
    # Ranks 1 and 3 hold the same units, and no other rank does. The second one dies before the
    # state has moved.
    faults = (Fault(1, "forward", 2), Fault(3, "build", 1))
    for restore, task in (
        (None, train_in_session),
        (from_the_start, train_in_session),
        (from_the_start, _train_with_a_restore_that_ends_on_one_rank),
    ):
        reports = run_ranks(4, task, TOPOLOGY, 3, faults, {"restore": restore})
        if restore is None:
            errors = {rank: report.error for rank, report in reports.items()}
            assert isinstance(errors[0], StateLostError), errors
            assert isinstance(errors[2], StateLostError), errors
            continue
        for rank in (0, 2):
            own = reports[rank].result
            assert [one.step for one in own.steps] == [0, 1, 0, 1, 2]
            assert own.steps[:2] != own.steps[2:4]
            assert_seen({rank: Seen(own.steps[2:], own.states)}, 3)


def _train_with_a_restore_that_ends_on_one_rank(place: RankPlace, *args: Any) -> Any:
    """Train; of the state that is lost, restoring ends on rank 0 and fails on rank 2."""
    inner, number = StateTransfer.restore, count()

    def restore(*args: Any) -> int:
        applied = inner(*args)
        # The first time is that at the start.
        if next(number) == 1 and place.rank == 2:
            raise SuspectedFailure("all_reduce", found="connection reset", why="", fix="")
        return applied

    StateTransfer.restore = restore  # type: ignore[method-assign]
    return train_in_session(place, *args)


@pytest.mark.parametrize(("gone", "saves"), [(0, True), (1, False)])
def test_ranks_that_cannot_go_on_save_what_they_hold_before_the_error(gone, saves, tmp_path):
    # Each of the two ranks along cp has all units; none can take the place of the other.
    topology, left = Topology({"dp": 1, "cp": 2, "tp": 1}), 1 - gone
    options = {"at_end": partial(save_state, folder=tmp_path)} if saves else {}
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (topology, 4, (Fault(gone, "forward", 2),), options))
        error = ranks.wait(timeout_s=scaled_s(60.0))[left].error
    assert isinstance(error, TopologyError), error
    if saves:
        assert "at_end was called with the state after 2 steps" in error.fix
        assert_seen({left: torch.load(tmp_path / str(left), weights_only=False)}, 2)
    else:
        assert "last checkpoint is what is left" in error.fix


@pytest.mark.parametrize("dies", [None, 1])
def test_a_tensor_parallel_group_that_is_left_of_those_of_a_replica_saves(dies, tmp_path):
    topology = Topology({"dp": 1, "cp": 2, "tp": 2})
    options = {"at_end": partial(save_state, folder=tmp_path, dies=dies)}
    # The second rank dies in the generation that misses the first one.
    faults = (Fault(2, "forward", 1), Fault(3, "build", 1))
    reports = run_ranks(4, train_in_session, topology, 4, faults, options)
    error = reports[0].error
    assert isinstance(error, TopologyError), reports[0]
    if dies is None:
        assert isinstance(reports[1].error, TopologyError), reports[1]
        seen = {rank: torch.load(tmp_path / str(rank), weights_only=False) for rank in (0, 1)}
        assert_seen(seen, 1)
    else:
        # With rank 1 half of the units are gone.
        assert "last checkpoint is what is left" in error.fix


def test_steps_that_are_lost_when_no_rank_attempts_any_are_an_error() -> None:
    # As above, when all ranks have left the loop over steps: none would repeat those lost.
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        at_end = partial(die_at_the_end, port=ranks.port, rank=1, count=4)
        options = {"restore": from_the_start, "at_end": at_end}
        ranks.start(train_in_session, (TOPOLOGY, 2, (Fault(3, "build", 1),), options))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    for rank in (0, 2):
        error = reports[rank].error
        assert isinstance(error, StateLostError), reports[rank]
        assert "step 0" in error.found


def test_the_end_of_the_store_ends_every_rank_with_an_error_that_says_so() -> None:
    ours, theirs = mp.Pipe()
    host = mp.get_context("forkserver").Process(target=host_store, args=(theirs,), daemon=True)
    host.start()
    port = ours.recv()
    hold = partial(hold_for_failure, step=1)
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        ranks.start(train_with_store, (port, TOPOLOGY, 3, (), None, hold))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        wait_until(lambda: store.add("held", 0) == 4, "four ranks that wait")
        host.kill()
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    host.join()
    assert all(isinstance(report.error, StoreLostError) for report in reports.values())


def test_a_rank_without_units_waits_with_the_others_and_gets_some_when_a_process_joins() -> None:
    # Seven ranks are no faster than six, since the busiest one has two of 11 columns either way.
    options = {"failures": Failures.from_global_ranks([7]), "policy": Policy(rounding="nice")}
    hold = partial(hold_for_joins, counts={1: 1})
    topology = Topology({"dp": 1, "tp": 8})
    reports = run_ranks(8, train_in_session, topology, 3, (), options, hold)
    seen = assert_survivors(reports, 3)
    # Taken in after step 0 or step 1, as soon as it asked.
    assert [one.step for one in seen[6].steps] in ([1, 2], [2])
    assert [one.step for one in seen[0].steps] == [0, 1, 2]
    assert seen[6].generations == [tuple(range(7)), tuple(range(8))]


def test_a_slow_rank_gets_fewer_units_from_the_next_step_on() -> None:
    slow = partial(slow_down_at, step=1, rank=1, speed=0.5)
    reports = run_ranks(2, train_in_session, Topology({"dp": 1, "tp": 2}), 3, (), None, slow)
    seen = assert_survivors(reports, 3)
    columns = [
        [own.states[step][1]["fc2.weight"][0].shape[1] for step in (1, 2)] for own in seen.values()
    ]
    # Of 11 columns 5 and 6, and then 7 and 4.
    assert columns == [[5, 7], [6, 4]]


def test_a_rank_that_becomes_idle_gives_its_units_to_the_others_and_waits() -> None:
    # With rank 1 so slow, rank 0 is faster alone; weights split along either dim leave rank 1.
    slow = partial(slow_down_at, step=1, rank=1, speed=0.01)
    options = {"policy": Policy(rounding="nice")}
    reports = run_ranks(2, train_in_session, Topology({"dp": 1, "tp": 2}), 3, (), options, slow)
    assert all(report.has_finished for report in reports.values()), reports
    seen = {rank: report.result for rank, report in reports.items()}
    assert [one.step for one in seen[1].steps] == [0, 1]
    assert_seen({0: seen[0]}, 3)


def test_a_caller_sees_the_norm_before_the_step_is_applied() -> None:
    reports = run_ranks(2, _stop_at_infinity)
    for report in reports.values():
        steps, weights, refusal = report.result
        assert steps == [0]
        assert weights == [1.0, 0.5]
        assert "finish()" in refusal


def _stop_at_infinity(place: RankPlace) -> tuple[list[int], list[float], str]:
    """Two steps of one weight, of which the second has an infinite gradient: what is applied."""
    applied: list[int] = []
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    weights, refusal = [float(model.weight)], ""

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))

    try:
        with Session(place, Topology({"dp": 2, "tp": 1}), {}, build) as session:
            for attempt in session.attempts(until=3):
                with attempt as step:
                    scale = math.inf if step.number == 1 else 1.0
                    step.backward(scale * model(torch.ones(1, 1)).sum())
                    if not step.finish().isfinite():
                        raise ArithmeticError("the gradient is not finite")
                    try:
                        step.commit(max_norm=1.0)
                    except ConfigError as error:
                        refusal = str(error)
                        step.commit()
                    applied.append(step.number)
                    weights.append(float(model.weight))
    except ArithmeticError:
        weights[1:] = [float(model.weight)]
    return applied, weights, refusal


def test_a_rank_that_leaves_the_loop_alone_ends_the_others_with_its_name() -> None:
    reports = run_ranks(3, _leave_at_one)
    for rank in (0, 2):
        error = reports[rank].error
        assert isinstance(error, ConfigError), reports[rank]
        assert error.found == "rank 1 has ended after 2 steps"
    # Alone, it has come to the end that it chose.
    assert reports[1].has_finished


def _leave_at_one(place: RankPlace) -> None:
    """Train three steps, of which rank 1 attempts two."""

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.ones_(model.bias)
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))

    with Session(place, Topology({"dp": 3, "tp": 1}), {}, build) as session:
        _train_until_one(session, (1,))


def _train_until_one(session: Session, leaving: Sequence[int]) -> None:
    for attempt in session.attempts(until=3):
        with attempt as step:
            step.backward(session.model(torch.ones(1, 1)).sum())
            step.commit()
            if step.number == 1 and session.rank in leaving:
                break


def test_an_idle_rank_hears_that_the_others_have_left_the_loop() -> None:
    reports = run_ranks(3, _leave_beside_an_idle_rank)
    assert [reports[rank].has_finished for rank in range(3)] == [True, True, False]
    assert "has ended after 2 steps" in str(reports[2].error)


def _leave_beside_an_idle_rank(place: RankPlace) -> None:
    """Train on ranks 0 and 1, which attempt two steps of three."""

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        torch.manual_seed(0)
        columns, over = plan.layout("0.weight", 0), groups["tp"].collectives
        layers = ColumnParallelLinear(1, columns, over), RowParallelLinear(columns, 1, over)
        model = torch.nn.Sequential(*layers)
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))

    topology, units = Topology({"dp": 1, "tp": 4}), {"*.weight": Units.columns(4)}
    options = {"policy": Policy(rounding="nice"), "failures": Failures.from_global_ranks([3])}
    limits = Timeouts(heartbeat_s=0.2, dead_after_s=10, leave_s=20, operation_s=30)
    with Session(place, topology, units, build, timeouts=limits, **options) as session:
        assert session.is_idle == (place.rank == 2)
        _train_until_one(session, (0, 1))


@pytest.mark.parametrize("point", ["forward", "ready"])
def test_buffers_and_learning_rates_of_a_step_count_once(point: str) -> None:
    # Rank 0 repeats the forward, or does not come to the line behind commit; rank 1 does.
    reports = run_ranks(2, count_in_session, 4, point, 2)
    # Gradients are the numbers of the steps.
    weight = 1 - sum(step * 0.5**step for step in range(4))
    assert [report.result for report in reports.values()] == [(4, 0.5**4, weight)] * 2


def test_a_newcomer_ends_with_those_that_were_asked_to_stop() -> None:
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        faults = (Fault(1, "forward", 1),)
        ranks.start(train_in_session, (TOPOLOGY, 6, faults, None, stop_with_a_newcomer))
        ranks.wait([1], timeout_s=scaled_s(60.0))
        # Otherwise the others may take it in as they meet, and it takes part in the step.
        ranks.place(0).store().wait(["pcomm/generation/1"])
        ranks.join_again(1)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    steps = {rank: len(report.result.steps) for rank, report in reports.items()}
    assert steps == {0: 2, 1: 0, 2: 2, 3: 2}


def test_a_rank_that_meets_the_same_error_for_ever_leaves_the_others() -> None:
    faults = (Fault(1, "forward", 1, 0),) * 9
    reports = run_ranks(2, train_in_session, Topology({"dp": 2, "tp": 1}), 3, faults)
    assert isinstance(reports[1].error, SuspectedFailure)
