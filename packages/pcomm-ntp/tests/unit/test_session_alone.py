"""What a session does and refuses on its one rank, with a store in this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ntp_support.refusals import refused
from pcomm.core import Groups, Topology
from pcomm.core.errors import ClosedError, ConfigError, LayoutError, UnsupportedError
from pcomm.core.face import version_of
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp import NtpPlan, Session, TrainState, Units
from pcomm.ntp.session.failure_detection import SuspectedFailure
from pcomm.ntp.session.session import _device_of


def session_of(build: Callable[[NtpPlan, Groups, int], TrainState], **options: Any) -> Session:
    store = dist.HashStore()
    return Session(lambda: store, Topology({"dp": 1, "tp": 1}), {}, build, rank=0, **options)


def weight_of_one(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
    """A weight that each step lowers by a quarter."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))


def loss_of(session: Session) -> Tensor:
    loss: Tensor = session.model(torch.ones(1, 1)).sum()
    return loss


def one_step(build: Callable[[NtpPlan, Groups, int], TrainState]) -> None:
    with session_of(build) as session:
        for attempt in session.attempts(until=1):
            with attempt as step:
                step.backward(session.model(torch.ones(1, 2)).sum())
                step.commit()


def changed_step(session: Session, finishes: bool, change: Callable[[Session], object]) -> None:
    """A step in which the program changes something before `commit`."""
    with session:
        for attempt in session.attempts(until=1):
            with attempt as step:
                step.backward(loss_of(session))
                if finishes:
                    step.finish()
                change(session)
                step.commit()


def broken_connection() -> SuspectedFailure:
    return SuspectedFailure("a test", found="nothing", why="A fault.", fix="Go on.")


def test_a_step_is_committed_once() -> None:
    with session_of(weight_of_one) as session:
        for attempt in session.attempts(until=2):
            with attempt as step:
                step.backward(loss_of(session))
                step.commit()
                with pytest.raises(
                    ConfigError, match=r"commit in the attempt at step \d: a step that is applied"
                ):
                    step.commit()
                refused(ConfigError, "finish in the attempt", step.finish)
                refused(ConfigError, "backward in the attempt", step.backward, loss_of(session))
        assert session.step == 2
        assert session.model.weight.item() == 0.5


def test_gradients_of_an_attempt_that_failed_do_not_count_where_the_model_stays() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    has_failed = False

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))

    with session_of(build) as session:
        for attempt in session.attempts(until=1):
            with attempt as step:
                step.backward(loss_of(session))
                if not has_failed:
                    has_failed = True
                    raise broken_connection()
                step.commit()
        assert session.generation == 1
    assert model.weight.item() == 0.75


def test_speeds_are_of_ranks_of_the_job_and_the_last_one_counts() -> None:
    with session_of(weight_of_one) as session:
        for attempt in session.attempts(until=3):
            with attempt as step:
                if step.number == 0:
                    for speed in (0.0, 1.5, float("nan")):
                        refused(ConfigError, "set_speed: rank 0", session.set_speed, 0, speed)
                    refused(ConfigError, "set_speed: rank 7", session.set_speed, 7, 0.5)
                    session.set_speed(0, 0.25)
                    session.set_speed(0, 0.5)
                step.backward(loss_of(session))
                step.commit()
        assert session.plan.rank_speeds == ((0, 0.5),)
        # Both changes in one, at the end of the first step.
        assert session.generation == 1


def test_an_error_at_the_end_is_the_reason_for_the_generation_that_follows() -> None:
    errors = [broken_connection()]

    def at_end(session: Session) -> None:
        if errors:
            raise errors.pop()

    with session_of(weight_of_one, at_end=at_end) as session:
        pass
    assert [one.reason for one in session.transitions] == ["the job starts", "a test: nothing"]


def test_backends_that_are_not_there_are_refused_and_nccl_sets_its_variables(monkeypatch) -> None:
    asked = "Session: backend='nccl'"
    refused(UnsupportedError, asked, session_of, weight_of_one, backend="nccl", device="cuda")
    refused(UnsupportedError, "Session: backend='mpi'", session_of, weight_of_one, backend="mpi")
    # As on a machine with a GPU.
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    refused(ConfigError, asked, session_of, weight_of_one, backend="nccl")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    device = torch.device("cuda")
    refused(ConfigError, "the environment of ranks", _device_of, "nccl", device)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    for name in ("ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "BLOCKING_WAIT", "DESYNC_DEBUG"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "0")
    with pytest.warns(UserWarning, match="never run on NCCL"):
        assert _device_of("nccl", device) == torch.device("cuda", 3)
    assert _device_of("gloo", torch.device("cpu")) == torch.device("cpu")


def test_sources_that_are_not_installed_begin_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setitem(version_of.__globals__, "version", version)
    with session_of(weight_of_one) as session:
        assert session.generation == 0


def test_a_session_that_was_closed_has_no_attempts() -> None:
    session = session_of(weight_of_one)
    session.close()
    session.close()
    refused(ClosedError, "attempts", next, session.attempts(until=1))


def test_a_loop_that_is_left_ends_the_job_where_all_ranks_leave_it() -> None:
    with session_of(weight_of_one) as session:
        for attempt in session.attempts(until=5):
            with attempt as step:
                step.backward(loss_of(session))
                step.commit()
                break
        assert session.step == 1


def test_a_step_that_the_program_has_changed_itself_is_not_applied() -> None:
    twice, changed = r"(?s)applied twice.*no GradScaler", "gradients that were changed since finish"
    cases: list[tuple[str, bool, Callable[[Session], object]]] = [
        (twice, True, lambda session: session.optimizer.step()),
        # Here with gradients that are not even summed.
        (twice, False, lambda session: session.optimizer.step()),
        (changed, True, lambda session: nn.utils.clip_grad_norm_(session.model.parameters(), 0.5)),
        (changed, True, lambda session: setattr(session.model.weight, "grad", torch.ones(1, 1))),
    ]
    for match, finishes, change in cases:
        session = session_of(weight_of_one)
        refused(ConfigError, match, changed_step, session, finishes, change)
        assert session.step == 0


def test_a_hook_of_the_optimizer_may_change_gradients_by_element() -> None:
    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        built = weight_of_one(plan, groups, rank)
        built.optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_value_(built.model.parameters(), 0.5)
        )
        return built

    with session_of(build) as session:
        for attempt in session.attempts(until=1):
            with attempt as step:
                step.backward(loss_of(session))
                step.commit()
        assert session.model.weight.item() == 0.875


def test_what_build_returns_is_a_model_and_an_optimizer_that_a_session_can_move() -> None:
    with pytest.raises(ConfigError, match=r"Session: build: .* returns a tuple"):
        session_of(lambda *_: (nn.Linear(1, 1), None))  # type: ignore[arg-type,return-value]

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Of the name alone: torch's needs a default group."""

    def zero(*_: object) -> TrainState:
        model = nn.Linear(1, 1)
        return TrainState(model, ZeroRedundancyOptimizer(model.parameters(), lr=1.0))

    refused(UnsupportedError, "spreads its state over ranks", session_of, zero)


def test_layouts_of_foreign_layers_come_with_the_model() -> None:
    layout = Layout.even(2, 1)

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = nn.Linear(1, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return TrainState(model, optimizer, {"weight": ParamLayout(layout)} if knows else None)

    units = {"weight": Units.columns(2)}
    for knows in (True, False):
        store, axes = dist.HashStore(), Topology({"dp": 1, "tp": 1})
        if knows:
            Session(lambda store=store: store, axes, units, build, rank=0).close()
            continue
        with pytest.raises(LayoutError, match="the model holds it whole"):
            Session(lambda store=store: store, axes, units, build, rank=0)


def test_an_optimizer_whose_state_cannot_move_is_refused_in_the_first_step() -> None:
    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = nn.Linear(2, 3)
        return TrainState(model, torch.optim.Adafactor(model.parameters()))

    refused(UnsupportedError, "'row_var' of parameter 'weight'", one_step, build)
