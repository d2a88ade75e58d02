"""One attempt at a step: applied by all ranks, or given up by all; and what follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core.collectives import Collectives
from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import store_errors
from pcomm.ntp.session.recovery import Recovery

__all__ = ["Attempt", "StepEnd"]


class Attempt:
    """An attempt at a step, given by `Session.attempts`; entered by `with attempt as step:`.

    Attributes:
        number: Number of the step, from 0. Later attempts at the same step have the same number.
        was_entered: True once the `with` block was entered.
    """

    def __init__(self, end: StepEnd) -> None:
        self._end, self._recovery = end, end.recovery
        self.number = end.recovery.applied
        self.was_entered = False
        self._norm: Tensor | None = None
        self._max_norm = math.inf
        self._parameters: list[_Seen] = []
        self._gradients: list[_Seen] = []

    def backward(self, loss: Tensor, *, weight: float = 1.0, is_last: bool = True) -> None:
        """Compute gradients, whose sums over replicas start meanwhile. Collective.

        Args:
            loss: Loss of this rank's micro-batch.
            weight: Factor of its gradients in the sum over replicas; see `GradSync.accumulate`.
            is_last: True for the last micro-batch of the step.

        Raises:
            ConfigError: The step is applied, or another order of calls; see `GradSync.accumulate`.
            PeerError: Another rank failed; the `with` block takes it.
        """
        self._check_open("Attempt.backward")
        self._see_parameters()
        with self._recovery.require_sync().accumulate(is_last=is_last, weight=weight):
            loss.backward()

    def finish(self, *, max_norm: float | None = None) -> Tensor:
        """Finish the sums of gradients, and clip them. Collective.

        For callers that look at the norm before the step is applied: an error that they raise here
        alike on all ranks ends the job with the state before the step. `commit` calls it otherwise.

        Args:
            max_norm: Largest norm of all gradients that is left as it is; None does not clip.

        Returns:
            The norm of all gradients before, in fp64 and with the same bits on all ranks.

        Raises:
            ConfigError: The sums of this step are finished, or it is applied.
            PeerError: Another rank failed; the `with` block takes it.
        """
        self._check_open("Attempt.finish")
        sync = self._recovery.require_sync()
        sync.finish()
        self._norm = sync.grad_norm() if max_norm is None else sync.clip_grad_norm_(max_norm)
        self._max_norm = math.inf if max_norm is None else max_norm
        self._see_parameters()
        self._gradients = [
            _Seen(own, own.grad, 0 if own.grad is None else own.grad._version)
            for own, _, _ in self._parameters
        ]
        return self._norm

    def commit(self, *, max_norm: float | None = None) -> Tensor:
        """Agree that all ranks are ready, and apply the step. Collective.

        Args:
            max_norm: Largest norm that is left as it is, for `finish`, which is called first unless
                the caller has done so.

        Returns:
            The norm, as `finish` returns it.

        Raises:
            ConfigError: A `max_norm` after `finish`, parameters that were changed since the first
                `backward` or gradients since `finish`, or a step that is applied.
            DivergenceError: Ranks gave another `max_norm`, or replicas have drifted apart.
            PeerError: Another rank failed; the `with` block takes it.
        """
        self._check_open("Attempt.commit")
        if self._norm is not None and max_norm is not None:
            raise ConfigError(
                f"Attempt.commit: max_norm={max_norm}",
                found="gradients that are finished, with or without clipping",
                why="They are clipped once, by the norm that finish() has returned.",
                fix="Give max_norm to finish(), and nothing to commit().",
            )
        norm = self.finish(max_norm=max_norm) if self._norm is None else self._norm
        self._check_unchanged()
        self._end.apply_together(self._max_norm)
        return norm

    def __enter__(self) -> Attempt:
        self.was_entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        # A program may keep this longer than the model and the gradients live.
        self._parameters, self._gradients = [], []
        return self._end.after_attempt(self.number, error)

    def _see_parameters(self) -> None:
        if not self._parameters:
            own = [
                one
                for one in self._recovery.require_built().model.parameters()
                if one.requires_grad
            ]
            self._parameters = [_Seen(one, one, one._version) for one in own]

    def _check_unchanged(self) -> None:
        if any(one.parameter._version != one.writes for one in self._parameters):
            raise ConfigError(
                "Attempt.commit",
                found="parameters that were changed since the first backward(), as by "
                "optimizer.step()",
                why="commit() calls optimizer.step() once all ranks are ready, so the step would "
                "be applied twice.",
                fix="Leave optimizer.step() and scaler.step() out. A Session takes no "
                "GradScaler: train in bf16 or fp32.",
            )
        for parameter, gradient, writes in self._gradients:
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != writes):
                raise ConfigError(
                    "Attempt.commit",
                    found="gradients that were changed since finish(), as by torch's "
                    "clip_grad_norm_",
                    why="A norm that a rank takes of its own shards differs between ranks, and "
                    "so would what they apply.",
                    fix="Give max_norm to finish() or commit(). What is done to each element by "
                    "itself, such as clipping by value, goes into "
                    "optimizer.register_step_pre_hook. A Session takes no GradScaler: train in "
                    "bf16 or fp32.",
                )

    def _check_open(self, asked: str) -> None:
        if self._recovery.applied != self.number:
            raise ConfigError(
                f"{asked} in the attempt at step {self.number}",
                found="a step that is applied already",
                why="Each step is applied once; the next one has an attempt of its own.",
                fix="Call it before commit(), and commit() once.",
            )


class _Seen(NamedTuple):
    """A parameter or its gradient, with the number of writes that torch counts."""

    parameter: nn.Parameter
    tensor: Tensor | None
    writes: int


class StepEnd:
    """The end of each step of this rank.

    Args:
        recovery: State of this rank.
        membership: This process as a member of the job.
        device: Device of tensors between ranks.

    Attributes:
        recovery: State of this rank.
        asks_generation: True if this rank asks for another generation at the end of its next step.
        until: Number of steps after which this rank attempts none.
    """

    def __init__(self, recovery: Recovery, membership: Membership, device: torch.device) -> None:
        self.recovery, self._membership, self._device = recovery, membership, device
        self.asks_generation, self.until = False, 0
        self._is_asked = False

    def apply_together(self, max_norm: float | None = None) -> None:
        """Agree that all ranks are ready, and apply the step. Collective over all ranks.

        Args:
            max_norm: Norm by which the gradients were clipped, infinite where they were not; None
                on a rank without units.

        Raises:
            DivergenceError: Ranks differ in `max_norm` or `until`, or replicas have drifted apart.
            PeerError: Another rank failed.
        """
        recovery = self.recovery
        opened = recovery.require_opened()
        with store_errors():
            asks_generation = self.asks_generation or self._membership.wants_in()
        recovery.check_drift()
        recovery.is_ready = True
        everyone = opened.everyone.collectives
        settings = {"until": float(self.until), "max_norm": max_norm}
        self._is_asked = wait_until_all_ready(asks_generation, settings, everyone, self._device)
        recovery.check_device()
        recovery.apply()
        recovery.gather_weights()
        if recovery.sync is not None:
            recovery.sync.zero_grad()

    def after_attempt(self, number: int, error: BaseException | None) -> bool:
        """Begin another generation if an attempt failed, or a rank asks for one. Then collective.

        Args:
            number: Number of its step.
            error: Error that left its `with` block, or None.

        Returns:
            Whether the error is taken.

        Raises:
            ConfigError: The step was not committed.
        """
        is_asked, self._is_asked = self._is_asked, False
        if error is not None:
            reason = self.recovery.recoverable_reason(error)
        elif self.recovery.applied == number:
            raise ConfigError(
                f"Session: the attempt at step {number}",
                found="an end of the with block without commit()",
                why="A step that is not committed is not applied, and would come for ever.",
                fix="Call step.commit() at the end of the block.",
            )
        else:
            reason = "a process joins, or a rank asks for a change" if is_asked else None
        if reason is None:
            return False
        self.begin_generation(reason)
        return True

    def begin_generation(self, reason: str) -> None:
        """Begin another generation, which has all that this rank asked for. Collective."""
        self.asks_generation = False
        self.recovery.next_generation(reason)


def wait_until_all_ready(
    asks_generation: bool,
    settings: Mapping[str, float | None],
    collectives: Collectives,
    device: torch.device,
) -> bool:
    """Tell that this rank is ready, and wait until all are. Collective over all ranks.

    When its one all-reduce ends on a rank, every rank has entered it with its gradients summed.
    It may end on some ranks and fail on others; see `resume_point`.

    Args:
        asks_generation: True to ask for another generation after the step, such as for new speeds.
        settings: Numbers that must be the same on all ranks, by name; the same names on all. None
            on a rank that has none, such as one without units.
        collectives: Collectives of all ranks of the generation.
        device: Device that the collectives take tensors on.

    Returns:
        Whether any rank asks for another generation.

    Raises:
        DivergenceError: Ranks differ in a setting; on every rank, none of which applies the step.
    """
    # The largest and the least of each, by one reduction.
    pairs = [(-math.inf, -math.inf) if v is None else (v, -v) for v in settings.values()]
    told = torch.tensor(
        [float(asks_generation), *sum(pairs, ())], dtype=torch.float64, device=device
    )
    asked, *found = collectives.all_reduce(told, op="max").tolist()
    for name, most, least in zip(settings, found[::2], found[1::2], strict=True):
        if most != -least and most != -math.inf:
            raise DivergenceError(
                f"Session: {name}",
                found=f"{most:g} on one rank, {-least:g} on another",
                why="All ranks apply the same steps, so that replicas stay equal.",
                fix=f"Give the same {name} on all ranks.",
            )
    return bool(asked)
