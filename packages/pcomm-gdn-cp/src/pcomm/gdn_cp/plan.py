"""The plan for one micro-batch: what is decided, in order, and what a layer asks of it.

A plan is made once from integers of the host, before any layer runs, and shared by all layers, by
recompute and by backward. A layer calls the same six operations whatever the strategy:

    x = plan.enter(spec, hidden)                       # `docs`: whole documents
    q, k, v, b, a = plan.to_heads(spec, projections)   # `heads`: all tokens of this rank's heads
    halo = plan.conv_halo(spec, inputs)                # `state`: inputs before its segments
    state = plan.entry_states(spec, summary)           # `state`, and `docs` where one is cut
    y = plan.from_heads(spec, output)
    out = plan.leave(spec, y)

Sequences that are continued from pack to pack pass `initial` to `conv_halo` and `entry_states`, and
take the next ones from `final_halo` and `final_states`.
"""

# t tokens of this rank between layers, T tokens that the core sees, D model dim, W columns,
# N sequences, F of them or segments of them that the core sees, P = convolution width - 1, H heads,
# K key dim, V value dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.gdn_cp.arguments import GroupLike, all_specs, link_of, pack_of, place_in
from pcomm.gdn_cp.ops.backend import filled_sequences
from pcomm.gdn_cp.ops.causal_conv1d import boundary_indices
from pcomm.gdn_cp.ops.chunks import ChunkLayout, chunk_tables, default_chunk
from pcomm.gdn_cp.ops.entry import graph_break
from pcomm.gdn_cp.pack_offsets import PackOffsets
from pcomm.gdn_cp.specs import MatrixTransition, Spec, Summary
from pcomm.gdn_cp.strategies.choice import (
    Link,
    Sizes,
    StrategyChoice,
    choose_strategy,
    describe_plan,
    make_strategy,
)
from pcomm.gdn_cp.strategies.head_share import HeadShare, Traffic
from pcomm.gdn_cp.strategies.strategy import Strategy, StrategyName
from pcomm.gdn_cp.token_layout import LayoutName, LocalTokenIndices, TokenLayout

__all__ = ["Plan", "make_plan"]


def make_plan(
    cu_seqlens: Sequence[int] | Tensor,
    group: GroupLike,
    specs: Spec | Sequence[Spec],
    *,
    layout: LayoutName = "zigzag",
    strategy: Literal["auto"] | StrategyName = "auto",
    hidden_dim: int | None = None,
    element_bytes: int = 2,
    link: Link | None = None,
    num_tokens: int | None = None,
    verify: bool = False,
) -> Plan:
    """The plan for one pack of sequences, from host integers; sends nothing.

    Local, and the same on every rank that passes the same integers. With `verify` collective: the
    ranks compare their arguments, through the store and before any communication.

    Args:
        cu_seqlens: Offsets of the sequences in the buffer of all ranks, on the host, from 0 to
            its length. Sequences may be empty. Padding belongs to a sequence.
        group: The context-parallel group: a `Group`, torch's `ProcessGroup` or a `DeviceMesh` of
            one dimension; or collectives; or `(rank, size)` for a plan that describes and cannot
            move tensors, where `(0, 1)` is a process alone.
        specs: The mixers of the model, with the counts of this tensor-parallel rank.
        layout: Layout of the tokens on the ranks between layers, `zigzag` or `contiguous`.
        strategy: The strategy of all mixers, or `auto` for the one that costs least by the model of
            `choice`. With `state`, a mixer without a state takes `heads`, or `gather` if its heads
            do not divide.
        hidden_dim: Width of hidden states; without it `auto` cannot weigh `docs`.
        element_bytes: Bytes of an element of activations, for the model and `describe`.
        link: The slowest link between the ranks, for the model.
        num_tokens: Length of the buffer of all ranks; if given, the last offset has to equal it.
        verify: True for the ranks to compare their plans.

    Raises:
        ConfigError: No such strategy or layout; no mixer, or one whose facts contradict each
            other; offsets that are not integers on the host; sizes that cannot be; `group` is no
            group, or a mesh of several dimensions.
        LayoutError: Offsets, lengths or heads that do not fit; a buffer of another length.
        UnsupportedError: `verify` with collectives or a pair of numbers.
        DivergenceError: With `verify`, on every rank: the ranks made different plans.
        PeerError: With `verify`: another rank's error.
    """
    # 1. This rank's place among those that share the pack.
    place = place_in(group)

    def build() -> Plan:
        # 2. Which rank holds which tokens between the layers.
        tokens = pack_of(cu_seqlens, place.size, layout, num_tokens)
        # 3. For each mixer, the strategy that was asked for or that costs least.
        sizes, mixers, weighed = Sizes(hidden_dim, element_bytes), all_specs(specs), link_of(link)
        choices = tuple(choose_strategy(m, tokens, strategy, sizes, weighed) for m in mixers)
        names = tuple(choice.strategy for choice in choices)
        # 4. What each strategy moves. One that cannot work is refused here, not in the first layer.
        plan = Plan(tokens, place.rank, mixers, names, choices, sizes, place.collectives)
        plan.check_strategies()
        return plan

    # 5. Whether all ranks have decided the same.
    return _agree_on_plan(place.group, group, build) if verify else build()


def _agree_on_plan(group: Group | None, asked: object, build: Callable[[], Plan]) -> Plan:
    """The plan that `build` makes, once every rank of `group` has made the same. Collective.

    Without a group, which `asked` was not, there is no store to compare plans through.
    """
    if group is None:
        raise UnsupportedError(
            "make_plan: verify=True",
            found=f"a group of type {type(asked).__name__}",
            why="The ranks compare their plans through the store that a group's ranks share.",
            fix="Pass a Group, a ProcessGroup or a DeviceMesh, or leave verify away.",
        )
    plan, error = None, None
    try:
        plan = build()
    except Exception as problem:  # raised below, once the other ranks know of it
        error = problem
    agree_in_group(group, "make_plan", [] if plan is None else plan.agreed_facts(), error=error)
    assert plan is not None
    return plan


@dataclass(frozen=True)
class Plan:
    """How the tokens of one pack move, for each mixer of a model. Made by `make_plan`.

    Immutable. Two plans are equal if they move the same tokens of the same mixers in the same way
    on the same rank; their groups are not compared. Index tensors are made on first use or by
    `prepare`, and live as long as the plan. A copy is the plan itself. A pickle has neither tensors
    nor the group, so a plan read from it can be described, and cannot move tensors.

    Attributes:
        tokens: The pack and its layout between layers.
        rank: This rank's place in the group.
        specs: The mixers.
        strategies: Name of the strategy of each mixer.
        choices: Reasons for each strategy, and the rejected ones.
        sizes: Width of hidden states and bytes of an element, as passed to `make_plan`.
        collectives: The group's collectives; None for a plan that only describes.
    """

    tokens: TokenLayout
    rank: int
    specs: tuple[Spec, ...]
    strategies: tuple[StrategyName, ...]
    choices: tuple[StrategyChoice, ...] = field(compare=False, repr=False)
    sizes: Sizes = field(compare=False, repr=False)
    collectives: Collectives | None = field(compare=False, repr=False)

    # -- the moves of a layer ------------------------------------------------------------

    @graph_break
    def enter(self, spec: Spec, hidden_tD: Tensor) -> Tensor:
        """Hidden states as the projections of this mixer take them.

        Documents with strategy `docs`, in one all-to-all; the input itself with the others.
        Collective, like all that follow: every rank calls it, in the same order. Differentiable,
        and backward is collective too: a rank without a document runs the layer on no tokens.

        Args:
            spec: A mixer of the plan.
            hidden_tD: `[t, ...]`, this rank's tokens between layers.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group.
            LayoutError: Another number of tokens, or of columns than `hidden_dim`; raised before
                anything is sent.
        """
        self._check_width("Plan.enter", hidden_tD)
        return self._strategy(spec).enter(hidden_tD, self._group)

    @graph_break
    def leave(self, spec: Spec, hidden: Tensor) -> Tensor:
        """The inverse of `enter`: `[t, ...]`, this rank's tokens between layers.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group.
            LayoutError: Another number of tokens or columns.
        """
        self._check_width("Plan.leave", hidden)
        return self._strategy(spec).leave(hidden, self._group)

    @graph_break
    def to_heads(self, spec: Spec, sections: Sequence[Tensor], *, fused: int = 1) -> list[Tensor]:
        """The projections, at the tokens and heads that the core of this rank works on.

        Args:
            spec: A mixer of the plan.
            sections: The sections of `spec.sections`, `[t, heads * width]` each, any strides, of
                one dtype. With strategy `docs`, those of the tokens that `enter` returned.
            fused: Number of first sections to return side by side as one tensor, for a
                convolution; this copies nothing where tensors travel.

        Returns:
            The sections, `[T, heads * width]` of this rank's heads, in the order of
            `cu_seqlens_of(spec)`; views of one buffer with strategies `heads` and `gather`.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group; no such
                number of sections.
            LayoutError: Other shapes or several dtypes; raised before anything is sent.
        """
        return self._strategy(spec).to_heads(sections, self._group, fused)

    @graph_break
    def from_heads(self, spec: Spec, output_TW: Tensor) -> Tensor:
        """The output of the core with all heads, at the tokens that `to_heads` was given.

        Args:
            spec: A mixer of the plan.
            output_TW: `[T, heads * width]`, the output of the core of this rank.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).from_heads(output_TW, self._group)

    @graph_break
    def conv_halo(
        self, spec: Spec, x_TW: Tensor, *, initial: Tensor | None = None
    ) -> Tensor | None:
        """The initial halo of a causal convolution over `cu_seqlens_of(spec)`.

        Args:
            spec: A mixer of the plan.
            x_TW: `[T, channels]`, the inputs of the convolution.
            initial: `[N, P, channels]`, the inputs before the pack, as `final_halo` returns them:
                those of all sequences and channels, the same on every rank. Zeros by default.
                Each rank has the gradient of the part it used; the sum over the group is the
                gradient, as for parameters.

        Returns:
            `[F, P, channels]` of this rank; None where all are zero.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group; `initial`
                for a mixer without a convolution.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).boundary_states.conv_halo(x_TW, self._group, initial)

    @graph_break
    def entry_states(
        self, spec: Spec, summary: Summary | None, *, initial: Tensor | None = None
    ) -> Tensor | None:
        """The state in which each sequence of `cu_seqlens_of(spec)` starts.

        Args:
            spec: A mixer of the plan.
            summary: M and B of the map S -> M S + B of each of them, `[F, H, ...]` each, as the
                `summary` of the cores returns them. Ignored, so need not be computed, unless
                `needs_summary` is true.
            initial: `[N, H, K, V]`, the states before the pack, as `final_states` returns them:
                those of all sequences and heads, the same on every rank. Zeros by default. Its
                gradient is that of a parameter, as in `conv_halo`.

        Returns:
            `[F, H, K, V]` of this rank; None where all are zero.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group; `initial`
                for a mixer without a state; no summary where one is needed.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).boundary_states.entry_states(summary, self._group, initial)

    @graph_break
    def final_states(
        self, spec: Spec, final_FHKV: Tensor, *, initial: Tensor | None = None
    ) -> Tensor:
        """The states after the whole pack, the same on every rank: `initial` of the next pack.

        One gather, and in backward one reduce-scatter, on top of `traffic`; none on one rank and
        with strategy `gather`. All ranks use the result in their graphs, or none does. The gradient
        is that of the sum of the ranks' losses, so a loss of the states themselves belongs on one
        rank, or on each divided by the number of ranks.

        Args:
            spec: A mixer of the plan.
            final_FHKV: `[F, H, K, V]`, the states that the core of this rank returns.
            initial: The `initial` of `entry_states`: the states after sequences without tokens.

        Returns:
            `[N, H, K, V]` of all sequences and heads.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group; a mixer
                without a state.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).boundary_states.final_states(final_FHKV, self._group, initial)

    @graph_break
    def final_halo(self, spec: Spec, halo_FPW: Tensor, *, initial: Tensor | None = None) -> Tensor:
        """The last inputs of the convolution, as `final_states` returns the states.

        Args:
            spec: A mixer of the plan.
            halo_FPW: `[F, P, channels]`, the halo that the convolution of this rank returns.
            initial: The `initial` of `conv_halo`.

        Returns:
            `[N, P, channels]` of all sequences and channels.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group; a mixer
                without a convolution.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).boundary_states.final_halo(halo_FPW, self._group, initial)

    # -- what the core of a mixer sees ---------------------------------------------------

    @graph_break
    def strategy_of(self, spec: Spec) -> StrategyName:
        """The strategy of this mixer."""
        return self.strategies[self._place(spec)]

    @graph_break
    def needs_summary(self, spec: Spec) -> bool:
        """Whether a sequence lies on several ranks, so that `entry_states` takes a summary."""
        return self._strategy(spec).boundary_states.needs_summary

    @graph_break
    def head_share(self, spec: Spec) -> HeadShare:
        """The heads of this rank, and its slices of parameters."""
        return self._strategy(spec).share

    @graph_break
    def cu_seqlens_of(self, spec: Spec) -> PackOffsets:
        """Offsets of the sequences, or segments of them, that the core of this rank sees.

        A tuple of integers. Cores keep their index tensors in it, so pass it on as it is.
        """
        return self._strategy(spec).cu_seqlens

    @graph_break
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

    @graph_break
    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """`[t]`, int64: the place in its sequence of each token that this rank holds."""
        return self._local.on(torch.device(device), self._local.core_positions)

    @graph_break
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
            # What the cores derive from their offsets.
            offsets = strategy.cu_seqlens
            if spec.convolution is not None:
                offsets.derived(boundary_indices, spec.convolution.width, device)
            if spec.state is not None:
                state, is_delta = spec.state, isinstance(spec.state.transition, MatrixTransition)
                default = default_chunk(state.key_dim, is_corrected=is_delta)
                ChunkLayout.of(offsets, default if chunk is None else chunk).indices(device)
                offsets.derived(filled_sequences, device)
            if device.type != "cpu":
                offsets.derived(chunk_tables, device)
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

    @property
    def _group(self) -> Collectives:
        if self.tokens.size == 1:
            return IdentityCollectives()
        if self.collectives is None:
            raise ConfigError(
                f"Plan of rank {self.rank} of {self.tokens.size}",
                found="made with a pair of numbers instead of a group, or read from a pickle",
                why="Such a plan can be described, and cannot move tensors.",
                fix="Pass the context-parallel group to make_plan, in the process of the layers.",
            )
        return self.collectives

    def _check_width(self, asked: str, hidden: Tensor) -> None:
        """Refuse hidden states of another width than the plan was weighed for."""
        said, found = self.sizes.hidden_dim, hidden.shape[1:].numel()
        if said is not None and found != said:
            raise LayoutError(
                f"{asked}: hidden_dim={said} in make_plan",
                found=f"shape {tuple(hidden.shape)}, so {found} columns",
                why="The strategies were chosen, and traffic is counted, for another width.",
                fix="Pass the width of hidden states to make_plan, or leave hidden_dim away.",
            )

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        kept = (self.tokens, self.rank, self.specs, self.strategies, self.choices, self.sizes)
        return Plan, (*kept, None)
