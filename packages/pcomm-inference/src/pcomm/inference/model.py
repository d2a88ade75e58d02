"""What the engine asks of a model: what each layer keeps of a request, and one forward pass.

A model knows nothing of requests, queues or sampling. It declares what its layers keep, the engine
allocates pools of that, and each step hands the model the tokens of many requests at once, with the
places in the pools that belong to them.
"""

# Shape suffixes: T tokens of the step, N requests, B blocks of the longest request, L rows of
# logits that are wanted, V token ids, P blocks or slots of the pool, S tokens of a block, G heads,
# K head dim.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError

__all__ = [
    "KVMemory",
    "KVSpec",
    "LayerMemory",
    "LayerSpec",
    "Model",
    "StateMemory",
    "StateSpec",
    "StepBatch",
]


@dataclass(frozen=True)
class KVSpec:
    """A layer that keeps keys and values of every token: attention.

    Args:
        heads: Number of key and value heads that this rank holds.
        head_dim: Width of a key.
        dtype: Dtype in which they are kept.
        value_dim: Width of a value; None for that of a key.
        window: Most keys that a token of the layer sees, its own among them; None for all. Where
            every layer with keys has one, the blocks that no token sees any more are given back.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None
    window: int | None = None

    @property
    def width_of_values(self) -> int:
        """Width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class StateSpec:
    """A layer that keeps a state of fixed size for each request: convolutions and recurrences.

    A request begins with zeros.

    Args:
        shapes: Shape of each tensor of one request on this rank, by name.
        dtypes: Dtype of each, by the same names.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]


LayerSpec = KVSpec | StateSpec | None
"""What one layer keeps; None for a layer that keeps nothing."""


class Model(Protocol):
    """A model that the engine can run; any object with these two methods.

    Under tensor parallelism every rank has its own part of it, and the methods say what that part
    keeps. `step` is collective then, and returns the same logits on every rank.
    """

    def memory_specs(self) -> Sequence[LayerSpec]:
        """What each layer keeps, in the order in which `step` gets their memories. Local."""
        ...

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits of the tokens `batch.logits_rows`, and all memories extended by the batch.

        Args:
            batch: Tokens of many requests, one after the other.
            memory: Pools of each layer, in the order of `memory_specs`; None for a layer that
                keeps nothing. `paged_attention` and `StateMemory` read and write the places that
                belong to the requests of the batch.

        Returns:
            `[L, V]`, floating point: a row for each entry of `batch.logits_rows`.
        """
        ...


@dataclass(frozen=True)
class StepBatch:
    """A ragged batch: the new tokens of N requests one after the other, without padding.

    Requests that decode (one new token each, something computed before) come first, then those
    with chunks of a prompt, or drafts. Tensors are on the device of the model. Where a step is
    replayed from a CUDA graph, tensors are static buffers that are padded with requests that write
    to a block and a slot which belong to no request; each request is a decode then, and the
    host's numbers are those of the capture, which only say the shape.

    Attributes:
        tokens_T: int64, the new tokens.
        positions_T: int64, the position of each in its request, from 0.
        cu_seqlens: `N + 1` offsets of the requests in the T tokens, on the host.
        cu_seqlens_N1: int32, the same on the device.
        context_lens: Number of tokens of each request whose keys, values and states are in memory
            before this step, on the host.
        context_lens_N: int32, the same on the device.
        block_tables_NB: int32, the blocks of each request in the order of its tokens; the entries
            behind the last one, and of blocks that were given back, are 0. They already cover the
            new tokens. `[N, 0]` for a model without keys and values.
        slot_mapping_T: int64, where keys and values of each new token go: the number of the block
            times the block size, plus the offset in the block.
        first_blocks: The first block of each request whose blocks are neighbours in ascending
            order; None for one whose blocks are scattered, or given back. On the host, for a model
            that reads keys and values as one slice of memory, which `paged_attention` does not.
        state_slots_N: int64, the state slot of each request.
        logits_rows: int64 `[L]`, the tokens of the T whose logits are wanted.
        prepared: Values that the first layer of a kind computed from the fields above for those
            after it, by a key of that kind. Empty in a new batch, and in one that a graph is
            captured of.
    """

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens: tuple[int, ...]
    cu_seqlens_N1: Tensor
    context_lens: tuple[int, ...]
    context_lens_N: Tensor
    block_tables_NB: Tensor
    slot_mapping_T: Tensor
    first_blocks: tuple[int | None, ...]
    state_slots_N: Tensor
    logits_rows: Tensor
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_requests(self) -> int:
        """Number of requests, N."""
        return len(self.context_lens)

    @cached_property
    def num_decodes(self) -> int:
        """Number of requests at the begin with exactly one new token and something before it."""
        decodes = (
            stop - start == 1 and context > 0
            for (start, stop), context in zip(
                pairwise(self.cu_seqlens), self.context_lens, strict=True
            )
        )
        return sum(takewhile(bool, decodes))


@dataclass(frozen=True)
class KVMemory:
    """Keys and values of one attention layer; block 0 belongs to no request.

    Attributes:
        keys: `[P, S, G, K]`.
        values: `[P, S, G, V]`, V the width of a value.
        window: Window of the layer's `KVSpec`; keys before it may be gone.
    """

    keys: Tensor
    values: Tensor
    window: int | None = field(default=None, kw_only=True)

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """The same memory by the places of tokens: keys `[P * S, G, K]`, values `[P * S, G, V]`."""
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


LayerMemory = KVMemory | StateMemory
"""What `Model.step` gets for a layer that keeps something."""


class _NoStateError(ConfigError, AttributeError):
    """A layer without states was asked for one; `hasattr` still says False."""


def _unknown(method: str, name: str, pools: dict[str, Tensor]) -> ConfigError:
    return ConfigError(
        f"StateMemory.{method}: {name!r}",
        found=f"a layer whose StateSpec has {', '.join(map(repr, pools)) or 'no tensor'}",
        why="The tensors of a state have the names of its StateSpec.",
        fix=f"Use one of these names, or add {name!r} to `shapes` and `dtypes` of the StateSpec.",
    )
