"""Runs the schedule: turns what modules do into collectives at the right moment."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch

from pcomm.core.errors import ConfigError, DivergenceError, PcommError, PeerError
from pcomm.fsdp.flat_group import FlatGroup
from pcomm.fsdp.peers import Peers
from pcomm.fsdp.policy import CommPolicy
from pcomm.fsdp.reuse import Reuse
from pcomm.fsdp.schedule import (
    Buffer,
    Mark,
    OnDemand,
    Phase,
    Schedule,
    Step,
    compile_schedule,
)
from pcomm.fsdp.stretch_recorder import StretchRecorder
from pcomm.fsdp.units import ROOT

__all__ = ["Engine", "Unit"]

# One topic for all, so that a rank that fails can join wherever the others are.
_RECORDING = "fsdp: first step"

_log = logging.getLogger("pcomm.fsdp")


class Unit:
    """A unit while the model runs.

    Args:
        name: Its name.
        module: Its module.
        groups: Its parameter groups that communicate or convert.
        input_dtype: To which inputs of floating point are cast; None leaves them.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        groups: Sequence[FlatGroup],
        *,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.module, self.groups = name, module, tuple(groups)
        self.input_dtype = input_dtype
        self.begin()

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self.num_uses = 0
        self.num_open_inputs = 0
        self.is_bounded = True
        self.has_graph = False
        self.is_in_backward = False
        self.has_left_backward = False
        for group in self.groups:
            group.begin()


class Engine:
    """The state of one sharded model between and within micro-batches.

    Hooks tell it what modules do. In the first micro-batch it gathers on demand and records; then
    the ranks compare what they recorded, and from there on the compiled schedule is replayed.

    Args:
        units: All units, the root first.
        policy: Depths.
        peers: The ranks that take part.
        reuse: Gradient buffers, to be freed at the end of a step.
    """

    def __init__(
        self, units: Sequence[Unit], policy: CommPolicy, peers: Peers, reuse: Reuse
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.is_last = True
        self.phase: Phase | None = None
        self.token = 0
        self.depth = 0
        self.issued: Counter[str] = Counter()
        self.stretches: StretchRecorder | None = None
        self._policy, self._peers, self._reuse = policy, peers, reuse
        self._groups = {group.plan.name: group for unit in units for group in unit.groups}
        self._traces: dict[str, tuple[Mark, ...]] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._gathered: frozenset[str] = frozenset()
        self._recording: OnDemand | None = None
        self._schedule: Schedule | None = None
        self._next = 0
        self._mode = ""
        self._in_backward: list[Unit] = []
        self._is_waiting_for_backward = False
        self._failure = ""
        self._num_recoveries = 0
        self._is_broken = False

    # -- what hooks report -----------------------------------------------------------------

    def begin(self) -> None:
        """The model's forward begins."""
        if self._is_waiting_for_backward:
            self._stop("a forward with gradients enabled was not followed by its backward")
        elif self.phase is not None:
            self._stop("the step before ended with an error in backward")
        if self._failure:
            self._recover()
        self.token += 1
        self.phase = "forward"
        self._mode = "train" if torch.is_grad_enabled() else "eval"
        # The optimizer may step at any time after the last micro-batch: what an evaluation gathers
        # there may be stale soon.
        is_last = self.is_last
        for unit in self.units.values():
            unit.begin()
        if self._mode == "train":
            for group in self._groups.values():
                group.check()
        trace = self._traces.get(self._mode)
        if trace is None:
            self._schedule = None
            self._recording = OnDemand(
                self._buffers(is_last),
                inflight_reduce=self._policy.inflight_reduce,
                gathered=self._gathered,
                is_last=is_last,
            )
        else:
            self._schedule, self._next = self.schedule(self._mode, is_last=is_last), 0

    def use(self, unit: Unit, phase: Phase) -> None:
        """A unit's module is about to compute."""
        self._mark(Mark("use", unit.name, phase))
        if phase == "backward":
            unit.is_in_backward = True
            self._in_backward.append(unit)

    def done(self, unit: Unit, phase: Phase) -> None:
        """A unit's module has computed."""
        if phase == "backward":
            unit.is_in_backward, unit.has_left_backward = False, True
            self._in_backward.remove(unit)
        self._mark(Mark("done", unit.name, phase))

    def end_forward(self, has_graph: bool) -> None:
        """The model's forward has ended; `has_graph` if a backward can follow."""
        if has_graph:
            self._is_waiting_for_backward = True
        else:
            self._end("forward")

    def begin_backward(self, token: int) -> bool:
        """A gradient has reached the model; true for the first one of this backward.

        Raises:
            ConfigError: The graph is that of an earlier forward.
        """
        if token != self.token or self.phase is None:
            raise ConfigError(
                "backward of a sharded model",
                found="a graph of an earlier forward, or one that has had its backward",
                why="Each forward is followed by its backward: parameters are gathered for one.",
                fix="Call backward after each forward; use torch.no_grad() where there is none.",
            )
        is_first = self.phase == "forward"
        self.phase, self._is_waiting_for_backward = "backward", False
        return is_first

    def end_backward(self) -> None:
        """Autograd has finished."""
        for unit in reversed(list(self._in_backward)):
            self.done(unit, "backward")
        self._end("backward")

    def fail(self, error: BaseException) -> None:
        """The model's forward raised: tell the others, and be ready for another step.

        If every rank raised at the same place, such as for a batch that all of them refuse, the
        next step goes on. If not, it is an error on all ranks.
        """
        was_recording, self._recording = self._recording is not None, None
        self._stop(f"{type(error).__name__}: {error}")
        if was_recording and isinstance(error, Exception):
            # The others compare notes at every use of a unit, and would wait for this rank.
            with suppress(PcommError, type(error)):
                self._peers.agree(_RECORDING, [], error=error)

    def heard(self) -> str | None:
        """What a rank said that failed since all ranks last went on together.

        Not in this micro-batch alone: with gradients that are reduced once a step, a rank may have
        gone on to the next one before it needs the rank that failed.
        """
        return self._peers.heard(round_number=self._num_recoveries)

    # -- schedules -------------------------------------------------------------------------

    def schedule(
        self, mode: str, *, is_last: bool, gathered: frozenset[str] | None = None
    ) -> Schedule:
        """The schedule of the next micro-batch, or of one that finds `gathered`; once recorded."""
        gathered = self._gathered if gathered is None else gathered
        key = mode, gathered, is_last
        if key not in self._schedules:
            self._schedules[key] = compile_schedule(
                self._traces[mode],
                self._buffers(is_last),
                prefetch=self._policy.prefetch,
                prefetch_bytes=self._policy.prefetch_bytes,
                prefetch_backward=self._policy.prefetch_backward,
                inflight_reduce=self._policy.inflight_reduce,
                gathered=gathered,
                is_last=is_last,
            )
        return self._schedules[key]

    @property
    def has_recorded(self) -> bool:
        """Whether a training step has been recorded."""
        return "train" in self._traces

    def invalidate(self) -> None:
        """The shards have changed: gather before the next use."""
        self._gathered = frozenset()

    def _buffers(self, is_last: bool) -> list[Buffer]:
        buffers = []
        for group in self._groups.values():
            plan = group.plan
            reduces = plan.is_trainable and (is_last or plan.shard.reduce == "micro_batch")
            buffers.append(
                Buffer(
                    plan.name,
                    plan.unit,
                    plan.gathered_bytes,
                    plan.shard.keep,
                    reduces,
                    reduces and is_last and plan.num_replicas > 1,
                )
            )
        return buffers

    # -- execution -------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        if self.stretches is not None:
            self.stretches.pause(mark)
        try:
            if self._recording is not None:
                steps = self._record(self._recording, mark)
            else:
                steps = self._advance(mark)
            for step in steps:
                self._do(step)
            if self.stretches is not None:
                self.stretches.resume()
        except PcommError as error:
            # Out of forward the entry point says so; backward has nobody else who would.
            if self.phase == "backward":
                self.fail(error)
            raise

    def _record(self, recording: OnDemand, mark: Mark) -> Sequence[Step]:
        if mark.kind == "use" and self._policy.checks_first_step:
            self._agree([" ".join(mark)])
        return recording.steps_for(mark)

    def _advance(self, mark: Mark) -> Sequence[Step]:
        """The steps up to and after `mark` that can be done now."""
        assert self._schedule is not None
        steps = self._schedule.steps
        place = self._next
        while place < len(steps) and not steps[place].is_anchor:
            place += 1
        expected = steps[place] if place < len(steps) else None
        if expected != (mark.kind, mark.unit, mark.phase):
            raise _departed(mark, expected)
        place += 1
        # What blocks is left to the moment where its result is needed.
        while place < len(steps) and not steps[place].is_anchor:
            if steps[place].is_blocking and mark.kind != "end":
                break
            place += 1
        taken, self._next = steps[self._next : place], place
        return taken

    def _do(self, step: Step) -> None:
        kind = step.kind
        if kind == "use":
            for group in self.units[step.name].groups:
                group.attach()
                if step.phase == "backward":
                    group.expect_gradients()
        elif kind not in ("done", "end"):
            group = self._groups[step.name]
            if kind in ("gather", "reduce", "replicate"):
                self.issued[kind] += 1
            getattr(group, kind)()
            if kind == "release":
                group.leave()

    def _end(self, phase: Phase) -> None:
        self._mark(Mark("end", ROOT, phase))
        if self._recording is not None:
            self._gathered = self._recording.gathered
            self._compare(tuple(self._recording.marks))
        else:
            assert self._schedule is not None
            self._gathered = self._schedule.gathered_at_end
        for group in self._groups.values():
            group.end()
        self._reuse.clear()
        self.phase = None
        self._is_waiting_for_backward = False

    def _compare(self, marks: tuple[Mark, ...]) -> None:
        """The ranks compare what they recorded. Collective."""
        used = {mark.unit for mark in marks}
        unused = [name for name, unit in self.units.items() if unit.groups and name not in used]
        error = _unused(unused) if unused else None
        self._agree([" ".join(mark) for mark in marks], error)
        self._recording = None
        self._traces[self._mode] = marks
        _log.debug("recorded %d marks of %s", len(marks), self._mode)

    # -- errors ----------------------------------------------------------------------------

    def _agree(self, lines: Sequence[str], error: PcommError | None = None) -> None:
        """Compare notes while recording; an error ends the recording. Collective."""
        recording, self._recording = self._recording, None
        self._peers.agree(_RECORDING, lines, error=error)
        self._recording = recording

    def _stop(self, reason: str) -> None:
        """Give this micro-batch up, and say so to ranks that wait in it."""
        self._failure = self._failure or reason
        try:
            for group in self._groups.values():
                group.drain()
        except PeerError:
            # What is still on its way may write into its buffers at any time.
            self._is_broken = True
        self._peers.sound(reason, round_number=self._num_recoveries)
        self.phase, self.depth = None, 0
        self._recording, self._schedule = None, None
        self._is_waiting_for_backward = False
        self._in_backward.clear()
        self._gathered = frozenset()
        self._reuse.clear()
        for group in self._groups.values():
            group.detach()
            if not self._is_broken:
                group.reset()

    def _recover(self) -> None:
        """Go on after an error if it left all ranks at the same place. Collective."""
        error = _broken(self._failure) if self._is_broken else None
        counts = [f"{kind}s issued: {self.issued[kind]}" for kind in ("gather", "reduce")]
        self._peers.agree("fsdp: step after an error", counts, error=error)
        self._failure = ""
        self._num_recoveries += 1


def _departed(mark: Mark, expected: Step | None) -> DivergenceError:
    found = "the end of the schedule" if expected is None else " ".join(expected)
    return DivergenceError(
        f"fsdp: {mark.phase} {mark.kind} of unit {mark.unit!r}",
        found=f"the schedule recorded in the first step has {found} here",
        why="Gathers are issued ahead in the recorded order, which is the same on all ranks.",
        fix="Use all units in the same order in every step, or make one unit of what varies.",
    )


def _unused(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"fully_shard: units {', '.join(names[:8])}",
        found="they took no part in the first forward",
        why="A unit that is not used would never get gradients, nor be gathered.",
        fix="Call the unit's module in forward, or leave it out of units and freeze or remove it.",
    )


def _broken(reason: str) -> PeerError:
    return PeerError(
        "fsdp: step after an error",
        found=f"collectives that some ranks never joined, after: {reason}",
        why="The next collective would meet what is left of the last ones.",
        fix="Open new groups and shard the model again, or restart from a checkpoint.",
    )
