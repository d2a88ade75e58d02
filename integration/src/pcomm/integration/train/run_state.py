"""What a run remembers between steps: learning rate, skipped steps, what is done on NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core import Collectives
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint, newest
from pcomm.integration.checkpoint.saver import NotFiniteError, is_finite
from pcomm.integration.config.sections import Config, Dtype, TrainConfig, given
from pcomm.integration.precision import faster_dtype

__all__ = ["NotFiniteSteps", "Progress", "Rewarm", "chosen_dtype", "first_not_finite"]
__all__ += ["learning_rate", "learning_rates"]

_log = logging.getLogger("pcomm.train")

# What decides the learning rate of a step.
_SCHEDULE: tuple[str, ...] = ("learning_rate", "schedule", "steps", "warmup_steps")
_SCHEDULE += ("min_learning_rate_ratio", "decay_steps", "decay_type", "muon_learning_rate")

# The rates of `learning_rates`, in words.
_RATES = ("the learning rate", "Muon's learning rate")


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Args:
        step: Number of steps that are done, skipped ones included.
        skipped: Number of them that changed no parameter.
        rewarm: Place where the learning rate would have jumped, if `train.rewarm_steps` smooths it.
        rows: Rows of text that were read; None for those of as many whole batches.
    """

    step: int = 0
    skipped: int = 0
    rewarm: Rewarm | None = None
    rows: int | None = None

    def state(self, config: TrainConfig) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON; `resumed` reads it. Local."""
        last = learning_rates(config, self.step - 1, self.rewarm)
        # What this configuration would do next: another one is recognised by it.
        following = learning_rates(config, self.step, self.rewarm)
        rates = {
            "last": last[0],
            "next": following[0],
            "muon_last": last[1],
            "muon_next": following[1],
            **{key: getattr(config, key) for key in _SCHEDULE},
        }
        rewarm = None if self.rewarm is None else list(self.rewarm)
        state = {"skipped": self.skipped, "learning_rate": rates, "rewarm": rewarm}
        return {**state, "dtype": config.dtype, "rows": self.rows}

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, config: TrainConfig) -> Progress:
        """Where the run of a checkpoint goes on; says if its learning rate jumps there. Local.

        Raises:
            ConfigError: `state.json` holds something else than `state` wrote.
        """
        saved = checkpoint.state()
        rates = saved.get("learning_rate")
        skipped, rewarm = saved.get("skipped", 0), _rewarm(saved.get("rewarm"))
        rows = saved.get("rows")
        known = isinstance(rates, Mapping) and _is_rate(*_saved(rates, "last", "next"))
        is_count = isinstance(skipped, int) and isinstance(rows, int | None)
        if not is_count or not (known or rates is None) or rewarm is False:
            raise ConfigError(
                f"checkpoint {checkpoint.folder}",
                found=f"state.json with skipped {skipped!r:.60}, rows {rows!r:.60}, "
                f"learning_rate {rates!r:.120}",
                why="They say how far the run is and with which learning rate it goes on.",
                fix="Remove this folder to go on from the checkpoint before it.",
            )
        assert not isinstance(rewarm, bool)
        progress = cls(checkpoint.step, skipped, rewarm, rows)
        return progress._with_change(rates, config) if isinstance(rates, Mapping) else progress

    def _with_change(self, rates: Mapping[str, Any], config: TrainConfig) -> Progress:
        coming = learning_rates(config, self.step, self.rewarm)
        if self.step >= config.steps or coming == _saved(rates, "next"):
            return self
        last = _saved(rates, "last")
        now = {key: getattr(config, key) for key in _SCHEDULE if key in rates}
        differing = [
            f"train.{key} was {rates[key]} and is {value}"
            for key, value in now.items()
            if rates[key] != value
        ]
        changed = f" ({', '.join(differing)})" if differing else ""
        if config.rewarm_steps:
            _log.warning(
                "the schedule of the learning rate has changed%s: it was %.3g, and follows the new "
                "one after train.rewarm_steps = %d",
                changed,
                last[0],
                config.rewarm_steps,
            )
            return replace(self, rewarm=Rewarm(self.step, *last))
        # One whose schedule is as it was does not jump, though it is another than in the last step.
        jumps = [
            f"{whose} jumps from {before} to {after}"
            for whose, old, planned, new in zip(
                _RATES, last, _saved(rates, "next"), coming, strict=True
            )
            if new not in (old, planned)
            for before, after in [_told_apart(old, new)]
        ]
        if jumps:
            _log.warning(
                "%s, since its schedule has changed%s; with train.rewarm_steps it gets there in so "
                "many steps, and with train.schedule=constant a longer run changes nothing",
                " and ".join(jumps),
                changed,
            )
        return replace(self, rewarm=None)


def chosen_dtype(
    config: Config, run_dir: Path, device: torch.device, *, is_new: bool
) -> tuple[Dtype, str]:
    """What `train.dtype` asks for on this device, and why where `auto` has chosen. Local.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run; what its newest checkpoint was trained in is kept.
        device: Device of this process.
        is_new: True if the run begins anew, whatever is in the folder.
    """
    dtype = config.train.dtype
    if dtype != "auto":
        return dtype, ""
    before = None if is_new else newest(run_dir)
    # What was converted has not been trained yet.
    if before is not None and before.step:
        # Checkpoints that say nothing are from before there was a choice.
        return (
            "bf16" if before.state().get("dtype") == "bf16" else "fp32"
        ), "as in the newest checkpoint"
    return faster_dtype(device, config.model.width)


def _saved(rates: Mapping[str, Any], *keys: str) -> tuple[Any, ...]:
    """Rates of both optimizers as they were saved; before there was Muon, it had none."""
    return tuple(one for key in keys for one in (rates.get(key), rates.get(f"muon_{key}", 0.0)))


def _rewarm(value: object) -> Rewarm | bool | None:
    """As it was saved; False for what no `Rewarm` was saved as."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) not in (2, 3) or not isinstance(value[0], int):
        return False
    return Rewarm(value[0], *map(float, value[1:])) if _is_rate(*value[1:]) else False


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two different rates, with three digits or as many more as it takes to see a difference."""
    for digits in range(3, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(one), repr(other)


def _is_rate(*values: object) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


class Rewarm(NamedTuple):
    """Where a run was changed so that its learning rate would jump.

    Attributes:
        step: The first step after the change, from 0.
        rate: AdamW's learning rate of the step before.
        muon_rate: Learning rate of Muon.
    """

    step: int
    rate: float
    muon_rate: float = 0.0


def learning_rates(
    config: TrainConfig, step: int, rewarm: Rewarm | None = None
) -> tuple[float, float]:
    """Of AdamW and of Muon: linear warm-up to the peak, then what `train.schedule` says. Local.

    Muon's is 0 where it is not used.

    Args:
        config: Rates, lengths and the schedule.
        step: Number of the step, from 0; the last step of a run that decays has the minimum.
        rewarm: Place from which the rates move in a straight line to those of the schedule, over
            `train.rewarm_steps`; None if they follow the schedule everywhere.
    """
    factor = _scheduled(config, step)
    rate = config.learning_rate * factor
    muon_rate = config.muon_learning_rate * factor if config.optimizer == "muon" else 0.0
    if rewarm is None or not 0 <= step - rewarm.step < config.rewarm_steps:
        return rate, muon_rate
    share = (step - rewarm.step + 1) / config.rewarm_steps
    return (
        rewarm.rate + (rate - rewarm.rate) * share,
        rewarm.muon_rate + (muon_rate - rewarm.muon_rate) * share,
    )


def learning_rate(config: TrainConfig, step: int, rewarm: Rewarm | None = None) -> float:
    """AdamW's of `learning_rates`. Local."""
    return learning_rates(config, step, rewarm)[0]


# What is left of the rate after a share of the decay.
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def _scheduled(config: TrainConfig, step: int) -> float:
    """The rate as a factor of its peak."""
    warmup, schedule = config.warmup_steps, config.schedule
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    kind: str = schedule
    length = config.steps - warmup
    if schedule == "wsd":
        kind, length = (
            config.decay_type,
            min(given(config.decay_steps, max(1, config.steps // 5)), length),
        )
    done = step + 1 - (config.steps - length)
    left = _DECAYS[kind](min(1.0, max(0.0, done / max(1, length))))
    ratio = config.min_learning_rate_ratio
    return ratio + (1 - ratio) * left


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

    def record_finite(self) -> None:
        """A step was done. Local."""
        self._in_a_row = 0

    def record_not_finite(self, step: int, loss: float, norm: float, culprit: str | None) -> None:
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
