"""What the engine asks of a model: what each layer keeps of a request, and one forward pass.

A model knows nothing of requests, queues or sampling. It declares what its layers keep, the engine
allocates pools of that, and each step hands the model the tokens of many requests at once, with the
places in the pools that belong to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pcomm.inference.memory import LayerMemory
from pcomm.inference.step_batch import StepBatch

__all__ = ["KVSpec", "LayerSpec", "Model", "StateSpec"]


@dataclass(frozen=True)
class KVSpec:
    """A layer that keeps keys and values of every token: attention.

    Args:
        heads: Number of key and value heads that this rank holds.
        head_dim: Width of a key, and of a value.
        dtype: Dtype in which they are kept.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype


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
