"""Runs a model on the tokens of a step: eagerly, or by a recorded graph."""

# Shape suffixes: L rows of logits, V token ids.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.block_tables import BlockTables
from pcomm.inference.engine.decode_graphs import DecodeGraphs, recorder_for
from pcomm.inference.engine.pools import Pools
from pcomm.inference.engine.step_builder import StepBuilder
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.model import Model
from pcomm.inference.step_batch import StepBatch

__all__ = ["ModelRunner"]


class ModelRunner:
    """Builds the batch of a plan, and calls the model.

    Args:
        model: The model.
        pools: Memory of its layers.
        tables: Block tables of the running requests.
        block_size: Tokens of a block.
        vocabulary: Number of token ids, the width of the logits.
        max_requests: Largest number of requests of a step.
        device: Device of the model.
    """

    def __init__(
        self,
        model: Model,
        pools: Pools,
        tables: BlockTables,
        *,
        block_size: int,
        vocabulary: int,
        max_requests: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pools = pools
        self._tables = tables
        self._vocabulary = vocabulary
        self._builder = StepBuilder(
            tables, block_size=block_size, has_blocks=pools.has_blocks, device=device
        )
        self.graphs: DecodeGraphs | None = None
        if (recorder := recorder_for(device)) is not None:
            self.graphs = DecodeGraphs(
                self._step,
                self._builder,
                recorder,
                max_requests=max_requests,
                table_width=tables.width,
                device=device,
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the tokens of a plan.

        Returns:
            `[L, V]`: logits of the rows that the batch asks for.

        Raises:
            ConfigError: The model returned something else. What the model raises passes through.
        """
        self._tables.send()
        if self.graphs is not None and not plan.chunks:
            logits = self.graphs.run(plan.decodes)
            if logits is not None:
                return logits
        return self._step(self._builder.build(plan))

    def _step(self, batch: StepBatch) -> Tensor:
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
