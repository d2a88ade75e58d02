"""The options of an `LLM` that concern its engine, and the engine that they give."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core import Group
from pcomm.inference import Engine
from pcomm.integration.llm.loading import LoadedModel
from pcomm.integration.llm.memory_size import memory_size

__all__ = ["EngineOptions"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits of an engine; the arguments of `LLM` of the same names."""

    max_model_len: int
    block_size: int
    max_batch_tokens: int
    max_requests: int
    max_queued: int
    prefix_cache: bool
    speculative_tokens: int
    batch_invariant: bool

    def engine(self, loaded: LoadedModel, budget_bytes: int, group: Group | None = None) -> Engine:
        """An engine for a model, or for this rank's part of one. Local.

        Args:
            loaded: The model and its tokenizer.
            budget_bytes: Bytes for keys, values and states on this rank; the same on all ranks of
                a group, whose engines plan the same steps.
            group: Group that shares the model; None for a whole one.

        Raises:
            ConfigError: The budget has no room for one request, or an option cannot be used.
        """
        size = memory_size(
            loaded.model.memory_specs(),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_requests=self.max_requests,
            budget_bytes=budget_bytes,
        )
        return Engine(
            loaded.model,
            vocabulary=loaded.vocabulary,
            tokenizer=loaded.tokenizer,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=size.num_blocks,
            num_state_slots=size.num_state_slots,
            max_batch_tokens=self.max_batch_tokens,
            max_requests=self.max_requests,
            max_queued=self.max_queued,
            prefix_cache=self.prefix_cache,
            speculative_tokens=self.speculative_tokens,
            batch_invariant=self.batch_invariant,
            device=loaded.model.device,
            group=group,
        )
