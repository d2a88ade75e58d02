"""One plan for a micro-batch: how the tensors of every mixer travel between the ranks.

Made once from host integers, before any layer runs, and shared by all layers, by recompute and by
backward. A layer calls the same six operations whatever the strategy:

    x = plan.enter(spec, hidden)                       # `docs`: whole documents
    q, k, v, b, a = plan.to_heads(spec, projections)   # `heads`: all tokens of my heads
    halo = plan.conv_halo(spec, inputs)                # `state`: what precedes my segments
    state = plan.entry_states(spec, summary)           # `state`, and `docs` where one is cut
    y = plan.from_heads(spec, output)
    out = plan.leave(spec, y)

Sequences that go on from pack to pack give `conv_halo` and `entry_states` what was `initial`, and
ask `final_halo` and `final_states` for the next.
"""

# t tokens of this rank between layers, T tokens that the core sees, D model dim, W columns,
# N sequences, F of them or pieces of them that the core sees, P = conv_width - 1, H heads,
# K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.agreement import agree_on_plan
from pcomm.gdn_cp.arguments import GroupLike, all_specs, link_of, pack_of, place_in
from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.layout.planned_pack import PlannedPack
from pcomm.gdn_cp.layout.token_layout import LayoutName
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.strategies.cost import Link, Sizes, decide
from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan(PlannedPack):
    """How the tokens of one pack move, for each mixer of a model. Made by `make_plan`.

    Immutable. Two plans are equal if they move the same tokens of the same mixers in the same way
    on the same rank; the group that carries it out is not compared. Index tensors are made on
    first use or by `prepare`, and live as long as the plan. A copy is the plan itself. A pickle
    has neither tensors nor the group, so what is read from it can be looked at only.

    Attributes:
        collectives: What carries the plan out; None for a plan that is looked at only.
    """

    collectives: Collectives | None = field(compare=False, repr=False)

    # -- moving --------------------------------------------------------------------------

    @outside_graphs
    def enter(self, spec: Spec, hidden_tD: Tensor) -> Tensor:
        """Hidden states as the projections of this mixer want them.

        Documents with strategy `docs`, in one all-to-all; the input itself in the others.
        Collective, like all that follow: every rank calls it, in the same order. Differentiable,
        and backward is collective too: a rank that got no document runs the layer on no tokens.

        Args:
            spec: One of the plan's.
            hidden_tD: `[t, ...]`, this rank's tokens between layers.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group.
            LayoutError: Another number of tokens, or of columns than `hidden_dim`; raised before
                anything is sent.
        """
        self._check_width("Plan.enter", hidden_tD)
        return self._strategy(spec).enter(hidden_tD, self._group)

    @outside_graphs
    def leave(self, spec: Spec, hidden: Tensor) -> Tensor:
        """What `enter` undoes: `[t, ...]` of this rank's tokens between layers.

        Raises:
            ConfigError: See `enter`.
            LayoutError: See `enter`.
        """
        self._check_width("Plan.leave", hidden)
        return self._strategy(spec).leave(hidden, self._group)

    @outside_graphs
    def to_heads(self, spec: Spec, sections: Sequence[Tensor], *, fused: int = 1) -> list[Tensor]:
        """The projections of the tokens and heads that the core of this rank works on.

        Args:
            spec: One of the plan's.
            sections: The sections of `spec.sections`, `[t, heads * width]` each, any strides, of
                one dtype. With strategy `docs`, those of the tokens that `enter` returned.
            fused: How many of the first sections to return as one tensor, side by side, which is
                how a convolution wants them; nothing is copied for it where tensors travel.

        Returns:
            The sections, `[T, heads * width]` of this rank's heads, in the order of
            `cu_seqlens_of(spec)`; views of one buffer with strategies `heads` and `gather`.

        Raises:
            ConfigError: See `enter`.
            LayoutError: Other shapes or several dtypes; raised before anything is sent.
        """
        return self._strategy(spec).to_heads(sections, self._group, fused)

    @outside_graphs
    def from_heads(self, spec: Spec, output_TW: Tensor) -> Tensor:
        """The output of the core with all heads, at the tokens that `to_heads` was given.

        Args:
            spec: One of the plan's.
            output_TW: `[T, heads * width]`, of the core of this rank.

        Raises:
            ConfigError: See `enter`.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).from_heads(output_TW, self._group)

    @outside_graphs
    def conv_halo(
        self, spec: Spec, x_TW: Tensor, *, initial: Tensor | None = None
    ) -> Tensor | None:
        """What a causal convolution over `cu_seqlens_of(spec)` takes as its initial halo.

        Args:
            spec: One of the plan's.
            x_TW: `[T, channels]`, the inputs of the convolution.
            initial: `[N, P, channels]`, those before the pack, as `final_halo` returns them: of
                all sequences and channels, the same on every rank. Zeros by default. Each rank has
                the gradient of what it used; their sum over the group is the gradient, as for
                parameters.

        Returns:
            `[F, P, channels]` of this rank; None where all are zero.

        Raises:
            ConfigError: See `enter`; `initial` for a mixer without a state.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).carry.conv_halo(x_TW, self._group, initial)

    @outside_graphs
    def entry_states(
        self,
        spec: Spec,
        summary: tuple[Tensor, Tensor] | None,
        *,
        initial: Tensor | None = None,
    ) -> Tensor | None:
        """The state in which each sequence of `cu_seqlens_of(spec)` starts.

        Args:
            spec: One of the plan's.
            summary: What each of them does to a state, as the `summary` of the cores returns it:
                transitions and what is written, `[F, H, ...]` each. Not looked at, and so best
                not computed, unless `needs_summary` says so.
            initial: `[N, H, K, V]`, the states before the pack, as `final_states` returns them:
                of all sequences and heads, the same on every rank. Zeros by default. Its gradient
                is that of a parameter: see `conv_halo`.

        Returns:
            `[F, H, K, V]` of this rank; None where all are zero.

        Raises:
            ConfigError: See `conv_halo`; no summary where one is needed.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).carry.entry_states(summary, self._group, initial)

    @outside_graphs
    def final_states(
        self, spec: Spec, final_FHKV: Tensor, *, initial: Tensor | None = None
    ) -> Tensor:
        """The states after the whole pack, the same on every rank: `initial` of the next pack.

        One gather, and in backward one reduce-scatter, on top of `traffic`; none on one rank and
        with strategy `gather`. All ranks use the result in their graphs, or none does. The gradient
        is that of the sum of the ranks' losses, so a loss of the states themselves belongs on one
        rank, or on each divided by the number of ranks.

        Args:
            spec: One of the plan's.
            final_FHKV: `[F, H, K, V]` of this rank, as the core returns it.
            initial: What `entry_states` was given: the state after a sequence without tokens.

        Returns:
            `[N, H, K, V]` of all sequences and heads.

        Raises:
            ConfigError: See `enter`; a mixer without a state.
            LayoutError: Another shape; raised before anything is sent.
        """
        return self._strategy(spec).carry.final_states(final_FHKV, self._group, initial)

    @outside_graphs
    def final_halo(self, spec: Spec, halo_FPW: Tensor, *, initial: Tensor | None = None) -> Tensor:
        """The last inputs of the convolution, as `final_states` returns the states.

        Args:
            spec: One of the plan's.
            halo_FPW: `[F, P, channels]` of this rank, as the convolution returns it.
            initial: What `conv_halo` was given.

        Returns:
            `[N, P, channels]` of all sequences and channels.

        Raises:
            ConfigError: See `final_states`.
            LayoutError: See `final_states`.
        """
        return self._strategy(spec).carry.final_halo(halo_FPW, self._group, initial)

    # -- inside --------------------------------------------------------------------------

    @property
    def _group(self) -> Collectives:
        if self.tokens.size == 1:
            return IdentityCollectives()
        if self.collectives is None:
            raise ConfigError(
                f"Plan of rank {self.rank} of {self.tokens.size}",
                found="made with a pair of numbers instead of a group, or read from a pickle",
                why="Such a plan can be looked at, and cannot move tensors.",
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
    """The plan for one pack of sequences; host integers only, nothing is sent.

    Local, and the same on every rank that passes the same integers. With `verify` collective: the
    ranks compare what they passed, through the store and before any communication.

    Args:
        cu_seqlens: Offsets of the sequences in the buffer of all ranks, on the host, from 0 to
            its length. Sequences may be empty. Padding belongs to a sequence.
        group: The context-parallel group: a `Group`, torch's `ProcessGroup` or a `DeviceMesh` of
            one dimension; or collectives; or `(rank, size)` for a plan that is looked at and not
            carried out, where `(0, 1)` is a process alone.
        specs: The mixers of the model, with the counts of this tensor-parallel rank.
        layout: How tokens lie on the ranks between layers.
        strategy: Strategy of all mixers, or `auto` for the one that costs least by the model of
            `cost`. With `state`, a mixer without a state takes `heads`, or `gather` if its heads do
            not divide.
        hidden_dim: Width of hidden states; without it `auto` cannot weigh `docs`.
        element_bytes: Bytes of an element of activations, for the model and `describe`.
        link: The slowest link between the ranks, for the model.
        num_tokens: Length of the buffer of all ranks, to have it compared with the last offset.
        verify: Compare what all ranks passed.

    Raises:
        ConfigError: No such strategy or layout; no mixer; offsets that are not integers on the
            host; sizes that cannot be; `group` is no group, or a mesh of several dimensions.
        LayoutError: Offsets, lengths or heads that do not fit; a buffer of another length.
        UnsupportedError: `verify` with collectives or a pair of numbers.
        DivergenceError: With `verify`: the ranks did not pass the same, on all of them.
        PeerError: With `verify`: another rank's error.
    """
    place = place_in(group)

    def build() -> Plan:
        tokens = pack_of(cu_seqlens, place.size, layout, num_tokens)
        sizes, wanted = Sizes(hidden_dim, element_bytes), all_specs(specs)
        weighed = link_of(link)
        choices = tuple(decide(s, tokens, strategy, sizes, weighed) for s in wanted)
        strategies = tuple(choice.strategy for choice in choices)
        plan = Plan(tokens, place.rank, wanted, strategies, choices, sizes, place.collectives)
        # A strategy that does not work is refused now, not in the first layer.
        _ = plan._strategies
        return plan

    return agree_on_plan(place.group, group, build) if verify else build()
