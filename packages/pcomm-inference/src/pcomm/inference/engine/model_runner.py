"""Runs a model on the tokens of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.pools import Pools
from pcomm.inference.engine.step_builder import StepBuilder
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.model import Model

__all__ = ["ModelRunner"]


class ModelRunner:
    """Builds the batch of a plan, and calls the model.

    Args:
        model: The model.
        pools: Memory of its layers.
        builder: Makes batches.
        vocabulary: Number of token ids, the width of the logits.
    """

    def __init__(
        self, model: Model, pools: Pools, builder: StepBuilder, *, vocabulary: int
    ) -> None:
        self._model = model
        self._pools = pools
        self._builder = builder
        self._vocabulary = vocabulary

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the tokens of a plan.

        Returns:
            `[L, V]`: logits of the rows that the batch asks for.

        Raises:
            ConfigError: The model returned something else. What the model raises passes through.
        """
        batch = self._builder.build(plan)
        logits = self._model.step(batch, self._pools.memories)
        expected = (batch.logits_rows.shape[0], self._vocabulary)
        if tuple(logits.shape) != expected:
            raise ConfigError(
                f"Engine.step: {type(self._model).__name__}.step",
                found=f"logits of shape {list(logits.shape)}",
                why=f"The batch asks for {expected[0]} rows, and the vocabulary is {expected[1]}.",
                fix="Return the logits of batch.logits_rows, one for each id of the vocabulary.",
            )
        return logits
