"""The plan for one micro-batch: what is decided, in order.

A plan is made once from integers of the host, before any layer runs, and shared by all layers, by
recompute and by backward. `layer_moves` has what a layer asks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from pcomm.gdn_cp.agreement import agree_on_plan
from pcomm.gdn_cp.arguments import GroupLike, all_specs, link_of, pack_of, place_in
from pcomm.gdn_cp.layer_moves import Plan
from pcomm.gdn_cp.layout.token_layout import LayoutName
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.choice import choose_strategy
from pcomm.gdn_cp.strategies.cost import Link, Sizes
from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = ["make_plan"]


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
            `cost`. With `state`, a mixer without a state takes `heads`, or `gather` if its heads do
            not divide.
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
    return agree_on_plan(place.group, group, build) if verify else build()
