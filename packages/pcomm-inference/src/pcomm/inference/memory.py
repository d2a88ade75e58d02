"""The pools of one layer: keys and values in blocks, or states in slots."""

# Shape suffixes: P blocks or slots of the pool, S tokens of a block, G heads, K head dim,
# N requests.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from pcomm.core.errors import ConfigError
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

    # Called for names that do not exist alone; a type checker reports those by itself.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in ("read", "write", "pools"):
                raise _NoStateError(
                    f"{name} of the memory of a layer",
                    found="the keys and values of an attention layer",
                    why="A layer that declares a KVSpec has blocks, which paged_attention reads "
                    "and writes.",
                    fix="Declare a StateSpec for this layer, or take the memory of the layer that "
                    "declares one: they come in the order of memory_specs().",
                )
            raise AttributeError(f"'KVMemory' object has no attribute {name!r}")


@dataclass(frozen=True)
class StateMemory:
    """States of one recurrent layer; slot 0 belongs to no request.

    Attributes:
        pools: `[P, ...]` for each tensor of a state, by the names of its `StateSpec`.
    """

    pools: dict[str, Tensor]

    def read(self, name: str, batch: StepBatch) -> Tensor:
        """A copy `[N, ...]` of the states of the requests in `batch`; zeros at their begin.

        Raises:
            ConfigError: The `StateSpec` has no tensor `name`.
        """
        pool = self.pools.get(name)
        if pool is None:
            raise _unknown("read", name, self.pools)
        return pool.index_select(0, batch.state_slots_N)

    def write(self, name: str, batch: StepBatch, states: Tensor) -> None:
        """Put the states `[N, ...]` after this step in their place, cast to the dtype of the pool.

        Args:
            name: Name of the tensor in the `StateSpec`.
            batch: Batch whose requests the states belong to.
            states: States after the last token of each request.

        Raises:
            ConfigError: The `StateSpec` has no tensor `name`, or one of another shape.
        """
        pool = self.pools.get(name)
        if pool is None:
            raise _unknown("write", name, self.pools)
        try:
            pool.index_copy_(0, batch.state_slots_N, states.to(pool.dtype))
        except (IndexError, RuntimeError) as error:
            # Compared here alone, so that a right shape costs nothing.
            expected = (batch.num_requests, *pool.shape[1:])
            if tuple(states.shape) == expected:
                raise
            raise ConfigError(
                f"StateMemory.write: {name!r} of shape {tuple(states.shape)}",
                found=f"{batch.num_requests} requests, each with a state of shape "
                f"{tuple(pool.shape[1:])}",
                why="Each request of the batch has one state, of the shape in the StateSpec.",
                fix=f"Write a tensor of shape {expected}, or declare another shape.",
            ) from error


class _NoStateError(ConfigError, AttributeError):
    """A layer without states was asked for one; `hasattr` still says False."""


def _unknown(method: str, name: str, pools: dict[str, Tensor]) -> ConfigError:
    return ConfigError(
        f"StateMemory.{method}: {name!r}",
        found=f"a layer whose StateSpec has {', '.join(map(repr, pools)) or 'no tensor'}",
        why="The tensors of a state have the names of its StateSpec.",
        fix=f"Use one of these names, or add {name!r} to `shapes` and `dtypes` of the StateSpec.",
    )


LayerMemory = KVMemory | StateMemory
"""What `Model.step` gets for a layer that keeps something."""
