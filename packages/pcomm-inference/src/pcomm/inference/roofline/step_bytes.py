"""The bytes that a step has to move between memory and processor, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.inference.model import KVSpec, LayerSpec, StateSpec

__all__ = ["StepBytes", "step_bytes", "tensor_bytes"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step on one rank, by what they belong to.

    Attributes:
        weights: Bytes of weights, each read once for all requests.
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


def step_bytes(
    specs: Sequence[LayerSpec],
    *,
    weights: int,
    context_lens: Sequence[int],
    new_tokens: Sequence[int] | None = None,
    num_logits: int,
    logits_dtype: torch.dtype,
) -> StepBytes:
    """The least that a step moves; activations stay in caches and are not counted.

    Args:
        specs: The specification of each layer, from `Model.memory_specs`.
        weights: Bytes of the weights that the step reads, see `tensor_bytes`. An embedding that is
            not the output layer's, too, is left out: a step reads few of its rows. So are experts
            to which no token goes.
        context_lens: Number of tokens of each request that are in memory before the step.
        new_tokens: Number of tokens of each request in the step; None for one each.
        num_logits: Number of logits that are written: rows times vocabulary.
        logits_dtype: Dtype of the logits.
    """
    per_token = sum(_per_token(spec) for spec in specs if isinstance(spec, KVSpec))
    per_request = sum(_per_request(spec) for spec in specs if isinstance(spec, StateSpec))
    num_requests = len(context_lens)
    written = num_requests if new_tokens is None else sum(new_tokens)
    return StepBytes(
        weights=weights,
        keys_values=(sum(context_lens) + written) * per_token,
        states=2 * num_requests * per_request,
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
