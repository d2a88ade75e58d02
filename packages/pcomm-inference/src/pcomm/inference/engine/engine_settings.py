"""The numbers that an engine is made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.memory.memory_specs import check_memory_specs
from pcomm.inference.model import KVSpec, LayerSpec, StateSpec

__all__ = ["INVARIANT_CHUNK", "EngineSettings"]

INVARIANT_CHUNK = 256
"""Tokens by which a prompt is computed where no other request may move the end of a chunk."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes of pools, steps and queues; the arguments of `Engine` of the same names."""

    vocabulary: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_state_slots: int
    max_batch_tokens: int
    max_requests: int
    max_queued: int
    speculative_tokens: int

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Refuse declarations and numbers that no engine can run with.

        Args:
            specs: Declarations of the model, one for each layer.

        Raises:
            ConfigError: A declaration cannot be allocated; a value is no integer, or is too small.
        """
        check_memory_specs(specs)
        least = dict.fromkeys(vars(self), 1) | {"max_model_len": 2, "speculative_tokens": 0}
        least["num_blocks"] = int(any(isinstance(spec, KVSpec) for spec in specs))
        least["num_state_slots"] = int(any(isinstance(spec, StateSpec) for spec in specs))
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
                raise ConfigError(
                    f"Engine: {name}",
                    found=f"{value!r}",
                    why=f"{name} is an integer of at least {least[name]}, or nothing could run.",
                    fix=f"Give {name} as such a number.",
                )

    def check_batch_invariant(self) -> None:
        """Refuse numbers by which the tokens of a request share products that depend on others.

        Raises:
            ConfigError: Drafts are asked for, or a step is too short for a chunk of a prompt beside
                the tokens of all other requests.
        """
        least = INVARIANT_CHUNK + self.max_requests - 1
        if self.speculative_tokens:
            found, why, fix = (
                f"speculative_tokens={self.speculative_tokens}",
                "Drafts are computed together with the token before them, in other sums.",
                "Leave one of the two out.",
            )
        elif self.max_batch_tokens < least:
            found, why, fix = (
                f"max_batch_tokens={self.max_batch_tokens} and max_requests={self.max_requests}",
                f"A prompt is computed by {INVARIANT_CHUNK} tokens, beside one of each other text.",
                f"Give max_batch_tokens of at least {least}, or a smaller max_requests.",
            )
        else:
            return
        raise ConfigError("Engine: batch_invariant=True", found=found, why=why, fix=fix)
