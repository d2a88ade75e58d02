"""What a plan knows without its group: integers and index tensors. Local."""

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
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.ops.prepared import prepare_convolution, prepare_recurrence
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.choice import Choice, make_strategy
from pcomm.gdn_cp.strategies.cost import Sizes
from pcomm.gdn_cp.strategies.head_share import HeadShare
from pcomm.gdn_cp.strategies.strategy import Strategy, StrategyName
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["PlannedPack"]


@dataclass(frozen=True)
class PlannedPack:
    """The part of a `Plan` that needs no group.

    Attributes:
        tokens: The pack and its layout between layers.
        rank: This rank's place in the group.
        specs: The mixers.
        strategies: Name of the strategy of each mixer.
        choices: Reasons for each strategy, and the rejected ones.
        sizes: Width of hidden states and bytes of an element, as passed to `make_plan`.
    """

    tokens: TokenLayout
    rank: int
    specs: tuple[Spec, ...]
    strategies: tuple[StrategyName, ...]
    choices: tuple[Choice, ...] = field(compare=False, repr=False)
    sizes: Sizes = field(compare=False, repr=False)

    # -- what the core of a mixer sees ---------------------------------------------------

    @outside_graphs
    def strategy_of(self, spec: Spec) -> StrategyName:
        """The strategy of this mixer."""
        return self.strategies[self._place(spec)]

    @outside_graphs
    def needs_summary(self, spec: Spec) -> bool:
        """Whether a sequence lies on several ranks, so that `entry_states` takes a summary."""
        return self._strategy(spec).boundary_states.needs_summary

    @outside_graphs
    def head_share(self, spec: Spec) -> HeadShare:
        """The heads of this rank, and its slices of parameters."""
        return self._strategy(spec).share

    @outside_graphs
    def cu_seqlens_of(self, spec: Spec) -> PackOffsets:
        """Offsets of the sequences, or segments of them, that the core of this rank sees.

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

    def num_cut_documents(self, spec: Spec) -> int:
        """Number of documents that strategy `docs` cuts for this mixer."""
        return self._strategy(spec).num_cut_documents

    def describe(self) -> str:
        """The strategy of each mixer, why, what it costs, and what was rejected."""
        mixers = zip(self.choices, self._strategies, strict=True)
        return describe_plan(self.tokens, self.rank, self.sizes, mixers)

    def prepare(
        self, device: torch.device | str, *, is_continued: bool = False, chunk: int | None = None
    ) -> Self:
        """Make all index tensors on `device` now, so that no layer copies them there; itself.

        Those of this package's cores are among them. Without `prepare` each is made when a layer
        first needs it.

        Args:
            device: Device of the layers.
            is_continued: True if initial states are passed or final ones asked for.
            chunk: Tokens of a chunk, if the cores are given another number than the default.

        Raises:
            ConfigError: A chunk without tokens.
        """
        device = torch.device(device)
        for spec, strategy in zip(self.specs, self._strategies, strict=True):
            strategy.prepare(device)
            strategy.boundary_states.prepare(device, is_continued)
            strategy.on(device, strategy.core_positions)
            offsets = strategy.cu_seqlens
            if spec.convolution is not None:
                prepare_convolution(offsets, spec.convolution.width, device)
            if spec.state is not None:
                prepare_recurrence(offsets, spec.state.key_dim, device, chunk)
        for make in (self._local.core_tokens, self._local.core_positions):
            self._local.on(device, make)
        return self

    def check_strategies(self) -> None:
        """Refuse a strategy that does not work for its mixer and this pack.

        Raises:
            PcommError: The error of the strategy.
        """
        _ = self._strategies

    def agreed_facts(self) -> list[str]:
        """Facts that all ranks must have in common, one a line: what `verify` compares."""
        facts = [f"layout {self.tokens.layout_name}"]
        facts += [f"{spec} {name}" for spec, name in zip(self.specs, self.strategies, strict=True)]
        return facts + [f"cu_seqlens[{n}] = {o}" for n, o in enumerate(self.tokens.cu_seqlens)]

    # -- inside --------------------------------------------------------------------------

    @cached_property
    def _strategies(self) -> tuple[Strategy, ...]:
        pairs = zip(self.strategies, self.specs, strict=True)
        return tuple(make_strategy(name, spec, self.tokens, self.rank) for name, spec in pairs)

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
