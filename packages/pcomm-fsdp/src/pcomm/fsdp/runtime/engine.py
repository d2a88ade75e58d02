"""Runs the schedule: turns what modules do into collectives at the right moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pcomm.core.errors import PcommError
from pcomm.fsdp.guards import running_model_errors
from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.departures import Departures
from pcomm.fsdp.runtime.forward_pass import ForwardPass
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard
from pcomm.fsdp.runtime.peers import Peers
from pcomm.fsdp.runtime.recovery import Recovery
from pcomm.fsdp.runtime.schedule import Mark, Owed, Phase, Schedule, Step
from pcomm.fsdp.runtime.stepper import Stepper
from pcomm.fsdp.runtime.unit import Unit
from pcomm.fsdp.settings.policy import CommPolicy

if TYPE_CHECKING:
    from pcomm.fsdp.analysis.compute_recorder import ComputeRecorder

__all__ = ["Engine"]


class Engine:
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

    Attributes:
        units: The units by name.
        groups: The parameter groups that communicate or convert, by name.
        is_last: True if the next backward is the last of its step.
        phase: Forward or backward of the micro-batch that is open; None between micro-batches.
        depth: 1 while an entry point of the model runs, else 0.
        current: The last forward that has begun.
        num_backwards: Number of backwards that have begun.
        issued: Number of steps taken of each kind.
        compute_recorder: Records what units compute; None records nothing.
        is_closed: True after `close`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shards: Sequence[ParamShard | LocalParams],
        policy: CommPolicy,
        peers: Peers,
        pool: BufferPool,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.is_last = True
        self.phase: Phase | None = None
        self.current = ForwardPass(0)
        self.depth = 0
        self.num_backwards = 0
        self.issued: Counter[str] = Counter()
        self.compute_recorder: ComputeRecorder | None = None
        self._recovery, self._pool = Recovery(peers), pool
        self._shards = tuple(shards)
        self.groups = {group.plan.name: group for unit in units for group in unit.groups}
        plans = [group.plan for group in self.groups.values()]
        departures = Departures(peers.groups, self._recovery.raise_if_peer_failed)
        self._stepper = Stepper(plans, policy, departures)
        self._recomputed = ForwardPass(0)
        self._entered: set[ForwardPass] = set()
        self._in_backward: list[Unit] = []
        # Forwards up to this one were part of a micro-batch that was given up.
        self._last_given_up = 0
        self._endings: list[Callable[[], object]] = []
        self.is_closed = False

    # -- what hooks report -----------------------------------------------------------------

    def begin(self, entry_point: str) -> None:
        """A forward of the model begins."""
        if self.phase == "backward":
            self._stop("the step before ended with an error in backward")
        if self._recovery.is_due:
            self._recovery.agree(self.issued)
            self._stepper.begin_again(self._recovery.round_number)
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
        self._mark(Mark("use", unit.name, phase))
        if phase == "backward":
            unit.is_in_backward = True
            self._in_backward.append(unit)

    def done(self, unit: Unit, phase: Phase) -> None:
        """A unit's module has computed."""
        if phase == "backward":
            unit.is_in_backward = False
            unit.passes.clear()
            self._in_backward.remove(unit)
        self._mark(Mark("done", unit.name, phase))

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
            raise running_model_errors.second_derivatives()
        if forward in self._entered:
            return False
        if self.is_closed:
            raise running_model_errors.closed("backward of a sharded model")
        if self.depth:
            raise running_model_errors.backward_within_forward()
        if forward.is_over or forward.token <= self._last_given_up:
            raise running_model_errors.second_backward()
        if forward.versions != self._versions():
            raise running_model_errors.changed_weights()
        self._entered.add(forward)
        if self.phase == "backward":
            # One loss of several forwards.
            return False
        if self.phase is None:
            self._begin("backward", "backward")
        else:
            self._stepper.set_last(self.is_last)
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
            error.add_note(running_model_errors.SHAPES_OF_SHARDS)
            reason = f"{reason}. {running_model_errors.SHAPES_OF_SHARDS}"
        self._stop(reason)

    def peer_failure(self) -> str | None:
        """Message of a rank that has failed since all ranks last went on together. Local.

        Not in this micro-batch alone: with gradients that are reduced once a step, a rank may have
        gone on to the next one before it needs the rank that failed.

        Raises:
            DivergenceError: A rank does something else than this one.
        """
        message = self._recovery.peer_failure()
        if message is None:
            self._stepper.check_peers()
        return message

    # -- ownership -------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[ParamShard | LocalParams, ...]:
        """This rank's shard of every parameter group, in the order of the units.

        Raises:
            ClosedError: The model was closed.
        """
        if self.is_closed:
            raise running_model_errors.closed("a part of a sharded model")
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
        self.phase, self.depth, self.compute_recorder = None, 0, None
        self.units, self.groups, self._shards = {}, {}, ()
        self._in_backward.clear()
        self._entered.clear()
        self._recovery.close()
        self._stepper.close()

    # -- schedules -------------------------------------------------------------------------

    def schedule(
        self, *, is_last: bool, gathered: frozenset[str] | None = None, owed: Owed | None = None
    ) -> Schedule | None:
        """The schedule of the next micro-batch if it trains as the last one that did. Local.

        Args:
            is_last: True if it is the last one of its step.
            gathered: Names of groups that are gathered before it; None for those that are now.
            owed: Gradients that earlier ones have left to it; None for those that they have now.
        """
        trace = self._stepper.last_training
        if trace is None:
            return None
        return self._stepper.schedule(trace, is_last=is_last, gathered=gathered, owed=owed)

    def unused(self) -> list[str]:
        """Units that took part in no micro-batch of late. Local."""
        seen = self._stepper.seen
        return [name for name, unit in self.units.items() if unit.groups and name not in seen]

    def invalidate(self) -> None:
        """The shards have changed: gather before the next use."""
        self._stepper.invalidate()

    def forget_gradients(self) -> None:
        """Drop the gradients of earlier micro-batches that are not reduced yet."""
        for group in self.groups.values():
            group.gradients.forget()
        self._stepper.forget_gradients()

    # -- execution -------------------------------------------------------------------------

    def _begin(self, phase: Phase, context: str) -> None:
        self.phase = phase
        for unit in self.units.values():
            unit.begin()
        self._stepper.begin(context, is_last=self.is_last)

    def _mark(self, mark: Mark) -> None:
        if self.compute_recorder is not None:
            self.compute_recorder.pause(mark)
        try:
            for step in self._stepper.steps_for(mark):
                self._do(step)
            if self.compute_recorder is not None:
                self.compute_recorder.resume()
        except PcommError as error:
            # In forward the entry point tells the peers; in backward nothing else would.
            if self.phase == "backward":
                self.fail(error)
            raise

    def _do(self, step: Step) -> None:
        if step.kind == "use":
            for group in self.units[step.name].groups:
                group.unsharded.install()
                if step.phase == "backward":
                    group.gradients.expect()
        if step.is_anchor:
            return
        self.issued[step.kind] += 1
        group = self.groups[step.name]
        match step.kind:
            case "gather":
                group.unsharded.gather()
            case "wait_gather":
                group.unsharded.wait_gather()
            case "release":
                group.unsharded.release()
                group.unsharded.leave()
            case "reduce":
                group.gradients.reduce()
            case "wait_reduce":
                group.gradients.wait_reduce()
            case "all_reduce":
                group.gradients.all_reduce()
            case "wait_all_reduce":
                group.gradients.wait_all_reduce()

    def _end(self, phase: Phase) -> None:
        self._mark(Mark("end", ROOT, phase))
        self._stepper.end()
        for group in self.groups.values():
            group.end()
        self._pool.clear()
        for forward in self._entered:
            forward.is_over = True
        self._entered.clear()
        self.phase = None

    def _versions(self) -> tuple[int, ...]:
        return tuple(group.shard.version for group in self.groups.values())

    def _stop(self, reason: str) -> None:
        """Give this micro-batch up, and say so to ranks that wait in it."""
        self._recovery.give_up(reason, self.groups.values())
        self.phase, self.depth = None, 0
        self._last_given_up = self.current.token
        self._stepper.give_up()
        self._in_backward.clear()
        self._entered.clear()
        self._pool.clear()
