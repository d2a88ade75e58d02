"""Runs a model on the tokens of a step: eagerly, or by a recorded graph."""

# Shape suffixes: L rows of logits, V token ids.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.errors import ConfigError
from pcomm.inference.engine.engine_settings import EngineSettings
from pcomm.inference.engine.memory.engine_memory import EngineMemory
from pcomm.inference.engine.runner.decode_graphs import DecodeGraphs, recorder_for
from pcomm.inference.engine.runner.step_builder import StepBuilder
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.model import Model
from pcomm.inference.roofline.host_times import HostTimes
from pcomm.inference.step_batch import StepBatch

__all__ = ["ModelRunner"]


class ModelRunner:
    """Builds the batch of a plan, and calls the model.

    Args:
        model: The model.
        memory: Pools of its layers, and block tables.
        settings: Sizes of vocabulary, blocks and steps.
        device: Device of the model.
        times: Times of the phases of a step.
        group: Ranks that share the model; None for one.

    Attributes:
        graphs: Recorded steps of decoding; None on a device without.
        logits_dtype: Dtype of the logits of the last step; fp32 before the first.
    """

    def __init__(
        self,
        model: Model,
        memory: EngineMemory,
        settings: EngineSettings,
        *,
        device: torch.device,
        times: HostTimes,
        group: Group | None = None,
    ) -> None:
        self._model = model
        self._pools = memory.pools
        self._tables = tables = memory.tables
        self._vocabulary = settings.vocabulary
        self._times = times
        self.logits_dtype = torch.float32
        self._builder = StepBuilder(
            tables,
            block_size=settings.block_size,
            has_blocks=memory.pools.has_blocks,
            device=device,
        )
        self.graphs: DecodeGraphs | None = None
        if (recorder := recorder_for(device)) is not None:
            self.graphs = DecodeGraphs(
                self._step,
                self._builder,
                recorder,
                max_requests=settings.max_requests,
                table_width=tables.width,
                device=device,
                group=group,
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the tokens of a plan.

        Returns:
            `[L, V]`: logits of the rows that the batch asks for.

        Raises:
            ConfigError: The model returned something else: no tensor, integers, or another shape.
                What the model raises passes through.
        """
        self._tables.send()
        if self.graphs is not None and not plan.chunks:
            logits = self.graphs.run(plan.decodes)
            if logits is not None:
                self._times.lap("model")
                return logits
        batch = self._builder.build(plan)
        self._times.lap("batch")
        logits = self._step(batch)
        self._times.lap("model")
        return logits

    def _step(self, batch: StepBatch) -> Tensor:
        logits = self._model.step(batch, self._pools.memories)
        expected = (batch.logits_rows.shape[0], self._vocabulary)
        if not isinstance(logits, Tensor):
            found = f"a {type(logits).__name__}"
        elif not logits.is_floating_point():
            found = f"logits of {logits.dtype}"
        elif tuple(logits.shape) != expected:
            found = f"logits of shape {list(logits.shape)}"
        else:
            self.logits_dtype = logits.dtype
            return logits
        raise ConfigError(
            f"Engine.step: {type(self._model).__name__}.step",
            found=found,
            why=f"The batch asks for {expected[0]} rows of floating-point numbers, and the "
            f"vocabulary is {expected[1]}.",
            fix="Return the logits of batch.logits_rows as a tensor, one for each id of the "
            "vocabulary.",
        )
