"""The state of a sharded model: its units, forwards and micro-batches, after errors too."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import ClosedError, ConfigError, PcommError, PeerError, UnsupportedError
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.param_group import BufferPool, ParamGroup
from pcomm.fsdp.runtime.peers import FailureAwareWait, Peers, ScheduleAgreement
from pcomm.fsdp.runtime.schedule import Operation, Phase, Schedule, UnitEvent, UnreducedGrads
from pcomm.fsdp.runtime.schedule_executor import ScheduleExecutor
from pcomm.fsdp.runtime.shards import LocalParams, ParamShard
from pcomm.fsdp.settings import CommPolicy

__all__ = ["ForwardPass", "FsdpRuntime", "Unit", "closed"]


# Said with torch's own errors about shapes, which may be those of shards on some ranks alone.
_SHAPES_OF_SHARDS = (
    "fsdp: outside of the forward of its unit, a parameter is this rank's shard, of fewer rows. If "
    "a module reads weights of one that it does not call, let the module that reads be the unit."
)


class FsdpRuntime:
    """The state of one sharded model between and within micro-batches.

    Hooks tell it what modules do. A micro-batch is a forward, with its backward if that follows
    before the next forward; or a backward alone, of a forward further back. What it has never done
    is gathered on demand and recorded; what it has done before is replayed from a schedule.

    It owns what the model was sharded into, until it is closed.

    Args:
        units: All units that communicate or convert, the root first.
        shards: This rank's shard of every parameter group, and the groups that stay as they are.
        policy: Depths of gathers ahead and of reduces in flight.
        peers: The ranks that take part.
        pool: Gradient buffers, freed at the end of a step.
        wait: The waits of the groups, which from now on see failures of other ranks.

    Attributes:
        units: The units by name.
        groups: The parameter groups that communicate or convert, by name.
        is_last: True if the next backward is the last of its step.
        phase: Forward or backward of the micro-batch that is open; None between micro-batches.
        in_entry_point: True while an entry point of the model runs.
        current: The last forward that has begun.
        num_backwards: Number of backwards that have begun.
        issued: Number of steps taken of each kind.
        unit_clock: Times what units compute; None for nothing.
        is_closed: True after `close`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shards: Sequence[ParamShard | LocalParams],
        policy: CommPolicy,
        peers: Peers,
        pool: BufferPool,
        wait: FailureAwareWait,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.is_last = True
        self.phase: Phase | None = None
        self.current = ForwardPass(0)
        self.in_entry_point = False
        self.num_backwards = 0
        self.issued: Counter[str] = Counter()
        self.unit_clock: UnitClock | None = None
        self._peers, self._pool, self._wait = peers, pool, wait
        # The groups wait with it, and this is made of the groups.
        wait.failure_or_departure = self.failure_or_departure
        self._shards = tuple(shards)
        self.groups = {group.plan.name: group for unit in units for group in unit.groups}
        plans = [group.plan for group in self.groups.values()]
        agreement = ScheduleAgreement(peers.groups, self._raise_if_peer_failed)
        self._executor = ScheduleExecutor(plans, policy, agreement)
        self._recomputed = ForwardPass(0)
        self._entered: set[ForwardPass] = set()
        self._in_backward: list[Unit] = []
        # Forwards up to this one were part of a micro-batch that was given up.
        self._last_given_up = 0
        self._endings: list[Callable[[], object]] = []
        self.is_closed = False
        # Since all ranks last went on together: the first error, and if it left a collective open.
        self._failure, self._is_broken = "", False
        # Number of failures that all ranks have left behind.
        self._round_number = 0

    # -- what hooks report -----------------------------------------------------------------

    def begin(self, entry_point: str) -> None:
        """A forward of the model begins."""
        if self.phase == "backward":
            self._stop("the step before ended with an error in backward")
        if self._failure:
            self._agree_to_go_on()
        elif self.phase is not None:
            # That forward had gradients, and its backward comes later or never.
            self._end("forward")
        grad = torch.is_grad_enabled()
        for group in self.groups.values():
            group.check(trains=grad)
        versions = self._versions()
        self.current = ForwardPass(self.current.token + 1, versions)
        self._begin("forward", f"{entry_point} {'train' if grad else 'eval'}")

    def use(self, unit: Unit, phase: Phase) -> None:
        """A unit's module is about to compute."""
        self._take_steps(UnitEvent("use", unit.name, phase))
        if phase == "backward":
            unit.is_in_backward = True
            self._in_backward.append(unit)

    def done(self, unit: Unit, phase: Phase) -> None:
        """A unit's module has computed."""
        if phase == "backward":
            unit.is_in_backward = False
            unit.passes.clear()
            self._in_backward.remove(unit)
        self._take_steps(UnitEvent("done", unit.name, phase))

    def end_forward(self, has_graph: bool) -> None:
        """The model's forward has ended; `has_graph` if a backward can follow."""
        if not has_graph:
            self._end("forward")

    def begin_backward(self, forward: ForwardPass) -> bool:
        """A gradient has reached an output of a unit; true for the first one of a backward.

        Args:
            forward: The forward that the output is of.

        Raises:
            ConfigError: That forward has had its backward, or was given up, or weights have changed
                since.
            UnsupportedError: Backward makes a graph of itself.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward of a sharded model with create_graph=True",
                found="a graph of the backward, as a penalty on gradients needs it",
                why="That graph reads weights after they were released, and its own backward has "
                "no schedule that gathers them.",
                fix="Leave the model whole, or take a penalty that needs first derivatives alone, "
                "such as the difference of two forwards.",
            )
        if forward in self._entered:
            return False
        if self.is_closed:
            raise closed("backward of a sharded model")
        if self.in_entry_point:
            raise ConfigError(
                "backward of a sharded model",
                found="its forward, which is still running",
                why="A unit is in its forward or in its backward; its parameters are released "
                "after each.",
                fix="Compute gradients within the forward of one unit, or after that of the model.",
            )
        if forward.is_over or forward.token <= self._last_given_up:
            raise ConfigError(
                "backward of a sharded model",
                found="the graph of a forward that has had its backward, or was given up after an "
                "error",
                why="A unit's gradients are reduced, and its parameters released, once for each "
                "forward.",
                fix="Call backward once for each forward, for all its losses together.",
            )
        if forward.versions != self._versions():
            raise ConfigError(
                "backward of a sharded model",
                found="parameters that were written after the forward that it belongs to",
                why="They are gathered again for backward, which would compute with other weights.",
                fix="Call backward before the optimizer steps and before parameters are loaded.",
            )
        self._entered.add(forward)
        if self.phase == "backward":
            # One loss of several forwards.
            return False
        if self.phase is None:
            self._begin("backward", "backward")
        else:
            self._executor.set_last(self.is_last)
        self.phase = "backward"
        self.num_backwards += 1
        self._recomputed = ForwardPass(0)
        return True

    def watched_by(self, unit: Unit) -> ForwardPass | None:
        """The forward that is to learn when backward passes what `unit` computes now.

        None for what is computed again for a graph that is there already.
        """
        if self.phase == "forward":
            return self.current
        if any(unit.name in forward.watched for forward in (*self._entered, self._recomputed)):
            return None
        # Under a reentrant checkpoint there was no graph before.
        unit.passes.add(self._recomputed)
        return self._recomputed

    def end_backward(self) -> None:
        """Autograd has finished."""
        for unit in reversed(list(self._in_backward)):
            self.done(unit, "backward")
        self._end("backward")

    def fail(self, error: BaseException) -> None:
        """The model's forward or backward raised: tell the others, and be ready for another step.

        If every rank raised at the same place, such as for a batch that all of them refuse, the
        next step goes on. If not, it is an error on all ranks.
        """
        reason = f"{type(error).__name__}: {error}"
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, PcommError)
        if is_torchs and any(one in reason for one in ("shape", "size")):
            error.add_note(_SHAPES_OF_SHARDS)
            reason = f"{reason}. {_SHAPES_OF_SHARDS}"
        self._stop(reason)

    def tell_failure(self, reason: str) -> None:
        """Have ranks that wait for this one stop with an error that says why. Local."""
        self._peers.tell_failure(reason, round_number=self._round_number)

    def complete(self, pending: Pending, what: str) -> Tensor:
        """The result of a collective between micro-batches, which ranks begin by a call. Local.

        Args:
            pending: The collective.
            what: What every rank has to call, for the errors of this rank and of the others.

        Raises:
            PeerError: Another rank failed, or did not call it within the group's time limit.
        """
        try:
            return self._wait(pending, what)
        except PcommError as problem:
            self.tell_failure(str(problem))
            raise

    def failure_or_departure(self) -> str | None:
        """Message of a rank that has failed since all ranks last went on together. Local.

        Not in this micro-batch alone: with gradients that are reduced once a step, a rank may have
        gone on to the next one before it needs the rank that failed.

        Raises:
            DivergenceError: A rank does something else than this one.
        """
        message = self._peers.failure(round_number=self._round_number)
        if message is None:
            self._executor.check_peers()
        return message

    # -- ownership -------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[ParamShard | LocalParams, ...]:
        """This rank's shard of every parameter group, in the order of the units.

        Raises:
            ClosedError: The model was closed.
        """
        if self.is_closed:
            raise closed("a part of a sharded model")
        return self._shards

    def at_end(self, call: Callable[[], object]) -> None:
        """Have `call` called when this closes."""
        self._endings.append(call)

    def close(self) -> None:
        """Take the model off its groups, and let go of everything. Local.

        The model keeps this rank's shards as parameters, and refuses to compute. Collectives that
        are in flight are not waited for: a peer may never join them. Calling it again does
        nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        endings, self._endings = self._endings[::-1], []
        for call in endings:
            call()
        for group in self.groups.values():
            group.close()
        for shard in self._shards:
            shard.close()
        self._pool.clear()
        self.phase, self.in_entry_point, self.unit_clock = None, False, None
        self.units, self.groups, self._shards = {}, {}, ()
        self._in_backward.clear()
        self._entered.clear()
        self._peers = Peers([])
        self._executor.close()

    # -- schedules -------------------------------------------------------------------------

    def schedule(
        self,
        *,
        is_last: bool,
        gathered: frozenset[str] | None = None,
        unreduced: UnreducedGrads | None = None,
    ) -> Schedule | None:
        """The schedule of the next micro-batch if it trains as the last one that did. Local.

        Args:
            is_last: True if it is the last one of its step.
            gathered: Names of groups that are gathered before it; None for those that are now.
            unreduced: Gradients that earlier ones have left to it; None for those there are now.
        """
        trace = self._executor.last_training
        if trace is None:
            return None
        return self._executor.schedule(
            trace, is_last=is_last, gathered=gathered, unreduced=unreduced
        )

    def unused(self) -> list[str]:
        """Units that took part in no micro-batch of late. Local."""
        seen = self._executor.seen
        return [name for name, unit in self.units.items() if unit.groups and name not in seen]

    def invalidate(self) -> None:
        """The shards have changed: gather before the next use."""
        self._executor.invalidate()

    def forget_gradients(self) -> None:
        """Drop the gradients of earlier micro-batches that are not reduced yet."""
        for group in self.groups.values():
            group.gradients.forget()
        self._executor.forget_gradients()

    # -- execution -------------------------------------------------------------------------

    def _begin(self, phase: Phase, context: str) -> None:
        self.phase = phase
        for unit in self.units.values():
            unit.begin()
        self._executor.begin(context, is_last=self.is_last)

    def _take_steps(self, event: UnitEvent) -> None:
        if self.unit_clock is not None:
            self.unit_clock.pause(event)
        try:
            for op in self._executor.steps_for(event):
                self._do(op)
            if self.unit_clock is not None:
                self.unit_clock.resume()
        except PcommError as error:
            # In forward the entry point tells the peers; in backward nothing else would.
            if self.phase == "backward":
                self.fail(error)
            raise

    def _do(self, op: Operation) -> None:
        if op.kind == "use":
            for group in self.units[op.name].groups:
                group.unsharded.install()
                if op.phase == "backward":
                    group.gradients.expect()
        if op.is_anchor:
            return
        self.issued[op.kind] += 1
        group = self.groups[op.name]
        match op.kind:
            case "gather":
                group.unsharded.gather()
            case "wait_gather":
                group.unsharded.wait_gather()
            case "release":
                group.unsharded.uninstall_checked()
                group.unsharded.release()
            case "reduce":
                group.gradients.reduce()
            case "wait_reduce":
                group.gradients.wait_reduce()
            case "all_reduce":
                group.gradients.all_reduce()
            case "wait_all_reduce":
                group.gradients.wait_all_reduce()

    def _end(self, phase: Phase) -> None:
        self._take_steps(UnitEvent("end", ROOT, phase))
        self._executor.end()
        for group in self.groups.values():
            group.end()
        self._pool.clear()
        for forward in self._entered:
            forward.is_over = True
        self._entered.clear()
        self.phase = None

    def _versions(self) -> tuple[int, ...]:
        return tuple(group.shard.version for group in self.groups.values())

    # -- after an error --------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """Give this micro-batch up: say so to ranks that wait in it, and free what it held."""
        self._failure = self._failure or reason
        groups = self.groups.values()
        try:
            for group in groups:
                group.drain()
        except PcommError:
            # A collective in flight may write into its buffers at any time.
            self._is_broken = True
        self._peers.tell_failure(reason, round_number=self._round_number)
        for group in groups:
            group.unsharded.uninstall()
            if not self._is_broken:
                group.reset()
        self.phase, self.in_entry_point = None, False
        self._last_given_up = self.current.token
        self._executor.give_up()
        self._in_backward.clear()
        self._entered.clear()
        self._pool.clear()

    def _agree_to_go_on(self) -> None:
        """Go on if the error left all ranks at the same place. Collective.

        Raises:
            PeerError: A collective never ended, here or on another rank.
            DivergenceError: Ranks have issued different numbers of collectives.
        """
        error = None
        if self._is_broken:
            error = PeerError(
                "fsdp: step after an error",
                found=f"collectives that some ranks never joined, after: {self._failure}",
                why="The next collective would meet what is left of the last ones.",
                fix="Open new groups and shard the model again, or restart from a checkpoint.",
            )
        counts = [f"{kind}s issued: {self.issued[kind]}" for kind in ("gather", "reduce")]
        self._peers.agree("fsdp: step after an error", counts, error=error)
        self._failure = ""
        self._round_number += 1
        self._executor.begin_again(self._round_number)

    def _raise_if_peer_failed(self) -> None:
        """Raise a `PeerError` if a rank has failed since all last went on together. Local."""
        message = self._peers.failure(round_number=self._round_number)
        if message is not None:
            raise PeerError(
                "fsdp: what units do",
                found=f"an error on {message}",
                why="What was not foreseen in the schedule is done by all ranks or none.",
                fix="Repair what that rank reports.",
            )


def closed(asked: str) -> ClosedError:
    """The model was used after it had been closed."""
    return ClosedError(
        asked,
        found="a sharded model that was closed",
        why="Closing it, or the groups that it was sharded over, ends its communication.",
        fix="Do it before that, inside the `with` block of the groups; to go on, open groups, "
        "build the model again, shard it and load what was saved.",
    )


class UnitClock(Protocol):
    """Told when a unit begins or ends something, and when the runtime has done its part of that."""

    def pause(self, event: UnitEvent) -> None:
        """The runtime takes over."""

    def resume(self) -> None:
        """The unit goes on."""


class Unit:
    """A module, its parameter groups, and its state in a micro-batch.

    Args:
        name: Name of the module in the model.
        module: The module.
        groups: Parameter groups of the module that communicate or convert.
        input_dtype: Dtype that floating-point inputs are cast to; None leaves them.

    Attributes:
        is_in_backward: True from the moment backward comes to it until backward has passed it.
        passes: Forwards that backward is in the unit for.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ParamGroup],
        *,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.module, self.groups = name, module, tuple(groups)
        self.input_dtype = input_dtype
        self.passes: set[ForwardPass] = set()
        self.begin()

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self.is_in_backward = False
        self.passes.clear()
        for group in self.groups:
            group.begin()

    def has_passed(self) -> bool:
        """True if backward has passed all uses of the unit that it came for."""
        return all(one.has_passed(self.name) for one in self.passes)


class ForwardPass:
    """State that a forward leaves for its backward. Hooks in its graph hold it; it holds no model.

    Args:
        token: Number of the forward in the model, ascending.
        versions: Version of each shard when it began.

    Attributes:
        thread: Identifier of the thread that computed it.
        watched: Units with an input hook that reports when backward has passed them.
        unbounded: Units with a use that no input hook reports: no input had a gradient.
        is_over: True after its backward.
        open_inputs: Number of uses that backward has not passed yet, by unit.
    """

    def __init__(self, token: int, versions: tuple[int, ...] = ()) -> None:
        self.token, self.versions = token, versions
        self.thread = threading.get_ident()
        self.is_over = False
        self.watched: set[str] = set()
        self.unbounded: set[str] = set()
        self.open_inputs: Counter[str] = Counter()

    def has_passed(self, unit: str) -> bool:
        """True if backward has passed all uses of a unit."""
        return not self.open_inputs[unit] and unit not in self.unbounded
