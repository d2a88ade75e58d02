"""The bytes that a step has to move between memory and processor: of weights, of what is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pcomm.core.tensor_parallel import WeightProduct
from pcomm.inference.model import KVSpec, LayerSpec, StateSpec

__all__ = [
    "ExpertWeights",
    "KeptBytes",
    "StepBytes",
    "StepWeights",
    "step_bytes",
    "step_weights_of",
    "tensor_bytes",
]


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
        per_token_in: Part of `per_token` that belongs to layers with a window, by the window.
    """

    per_token: int
    per_request: int
    per_token_in: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Sequence[LayerSpec]) -> KeptBytes:
        """Bytes of all layers of `Model.memory_specs` together."""
        per_token = per_request = 0
        per_token_in: dict[int, int] = {}
        for spec in specs:
            if isinstance(spec, KVSpec):
                widths = spec.head_dim + spec.width_of_values
                size = spec.heads * widths * spec.dtype.itemsize
                per_token += size
                if spec.window is not None:
                    per_token_in[spec.window] = per_token_in.get(spec.window, 0) + size
            elif isinstance(spec, StateSpec):
                for name, shape in spec.shapes.items():
                    per_request += torch.Size(shape).numel() * spec.dtypes[name].itemsize
        return cls(per_token, per_request, per_token_in)


def step_bytes(
    kept: KeptBytes,
    *,
    weights: int,
    num_requests: int,
    kept_tokens: int,
    new_tokens: int,
    num_logits: int,
    logits_dtype: torch.dtype,
    kept_in_windows: Sequence[int] = (),
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
        kept_in_windows: `kept_tokens` within each window of `kept.per_token_in`.
    """
    in_windows = kept.per_token_in.values()
    keys_values = kept_tokens * (kept.per_token - sum(in_windows)) + new_tokens * kept.per_token
    for size, seen in zip(in_windows, kept_in_windows, strict=True):
        keys_values += size * seen
    return StepBytes(
        weights=weights,
        keys_values=keys_values,
        states=2 * num_requests * kept.per_request,
        logits=num_logits * logits_dtype.itemsize,
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; memory that several of them share, such as tied weights, counts once."""
    # Held until they are counted, so that no other storage takes the place of one.
    storages = {storage._cdata: storage for storage in (one.untyped_storage() for one in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one layer, of which a token meets some.

    Args:
        num_experts: Number of experts that this rank holds.
        per_token: Number of experts that a token meets.
        bytes_each: Size of one, in bytes.
        on_ranks: True where several ranks share the experts or the tokens, so that a token may meet
            fewer on this one.
    """

    num_experts: int
    per_token: int
    bytes_each: int
    on_ranks: bool = False

    def most_met(self, num_tokens: int) -> int:
        """Number of experts that so many tokens meet at most: as if no two met the same."""
        return min(self.num_experts, self.per_token * num_tokens)


@dataclass(frozen=True)
class StepWeights:
    """Weights of one rank by how often a step reads them.

    Args:
        every_step: Bytes that every step reads once, whatever number of tokens it has.
        per_token: Bytes that each token reads: its rows of embedding tables.
        experts: Layers with experts, of which a step reads those that its tokens meet.
    """

    every_step: int
    per_token: int = 0
    experts: tuple[ExpertWeights, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        tables: Collection[nn.Module] = (),
        experts: Iterable[tuple[nn.Module, ExpertWeights]] = (),
    ) -> StepWeights:
        """Bytes of all parameters and buffers of a module; shared memory counts once. Local.

        Args:
            module: The whole model of this rank.
            tables: Modules of which a token reads one row of each parameter, such as an embedding;
                those of `nn.Embedding` are known. A table that another module uses, too, such as a
                tied output layer, is read by every step.
            experts: Modules whose parameters belong to experts alone, with what a step reads of
                them.
        """
        layers = list(experts)
        own = {id(part) for layer, _ in layers for part in layer.modules()}
        rows, whole = list[Tensor](), list[Tensor]()
        products = {id(one): one.nbytes for one in map(_product_of, module.modules()) if one}
        for part in module.modules():
            if id(part) in own:
                continue
            is_table = isinstance(part, nn.Embedding) or any(part is table for table in tables)
            held = [
                one
                for name, one in part.named_parameters(recurse=False)
                if name != "weight" or _product_of(part) is None
            ]
            (rows if is_table else whole).extend(held)
            whole += part.buffers(recurse=False)
        read = tensor_bytes(whole)
        alone = [one for one in rows if tensor_bytes([*whole, one]) > read]
        return cls(
            every_step=read + sum(products.values()),
            per_token=sum(one.shape[1:].numel() * one.element_size() for one in alone),
            experts=tuple(one for _, one in layers),
        )

    @property
    def largest(self) -> int:
        """Bytes that a step of very many tokens reads, without rows of embedding tables."""
        return self.every_step + sum(one.num_experts * one.bytes_each for one in self.experts)

    def most_read(self, num_tokens: int) -> int:
        """Bytes that a step reads; where tokens may meet the same expert, at most."""
        met = sum(one.most_met(num_tokens) * one.bytes_each for one in self.experts)
        return self.every_step + num_tokens * self.per_token + met

    def is_exact(self, num_tokens: int) -> bool:
        """Whether `most_read` is what is read, since no two tokens can meet the same expert."""
        if any(one.on_ranks for one in self.experts):
            return False
        return num_tokens == 1 or not self.experts


def _product_of(layer: nn.Module) -> WeightProduct | None:
    """What computes in the place of a layer's weight, if anything does."""
    product: WeightProduct | None = layer.__dict__.get("weight_product")
    return product


def step_weights_of(model: object) -> StepWeights:
    """What a model declares; of an `nn.Module` all it has; of another object nothing. Local.

    A model with experts, or with tables of its own, declares by a method `step_weights` what its
    steps read.
    """
    declared: Callable[[], StepWeights] | None = getattr(model, "step_weights", None)
    if declared is not None:
        return declared()
    return StepWeights.of(model) if isinstance(model, nn.Module) else StepWeights(0)
