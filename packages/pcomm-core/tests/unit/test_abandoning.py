"""Communicators that only an abort ends, in the place of NCCL's: in which order, and how often."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg

from pcomm.core.collectives import IdentityCollectives, InstrumentedCollectives, Pending
from pcomm.core.collectives.instrumented import interruptible
from pcomm.core.collectives.protocol import Call
from pcomm.core.errors import ClosedError, ConfigError, PeerError, UnsupportedError
from pcomm.core.groups import abandoning
from pcomm.core.groups.abandoning import outlive_failures
from pcomm.core.groups.communicators import communicator_of
from pcomm.core.groups.open_groups import Groups
from pcomm.core.process import world
from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until


class _Aborts:
    """Which communicators of which ranks are aborted, and what one waits for."""

    def __init__(self, *needed: Sequence[str]) -> None:
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._needed = needed

    def abort(self, name: str, patience_s: float) -> None:
        with self._changed:
            self.log.append(name)
            self._changed.notify_all()
            mine = {other for group in self._needed if name in group for other in group}
            if not self._changed.wait_for(lambda: mine <= {*self.log}, patience_s):
                raise RuntimeError(f"the abort of {name} waits for ever")


class _OnDevice(dist.ProcessGroup):
    """A communicator of two ranks, whose operations end by an abort."""

    def __init__(self, name: str, aborts: _Aborts, patience_s: float = PATIENCE_S) -> None:
        super().__init__(0, 2)
        self._name, self._of, self._patience_s = name, aborts, scaled_s(patience_s)
        world = distributed_c10d._world
        world.pg_map[self] = ("nccl", dist.HashStore())
        world.pg_names[self] = name
        world.pg_group_ranks[self] = {0: 0, 1: 1}
        world.pg_backend_config[self] = "cuda:nccl"
        distributed_c10d._register_process_group(name, self)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._name

    def abort(self) -> None:
        self._of.abort(self._name, self._patience_s)


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    assert not [one for one in distributed_c10d._world.pg_map if isinstance(one, _OnDevice)]


@pytest.mark.parametrize("is_of_nccl", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_an_error_within_connect_aborts_a_default_group_of_nccl_before_its_end(
    is_of_nccl: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Noted(abandoning.Abort):
        def __init__(self, process_group: dist.ProcessGroup) -> None:
            assert process_group is dist.group.WORLD
            log.append("abort")

        def problem(self, end_s: float) -> str | None:
            log.append("waited")
            return None

    end = dist.destroy_process_group
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(
        world,
        "_init_process_group",
        lambda _backend, **options: dist.init_process_group(
            "fake", store=fake_pg.FakeStore(), **options
        ),
    )
    monkeypatch.setattr(world, "_wait_for_all_to_leave", lambda _world: log.append("left"))
    monkeypatch.setattr(abandoning, "is_abortable", lambda _group: is_of_nccl)
    monkeypatch.setattr(abandoning, "Abort", Noted)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (log.append("end"), end()))
    with suppress(KeyError), world.connect(backend="gloo", device="cpu"):
        if fails:
            raise KeyError
    assert log == ([*["abort", "waited"] * is_of_nccl] if fails else ["left"]) + ["end"]
    assert not dist.is_initialized()


NAMES = ["tp", "dp", "everyone"]
# What an abort needs of others: those of this device, or of the same communicator elsewhere.
ORDERS = {
    "memory of the device": [[f"{rank} {name}" for name in NAMES] for rank in range(2)],
    "the other rank": [[f"{rank} {name}" for rank in range(2)] for name in NAMES],
}


@pytest.mark.parametrize("needed", ORDERS.values(), ids=ORDERS)
def test_aborts_of_two_ranks_in_any_order_wait_for_each_other_and_end(needed) -> None:
    aborts = _Aborts(*needed)
    # Each rank has opened them in another order.
    owned = [
        [_OnDevice(f"{rank} {name}", aborts) for name in names]
        for rank, names in enumerate((NAMES, NAMES[::-1]))
    ]
    handles = [communicator_of(one).collectives for own in owned for one in own]
    freed = [weakref.ref(one) for own in owned for one in own]
    problems: list[Exception] = []

    def leave(own: list[dist.ProcessGroup]) -> None:
        try:
            abandoning.abandon_communicators(own)
        except UnsupportedError as error:
            problems.append(error)

    ranks = [threading.Thread(target=leave, args=(own,)) for own in owned]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not problems
    assert sorted(aborts.log) == sorted(f"{rank} {name}" for rank in range(2) for name in NAMES)
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.all_reduce(torch.ones(1))
    wait_until(lambda: not any(one() for one in freed), "communicators that are freed")


@pytest.mark.parametrize("needed", ORDERS.values(), ids=ORDERS)
def test_one_abort_after_the_other_would_wait_for_ever(needed) -> None:
    """What the test above stands on: its communicators do hang in the wrong order."""
    aborts = _Aborts(*needed)
    first = _OnDevice("0 tp", aborts, patience_s=0.05)
    with pytest.raises(RuntimeError, match="0 tp waits for ever"):
        first.abort()
    abandoning._forget(first)


def test_an_abort_that_never_ends_is_an_error_that_names_it(monkeypatch) -> None:
    monkeypatch.setattr(abandoning, "_ABORT_S", 0.1)
    aborts = _Aborts(["stuck", "never begun"], ["broken"])
    stuck, broken, fine = (_OnDevice(name, aborts) for name in ("stuck", "broken", "fine"))

    def fail() -> None:
        raise RuntimeError("unhandled cuda error")

    broken.abort = fail  # type: ignore[method-assign]
    kept, freed = weakref.ref(stuck), weakref.ref(fine)
    groups = Groups([], owned=[stuck, broken, fine])
    del stuck, broken, fine
    with pytest.raises(UnsupportedError) as raised:
        groups.abandon()
    assert "'stuck': its abort has not ended in time" in raised.value.found
    assert "'broken': its abort failed: unhandled cuda error" in raised.value.found
    assert "fine" not in raised.value.found
    wait_until(lambda: freed() is None, "the communicator that is freed")
    # Its destructor would wait for the device.
    assert kept() is not None
    groups.abandon()
    aborts.abort("never begun", 0.0)


def test_a_failure_aborts_each_once_while_the_host_calls_nothing() -> None:
    aborts, told = _Aborts(), list[str]()
    looks = threading.Event()

    def failure() -> str | None:
        looks.set()
        return told[0] if told else None

    owned = [_OnDevice(name, aborts) for name in NAMES]
    groups = Groups([], owned=owned)
    del owned
    groups.abort_on(failure)
    assert looks.wait(scaled_s(PATIENCE_S))
    assert not aborts.log
    told.append("rank 1 has ended")
    wait_until(lambda: len(aborts.log) == 3, "three aborts")
    groups.abandon()
    assert sorted(aborts.log) == sorted(NAMES)


def test_groups_whose_block_fails_are_left_and_not_closed() -> None:
    aborts, called = _Aborts(), list[str]()

    def use() -> None:
        with Groups([], owned=[_OnDevice("tp", aborts)]) as groups:
            groups.before_close(lambda: called.append("waits for others"))
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        use()
    assert aborts.log == ["tp"]
    assert not called


class _Queue(InstrumentedCollectives):
    """One of two ranks, whose operations are queued and end by an abort alone."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(IdentityCollectives())
        self.size, self.waits, self._told = 2, 0, told

    def run(self, call: Call) -> Tensor:
        return call.x

    def start(self, call: Call) -> Pending:
        def finish() -> Tensor:
            self.waits += 1
            if self._told:
                raise RuntimeError("NCCL communicator was aborted")
            return call.x

        return Pending(finish)


def test_what_is_queued_is_not_waited_for_and_the_next_call_hears_of_a_failure() -> None:
    told: list[str] = []
    queue = _Queue(told)
    ours = interruptible(queue, lambda: told[0] if told else None, is_aborted=True)
    x = torch.ones(2)
    # The others would ask whether it has ended, which this one does not tell.
    assert ours.all_reduce(x) is x
    assert ours.all_reduce_async(x).wait() is x
    with pytest.raises(UnsupportedError, match="whose end neither"):
        interruptible(queue, lambda: None).all_reduce_async(x).wait()
    pending = ours.all_reduce_async(x)
    told.append("rank 1 has ended")
    for call in (lambda: ours.all_reduce(x), lambda: ours.all_reduce_async(x), pending.wait):
        with pytest.raises(PeerError, match="rank 1 has ended"):
            call()
    assert queue.waits == 1


def test_variables_of_watchdogs_are_set_or_refused_by_name() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "false", "PATH": "/bin"}
    outlive_failures(environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["TORCH_NCCL_ENABLE_MONITORING"] == "false"
    outlive_failures(environ)
    for name, value in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "True"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("NCCL_BLOCKING_WAIT", "y"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
    ):
        wrong = {name: value}
        with pytest.raises(ConfigError, match="Unset them") as raised:
            outlive_failures(wrong)
        assert name in raised.value.found
        assert list(wrong) == [name]


def test_torch_knows_the_variables_by_these_names() -> None:
    """By the header that it comes with; other names would change nothing."""
    folder = Path(torch.__path__[0], "include", "torch", "csrc", "distributed", "c10d")
    text = (folder / "ProcessGroupNCCL.hpp").read_text()
    for name in abandoning._SETTINGS:
        assert f'"{name}"' in text
    older = {name for name in abandoning._OLDER.values() if f'"{name}"' in text}
    assert older == {"NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"}
