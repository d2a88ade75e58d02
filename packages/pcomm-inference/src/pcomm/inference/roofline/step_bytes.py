"""The bytes that a step has to move between memory and processor, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.inference.model import KVSpec, LayerSpec, StateSpec

__all__ = ["KeptBytes", "StepBytes", "step_bytes", "tensor_bytes"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step on one rank, by what they belong to.

    Attributes:
        weights: Bytes of weights, each read once for all requests; rows of embedding tables.
        keys_values: Bytes of keys and values: those of earlier tokens read, new ones written.
        states: Bytes of states, read and written.
        logits: Bytes of logits, written.
    """

    weights: int
    keys_values: int
    states: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.weights + self.keys_values + self.states + self.logits


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that the layers of one rank keep of a request.

    Attributes:
        per_token: Bytes of the keys and values of one token.
        per_request: Bytes of the states of one request.
    """

    per_token: int
    per_request: int

    @classmethod
    def of(cls, specs: Sequence[LayerSpec]) -> KeptBytes:
        """Of all layers together.

        Args:
            specs: The specification of each layer, from `Model.memory_specs`.
        """
        return cls(
            per_token=sum(_per_token(spec) for spec in specs if isinstance(spec, KVSpec)),
            per_request=sum(_per_request(spec) for spec in specs if isinstance(spec, StateSpec)),
        )


def step_bytes(
    kept: KeptBytes,
    *,
    weights: int,
    num_requests: int,
    kept_tokens: int,
    new_tokens: int,
    num_logits: int,
    logits_dtype: torch.dtype,
) -> StepBytes:
    """The least that a step moves; activations stay in caches and are not counted.

    Args:
        kept: Bytes that the layers keep of tokens and requests.
        weights: Bytes of the weights that the step reads, see `StepWeights.most_read`.
        num_requests: Number of requests of the step.
        kept_tokens: Number of tokens of all of them that are in memory before the step. One that
            two requests share counts for both, since attention reads it for each.
        new_tokens: Number of tokens of all of them in the step.
        num_logits: Number of logits that are written: rows times vocabulary.
        logits_dtype: Dtype of the logits.
    """
    return StepBytes(
        weights=weights,
        keys_values=(kept_tokens + new_tokens) * kept.per_token,
        states=2 * num_requests * kept.per_request,
        logits=num_logits * logits_dtype.itemsize,
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; memory that several of them share, such as tied weights, counts once."""
    # Held until they are counted, so that no other storage takes the place of one.
    storages = {storage._cdata: storage for storage in (one.untyped_storage() for one in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _per_token(spec: KVSpec) -> int:
    return 2 * spec.heads * spec.head_dim * spec.dtype.itemsize


def _per_request(spec: StateSpec) -> int:
    return sum(
        torch.Size(shape).numel() * spec.dtypes[name].itemsize
        for name, shape in spec.shapes.items()
    )
