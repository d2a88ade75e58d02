"""What a run remembers beside its tensors: skipped steps, and where its learning rate was."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.config import TrainConfig
from pcomm.integration.train.schedule import Rewarm, learning_rate

__all__ = ["Progress"]

_log = logging.getLogger("pcomm.train")


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Args:
        step: Number of steps that are done, skipped ones included.
        skipped: Number of them that changed no parameter.
        rewarm: Place where the learning rate would have jumped, if `train.rewarm_steps` smooths it.
    """

    step: int = 0
    skipped: int = 0
    rewarm: Rewarm | None = None

    def state(self, config: TrainConfig) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON; `resumed` reads it. Local."""
        rates = {
            "last": learning_rate(config, self.step - 1, self.rewarm),
            # What this configuration would do next: another one is recognised by it.
            "next": learning_rate(config, self.step, self.rewarm),
            "steps": config.steps,
        }
        rewarm = None if self.rewarm is None else list(self.rewarm)
        return {"skipped": self.skipped, "learning_rate": rates, "rewarm": rewarm}

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, config: TrainConfig) -> Progress:
        """Where the run of a checkpoint goes on; says if its learning rate jumps there. Local.

        Raises:
            ConfigError: `state.json` holds something else than `state` wrote.
        """
        saved = checkpoint.state()
        rates = saved.get("learning_rate")
        skipped, rewarm = saved.get("skipped", 0), _rewarm(saved.get("rewarm"))
        known = isinstance(rates, Mapping) and _is_rate(rates.get("last"), rates.get("next"))
        if not isinstance(skipped, int) or not (known or rates is None) or rewarm is False:
            raise ConfigError(
                f"checkpoint {checkpoint.folder}",
                found=f"state.json with skipped {skipped!r:.60}, learning_rate {rates!r:.120}",
                why="They say how far the run is and with which learning rate it goes on.",
                fix="Remove this folder to go on from the checkpoint before it.",
            )
        assert not isinstance(rewarm, bool)
        progress = cls(checkpoint.step, skipped, rewarm)
        return progress._with_change(rates, config) if isinstance(rates, Mapping) else progress

    def _with_change(self, rates: Mapping[str, Any], config: TrainConfig) -> Progress:
        coming = learning_rate(config, self.step, self.rewarm)
        if self.step >= config.steps or coming == rates["next"]:
            return self
        last, steps = float(rates["last"]), rates.get("steps")
        longer = f" (train.steps was {steps} and is {config.steps})"
        changed = longer if steps != config.steps else ""
        if config.rewarm_steps:
            _log.warning(
                "the schedule of the learning rate has changed%s: it was %.3g, and follows the new "
                "one after train.rewarm_steps = %d",
                changed,
                last,
                config.rewarm_steps,
            )
            return Progress(self.step, self.skipped, Rewarm(self.step, last))
        if coming != last:
            _log.warning(
                "the learning rate jumps from %s to %s, since its schedule has changed%s; with "
                "train.rewarm_steps it gets there in so many steps, and with "
                "train.schedule=constant a longer run changes nothing",
                *_told_apart(last, coming),
                changed,
            )
        return Progress(self.step, self.skipped)


def _rewarm(value: object) -> Rewarm | bool | None:
    """As it was saved; False for what no `Rewarm` was saved as."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], int):
        return False
    return Rewarm(value[0], float(value[1])) if _is_rate(value[1]) else False


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two different rates, with three digits or as many more as it takes to see a difference."""
    for digits in range(3, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(one), repr(other)


def _is_rate(*values: object) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
