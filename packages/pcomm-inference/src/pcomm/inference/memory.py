"""The pools of one layer: keys and values in blocks, or states in slots."""

# Shape suffixes: P blocks or slots of the pool, S tokens of a block, G heads, K head dim,
# N requests.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from pcomm.inference.step_batch import StepBatch

__all__ = ["KVMemory", "LayerMemory", "StateMemory"]


@dataclass(frozen=True)
class KVMemory:
    """Keys and values of one attention layer; block 0 belongs to no request.

    Attributes:
        keys: `[P, S, G, K]`.
        values: `[P, S, G, K]`.
    """

    keys: Tensor
    values: Tensor

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[P * S, G, K]`: the same memory, by the places of tokens."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)


@dataclass(frozen=True)
class StateMemory:
    """States of one recurrent layer; slot 0 belongs to no request.

    Attributes:
        pools: `[P, ...]` for each tensor of a state, by the names of its `StateSpec`.
    """

    pools: dict[str, Tensor]

    def read(self, name: str, batch: StepBatch) -> Tensor:
        """A copy `[N, ...]` of the states of the requests in `batch`; zeros at their begin."""
        return self.pools[name].index_select(0, batch.state_slots_N)

    def write(self, name: str, batch: StepBatch, states: Tensor) -> None:
        """Put the states `[N, ...]` after this step in their place, cast to the dtype of the pool.

        Args:
            name: Name of the tensor in the `StateSpec`.
            batch: Batch whose requests the states belong to.
            states: States after the last token of each request.
        """
        pool = self.pools[name]
        pool.index_copy_(0, batch.state_slots_N, states.to(pool.dtype))


LayerMemory = KVMemory | StateMemory
"""What `Model.step` gets for a layer that keeps something."""
