"""The moves of a layer: the tensors of every mixer, between the ranks and back.

A layer calls the same six operations whatever the strategy:

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.transitions import Summary
from pcomm.gdn_cp.planned_pack import PlannedPack
from pcomm.gdn_cp.specs.spec import Spec

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan(PlannedPack):
    """How the tokens of one pack move, for each mixer of a model. Made by `make_plan`.

    Immutable. Two plans are equal if they move the same tokens of the same mixers in the same way
    on the same rank; their groups are not compared. Index tensors are made on first use or by
    `prepare`, and live as long as the plan. A copy is the plan itself. A pickle has neither tensors
    nor the group, so a plan read from it can be described, and cannot move tensors.

    Attributes:
        collectives: The group's collectives; None for a plan that only describes.
    """

    collectives: Collectives | None = field(compare=False, repr=False)

    @outside_graphs
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

    @outside_graphs
    def leave(self, spec: Spec, hidden: Tensor) -> Tensor:
        """The inverse of `enter`: `[t, ...]`, this rank's tokens between layers.

        Raises:
            ConfigError: The plan does not have this mixer, or was made without a group.
            LayoutError: Another number of tokens or columns.
        """
        self._check_width("Plan.leave", hidden)
        return self._strategy(spec).leave(hidden, self._group)

    @outside_graphs
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

    @outside_graphs
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

    @outside_graphs
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

    @outside_graphs
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

    @outside_graphs
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

    # -- inside --------------------------------------------------------------------------

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
