"""Evidence, decisions, and scalars of optimizers, without ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.ntp import TrainState
from pcomm.ntp.session.failure_detection import ExitReports, HeartbeatTimeout
from pcomm.ntp.session.records import Decision, Join, Records
from pcomm.ntp.session.resume_point import RankState
from pcomm.ntp.session.training_state import scalars_of, set_scalars


def tell(store: dist.Store, number: int, text: str) -> None:
    store.add("pcomm/ended/count", 1)
    store.set(f"pcomm/ended/{number}", text)


def test_the_end_of_a_process_that_was_replaced_is_not_that_of_the_one_of_now() -> None:
    store = dist.HashStore()
    ends = ExitReports(store)
    tell(store, 1, "3 0 killed by SIGKILL")
    assert ends.read()
    assert not ends.read()
    assert ends.of(3, {}) == "killed by SIGKILL"
    assert ends.of(3, {3: 1}) is None
    assert ends.of(2, {}) is None
    tell(store, 2, "3 1 failed: ValueError: no such file")
    ends.read()
    assert ends.of(3, {3: 1}) == "failed: ValueError: no such file"
    # The first process of rank 2 stood still, and ends after another one has replaced it.
    tell(store, 3, "2 0 killed by SIGKILL")
    ends.read()
    assert ends.of(2, {2: 1}) is None
    assert ends.of(2, {}) == "killed by SIGKILL"


def test_an_end_whose_text_is_not_there_yet_is_read_later() -> None:
    store = dist.HashStore()
    ends = ExitReports(store)
    store.add("pcomm/ended/count", 1)
    assert not ends.read()
    store.set("pcomm/ended/1", "0 0 finished")
    assert ends.read()
    assert ends.of(0, {}) == "finished"


def test_only_time_in_which_the_watching_process_looked_counts_as_silence() -> None:
    silence = HeartbeatTimeout(longest_look_s=1.0)
    assert silence.look(1, "5", 100.0) == 0.0
    assert silence.look(1, "5", 100.5) == 0.5
    # Stopped for an hour itself.
    assert silence.look(1, "5", 3700.0) == 1.5
    assert silence.look(2, "5", 3700.0) == 0.0
    assert silence.look(1, "6", 3701.0) == 0.0
    assert silence.look(1, "6", 3701.25) == 0.25


def test_the_first_decision_counts() -> None:
    records = Records(dist.HashStore())
    assert records.decision(0) is None
    first = Decision((0, 2), {2: "token"}, {2: 4}, {0: 0.5}, gone={1: "killed"})
    assert records.decide(0, first) == first
    assert records.decide(0, Decision((0, 1))) == first
    assert records.decision(0) == first
    assert not first.is_end
    assert records.decide(1, Decision(())).is_end


def test_what_ranks_say_is_read_back() -> None:
    records = Records(dist.HashStore())
    arrival = RankState(3, 4, 17, is_ready=True)
    records.say(3, 1, arrival)
    assert records.said(3, [0, 1]) == {1: arrival}
    join = Join(1, "token", 2, {"torch": "2"})
    records.ask_to_join(join)
    assert records.joins(0, records.num_joins()) == [(1, join)]
    assert not records.is_answered("token")
    records.mark_taken("token")
    assert records.is_answered("token")
    # An empty reason is one, too.
    records.say_left(3, 1, "")
    assert records.left(3, 1) is not None


def built(lr: float = 0.1) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.95)))


def test_scalars_of_an_optimizer_arrive_exactly_and_room_for_the_rest_is_made() -> None:
    one, other = built(0.1), built(0.7)
    for _ in range(3):
        one.model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        one.optimizer.step()
    one.optimizer.param_groups[0]["lr"] = 1 / 3
    set_scalars(other, scalars_of(one))
    assert other.optimizer.param_groups[0]["lr"] == 1 / 3
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        state, found = one.optimizer.state[mine], other.optimizer.state[theirs]
        assert found.keys() == state.keys()
        assert torch.equal(found["step"], state["step"])
        assert found["step"].dtype == state["step"].dtype
        assert found["exp_avg"].shape == theirs.shape
        assert found["exp_avg"].dtype == torch.float64
        assert not found["exp_avg"].any()


def test_state_that_is_neither_cut_nor_shared_is_refused_by_name() -> None:
    one = built()
    one.optimizer.state[one.model.weight]["row"] = torch.zeros(2)
    with pytest.raises(UnsupportedError, match="'row' of parameter 'weight'"):
        scalars_of(one)
    other = built()
    other.optimizer.state[torch.zeros(1)] = {"step": torch.zeros(())}
    with pytest.raises(ConfigError, match="not one of the model's"):
        scalars_of(other)


def test_groups_of_parameters_are_the_same_in_each_generation() -> None:
    one, other = built(), built()
    other.optimizer.add_param_group({"params": nn.Parameter(torch.zeros(1))})
    with pytest.raises(ConfigError, match=r"2 groups of parameters, and 1 before"):
        set_scalars(other, scalars_of(one))
