"""What a run does about a step whose loss or gradient is not a number."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pcomm.core import Collectives
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.config import TrainConfig
from pcomm.integration.finite import NotFiniteError, is_finite

__all__ = ["NotFiniteSteps", "first_not_finite"]

_log = logging.getLogger("pcomm.train")


def first_not_finite(model: nn.Module, everyone: Collectives) -> str | None:
    """Where numbers stopped being finite, in words; the same on all ranks.

    Collective over all ranks: two small reductions. Parameters are looked at in the order of the
    forward pass, then gradients in the order in which backward makes them.

    Args:
        model: The model, with the gradients of the step.
        everyone: Collectives of all ranks.

    Returns:
        The first such tensor and the lowest rank that has it; None if all tensors are finite.
    """
    candidates = list(_candidates(model))
    mine = next(
        (i for i, (_, t) in enumerate(candidates) if t is not None and not is_finite(t)),
        len(candidates),
    )
    device = next(model.parameters()).device
    # The smallest position, and the lowest of the ranks that have it.
    place = -_largest(-mine, everyone, device)
    rank = -_largest(-everyone.rank if mine == place else -everyone.size, everyone, device)
    return f"{candidates[place][0]} on rank {rank}" if place < len(candidates) else None


class NotFiniteSteps:
    """Stops the run at such a step, or counts it as skipped, as `train.on_nan` says.

    Args:
        config: `on_nan` and `skip_limit` decide.
        run_dir: Folder of the run, in which the last good checkpoint is looked for, to name it.
        skipped: Steps that earlier starts of the run have skipped.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, *, skipped: int = 0) -> None:
        self._config, self._run_dir = config, run_dir
        self._in_a_row = 0
        self.skipped = skipped
        """Steps that were skipped over all starts of the run."""

    def note_good(self) -> None:
        """A step was done. Local."""
        self._in_a_row = 0

    def note_bad(self, step: int, loss: float, norm: float, culprit: str | None) -> None:
        """A step was not done. Local; every rank calls it with the same arguments.

        Args:
            step: Number of the step, from 1.
            loss: Mean loss over the global batch.
            norm: Global norm of the gradient.
            culprit: The result of `first_not_finite`.

        Raises:
            NotFiniteError: The run is to stop, or has skipped `train.skip_limit` steps in a row.
        """
        found = f"loss {loss}, gradient norm {norm}" + (
            f"; the first tensor that is not finite is {culprit}" if culprit else ""
        )
        if self._config.on_nan == "stop":
            raise self._error(step, found)
        self._in_a_row += 1
        self.skipped += 1
        _log.warning("step %d skipped: %s", step, found)
        if self._in_a_row >= self._config.skip_limit:
            raise self._error(step, f"{self._in_a_row} skipped steps in a row, now with {found}")

    def _error(self, step: int, found: str) -> NotFiniteError:
        good = newest(self._run_dir)
        kept = (
            f"The last good checkpoint, {good.folder}, is after step {good.step}; the same command "
            "goes on from it"
            if good is not None
            else "There is no checkpoint yet; the same command begins anew"
        )
        return NotFiniteError(
            f"train: step {step}",
            found=found,
            why="An update with it would make the weights worthless, so none was made.",
            fix=f"{kept}. Lower train.learning_rate or train.clip_norm, warm up for longer, or set "
            "train.on_nan=skip to leave out single steps.",
        )


def _candidates(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    named = list(model.named_parameters())
    for name, parameter in named:
        yield f"the parameter {name}", parameter.detach()
    for name, parameter in reversed(named):
        # Of a shard, this rank's part: the ranks compare below what each has found.
        gradient = parameter.grad
        yield f"the gradient of {name}", None if gradient is None else gradient.as_subclass(Tensor)


def _largest(number: int, everyone: Collectives, device: torch.device) -> int:
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    return int(everyone.all_reduce(mine, op="max"))
