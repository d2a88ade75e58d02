"""One attempt at a step: a `with` block that is left without an error when another rank fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.ntp.session import misuse

if TYPE_CHECKING:
    from pcomm.ntp.session.session import Session

__all__ = ["Attempt"]


class _Seen(NamedTuple):
    """A parameter or its gradient, with the number of writes that torch counts."""

    parameter: nn.Parameter
    tensor: Tensor | None
    writes: int


class Attempt:
    """An attempt at a step, given by `Session.attempts`; entered by `with attempt as step:`.

    Attributes:
        number: Number of the step, from 0. Later attempts at the same step have the same number.
        was_entered: True once the `with` block was entered.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.number = session.step
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
        with self._session.sync.accumulate(is_last=is_last, weight=weight):
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
        sync = self._session.sync
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
        self._session._step_end.agree(self._max_norm)
        return norm

    def __enter__(self) -> Attempt:
        self.was_entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        # A program may keep this longer than the model and the gradients live.
        self._parameters, self._gradients = [], []
        return self._session._step_end.follow(self.number, error)

    def _see_parameters(self) -> None:
        if not self._parameters:
            own = [one for one in self._session.model.parameters() if one.requires_grad]
            self._parameters = [_Seen(one, one, one._version) for one in own]

    def _check_unchanged(self) -> None:
        if any(one.parameter._version != one.writes for one in self._parameters):
            raise misuse.applied_by_hand()
        for parameter, gradient, writes in self._gradients:
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != writes):
                raise misuse.changed_after_finish()

    def _check_open(self, asked: str) -> None:
        if self._session.step != self.number:
            raise misuse.over(asked, self.number)
