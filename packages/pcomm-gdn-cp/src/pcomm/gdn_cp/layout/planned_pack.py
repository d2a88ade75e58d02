"""What a plan knows about its pack without its group: integers and index tensors. Local."""

# t tokens of this rank between layers, T tokens that the core sees

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.description import describe_plan
from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.layout.token_indices import LocalTokenIndices
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.ops.offsets import PackOffsets
from pcomm.gdn_cp.ops.prepared import prepare_cores
from pcomm.gdn_cp.specs import AttentionSpec, Spec
from pcomm.gdn_cp.strategies.cost import STRATEGIES, Choice, Sizes
from pcomm.gdn_cp.strategies.head_share import HeadShare
from pcomm.gdn_cp.strategies.strategy import Strategy, StrategyName, Traffic

__all__ = ["PlannedPack"]


@dataclass(frozen=True)
class PlannedPack:
    """The part of a `Plan` that needs no group.

    Attributes:
        tokens: The pack and its layout between layers.
        rank: This rank's place in the group.
        specs: The mixers.
        strategies: The strategy of each.
        choices: Why.
        sizes: What `make_plan` was told about activations.
    """

    tokens: TokenLayout
    rank: int
    specs: tuple[Spec, ...]
    strategies: tuple[StrategyName, ...]
    choices: tuple[Choice, ...] = field(compare=False, repr=False)
    sizes: Sizes = field(compare=False, repr=False)

    # -- what the core sees --------------------------------------------------------------

    @outside_graphs
    def strategy_of(self, spec: Spec) -> StrategyName:
        """The strategy of this mixer."""
        return self.strategies[self._place(spec)]

    @outside_graphs
    def needs_summary(self, spec: Spec) -> bool:
        """Whether pieces of sequences cross ranks, so that `entry_states` wants a summary."""
        return self._strategy(spec).carry.needs_summary

    @outside_graphs
    def head_share(self, spec: Spec) -> HeadShare:
        """The heads of this rank, and its slices of parameters."""
        return self._strategy(spec).share

    @outside_graphs
    def cu_seqlens_of(self, spec: Spec) -> PackOffsets:
        """Offsets of the sequences, or pieces of them, that the core of this rank sees.

        A tuple of integers. Cores keep their index tensors in it, so pass it on as it is.
        """
        return self._strategy(spec).cu_seqlens

    @outside_graphs
    def positions_of(self, spec: Spec, device: torch.device | str = "cpu") -> Tensor:
        """`[T]`, int64: the place in its sequence of each token that the core of this rank sees.

        For rotary embeddings after `to_heads`, whatever the strategy.
        """
        strategy = self._strategy(spec)
        return strategy.on(torch.device(device), strategy.core_positions)

    # -- what lies between layers --------------------------------------------------------

    @property
    def local_cu_seqlens(self) -> tuple[int, ...]:
        """Offsets, between layers, of this rank's tokens of each sequence."""
        return self.tokens.local_cu_seqlens(self.rank)

    @outside_graphs
    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """`[t]`, int64: the place in its sequence of each token that this rank holds."""
        return self._local.on(torch.device(device), self._local.core_positions)

    @outside_graphs
    def shard(self, whole: Tensor, *, dim: int = 0) -> Tensor:
        """This rank's tokens of a tensor that has those of all ranks along `dim`.

        Raises:
            LayoutError: `whole` has another number of tokens.
        """
        if whole.shape[dim] != self.tokens.num_tokens:
            raise LayoutError(
                f"Plan.shard: shape {tuple(whole.shape)}",
                found=f"{whole.shape[dim]} tokens along dim {dim}",
                why=f"The plan is for {self.tokens.num_tokens} tokens of all ranks.",
                fix="End cu_seqlens at the length of the buffer, padding included.",
            )
        if self.tokens.size == 1:
            return whole
        return whole.index_select(dim, self._local.on(whole.device, self._local.core_tokens))

    def traffic(self, spec: Spec) -> Traffic:
        """Collectives and bytes of this rank for this mixer in one layer.

        For `docs` hidden states count with `hidden_dim`, and not at all if that is unknown.
        """
        sizes = self.sizes
        return self._strategy(spec).traffic(self.rank, sizes.element_bytes, sizes.hidden_dim)

    def imbalance(self, spec: Spec) -> float:
        """By how much the busiest rank has more tokens than the average: 0.1 is 10 % more."""
        return self._strategy(spec).imbalance

    def num_straddlers(self, spec: Spec) -> int:
        """Number of documents that strategy `docs` cuts for this mixer."""
        return self._strategy(spec).num_straddlers

    def describe(self) -> str:
        """The strategy of each mixer, why, what it costs, and what was rejected."""
        return describe_plan(self)

    def prepare(
        self, device: torch.device | str, *, is_continued: bool = False, chunk: int | None = None
    ) -> Self:
        """Make all index tensors on `device` now, so that no layer copies them there; itself.

        Those of this package's cores are among them. Without `prepare` each is made when a layer
        first needs it.

        Args:
            device: Where the layers compute.
            is_continued: Whether initial states are passed or final ones asked for.
            chunk: Tokens of a chunk, if the cores are given another number than the default.

        Raises:
            ConfigError: A chunk without tokens.
        """
        device = torch.device(device)
        for spec, strategy in zip(self.specs, self._strategies, strict=True):
            strategy.prepare(device)
            strategy.carry.prepare(device, is_continued)
            strategy.on(device, strategy.core_positions)
            offsets = strategy.cu_seqlens
            if not isinstance(spec, AttentionSpec):
                prepare_cores(offsets, spec, device, chunk)
        for make in (self._local.core_tokens, self._local.core_positions):
            self._local.on(device, make)
        return self

    # -- inside --------------------------------------------------------------------------

    @cached_property
    def _strategies(self) -> tuple[Strategy, ...]:
        if self.tokens.size == 1:
            return tuple(Strategy(spec, self.tokens, 0) for spec in self.specs)
        pairs = zip(self.specs, self.strategies, strict=True)
        return tuple(STRATEGIES[strategy](spec, self.tokens, self.rank) for spec, strategy in pairs)

    @cached_property
    def _local(self) -> LocalTokenIndices:
        return LocalTokenIndices(self.tokens, self.rank)

    def _strategy(self, spec: Spec) -> Strategy:
        return self._strategies[self._place(spec)]

    def _place(self, spec: Spec) -> int:
        if spec not in self.specs:
            raise ConfigError(
                f"Plan: {spec}",
                found=f"a plan for {', '.join(map(str, self.specs))}",
                why="A plan knows the mixers that it was made for.",
                fix="Name the specifications of all mixers of the model in make_plan.",
            )
        return self.specs.index(spec)
