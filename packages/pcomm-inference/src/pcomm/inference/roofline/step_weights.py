"""The weights that a step of decoding reads, in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from pcomm.core.tensor_parallel import WeightProduct
from pcomm.inference.roofline.step_bytes import tensor_bytes

__all__ = ["DeclaresStepWeights", "ExpertWeights", "StepWeights", "step_weights_of"]


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
        """Of all parameters and buffers of a module; shared memory counts once. Local.

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


@runtime_checkable
class DeclaresStepWeights(Protocol):
    """A model that says what its steps read, as one with experts or tables of its own should."""

    def step_weights(self) -> StepWeights:
        """Weights of this rank that steps read. Local."""
        ...


def _product_of(layer: nn.Module) -> WeightProduct | None:
    """What computes in the place of a layer's weight, if anything does."""
    product: WeightProduct | None = layer.__dict__.get("weight_product")
    return product


def step_weights_of(model: object) -> StepWeights:
    """What a model declares; of an `nn.Module` all it has; of another object nothing. Local."""
    if isinstance(model, DeclaresStepWeights):
        return model.step_weights()
    return StepWeights.of(model) if isinstance(model, nn.Module) else StepWeights(0)
