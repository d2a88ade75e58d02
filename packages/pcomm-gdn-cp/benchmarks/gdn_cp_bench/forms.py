"""All forms of the exchange of one pack, on one rank: the strategies of a plan, and the baselines.

Those of `heads` and `gather` start from the same projections as the baselines and do the same job;
z stays where it is. In `docs` hidden states travel, and the projections run on the other side. In
`state` projections stay, and what travels is the halo of the convolution and a map for each segment
that is continued on another rank; the maps are then applied. Computing the maps is not timed.
"""

# t tokens of this rank, T of all, W columns of all sections, D model dim, V columns of the output,
# F segments on this rank, H heads, K key dim, P = conv_width - 1, C channels of the convolution

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gdn_cp_bench.exchange_case import (
    SPEC,
    WIDTHS,
    CaseTensors,
    Cut,
    ExchangeCase,
    column_order,
    fused_exchange,
    held_chunks,
    sequence_loop,
    slices,
    split,
)
from gdn_cp_bench.settings import HIDDEN_DIM, PackCase
from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.plan import Plan, make_plan
from pcomm.gdn_cp.strategies.strategy import StrategyName


def plan_of(cu_seqlens: tuple[int, ...], collectives: Collectives, strategy: StrategyName) -> Plan:
    """A plan of this strategy, with its index tensors made."""
    return make_plan(
        cu_seqlens, collectives, SPEC, strategy=strategy, hidden_dim=HIDDEN_DIM, element_bytes=4
    ).prepare("cpu")


def heads_case(numbers: CaseTensors, plan: Plan) -> ExchangeCase:
    """All sections but z to the ranks that have their heads, and the output back."""

    def parts(whole_TW: Tensor) -> tuple[Tensor, ...]:
        fused, _, b, a = numbers.core_parts(whole_TW)
        return fused, _held_z(numbers, whole_TW), b, a

    return numbers.by_heads(partial(_move, plan), parts)


def gather_case(numbers: CaseTensors, plan: Plan) -> ExchangeCase:
    """All sections but z to every rank; of the output each keeps its tokens."""

    def parts(whole_TW: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, b, a = whole_TW.split(WIDTHS, -1)
        fused, z = torch.cat([q, k, v], -1), _held_z(numbers, whole_TW)
        return fused, z, b.contiguous(), a.contiguous()

    def leaf_grads() -> tuple[Tensor, Tensor]:
        # Every rank brings the same gradient of what all of them got.
        q, k, v, z, b, a = numbers.held(numbers.sections_grad_TW).split(WIDTHS, -1)
        many = [part * numbers.size for part in (q, k, v, b, a)]
        own = torch.zeros_like(numbers.output_grad_TV)
        own[numbers.rows_t] = numbers.held(numbers.output_grad_TV)
        return torch.cat([*many[:3], z, *many[3:]], -1), own

    return numbers.case(numbers.output_TV, partial(_move, plan), parts, leaf_grads)


def _move(plan: Plan, x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The core's parts by `plan`, z as it is, and the output at this rank's tokens."""
    q, k, v, z, b, a = x.split(WIDTHS, -1)
    fused, b, a = plan.to_heads(SPEC, [q, k, v, b, a], fused=3)
    return (fused, z, b, a), plan.from_heads(SPEC, y)


def _held_z(numbers: CaseTensors, whole_TW: Tensor) -> Tensor:
    z: Tensor = numbers.held(whole_TW).split(WIDTHS, -1)[3]
    return z.contiguous()


def documents_case(numbers: CaseTensors, plan: Plan) -> ExchangeCase:
    """Hidden states to whole documents and back, and the states between segments of cut ones."""
    hidden_TD, grad_TD = (
        whole.split([HIDDEN_DIM, WIDTHS[3] - HIDDEN_DIM], -1)[0]
        for whole in (numbers.output_TV, numbers.output_grad_TV)
    )
    spans = _documents(plan)
    begin, end = spans[numbers.rank][0], spans[numbers.rank][-1]
    x = numbers.leaf(numbers.held(hidden_TD))
    y = numbers.leaf(hidden_TD[begin:end])
    inner = _state_passing(numbers, plan, torch.arange(begin, end), [s[:-1] for s in spans])

    def forward() -> tuple[Tensor, ...]:
        entered = plan.enter(SPEC, x)
        between = inner.forward() if inner else ()
        return entered, *between, plan.leave(SPEC, y)

    return ExchangeCase(
        (x, y, *(inner.leaves if inner else ())),
        forward,
        (
            grad_TD[begin:end].contiguous(),
            *(inner.arriving if inner else ()),
            numbers.held(grad_TD),
        ),
        lambda: (
            hidden_TD[begin:end],
            *(inner.expected()[:2] if inner else ()),
            numbers.held(hidden_TD),
            numbers.held(grad_TD),
            grad_TD[begin:end],
            *(inner.expected()[2:] if inner else ()),
        ),
    )


def _documents(plan: Plan) -> list[list[int]]:
    """Rank by rank, where its documents and segments begin, and where the last one ends."""
    offsets, found, begin = plan.tokens.cu_seqlens, [], 0
    for rank in range(plan.tokens.size):
        pair = make_plan(offsets, (rank, plan.tokens.size), SPEC, strategy="docs")
        ends = [begin + offset for offset in pair.cu_seqlens_of(SPEC)]
        found.append(ends)
        begin = ends[-1]
    return found


def state_case(numbers: CaseTensors, plan: Plan) -> ExchangeCase | None:
    """The halos and entry states of segments; None if no segment is continued."""
    segments = [
        [chunk.start for chunk in held_chunks(numbers.cu_seqlens, rank, numbers.size) if chunk]
        for rank in range(numbers.size)
    ]
    assert len(segments[numbers.rank]) == len(plan.cu_seqlens_of(SPEC)) - 1, "other segments"
    return _state_passing(numbers, plan, numbers.rows_t, segments)


def _state_passing(
    numbers: CaseTensors, plan: Plan, rows_t: Tensor, segments: list[list[int]]
) -> ExchangeCase | None:
    """The states and halos that segments take from those before them.

    Args:
        numbers: Inputs and gradients of the pack.
        plan: A plan with strategy `docs` or `state`.
        rows_t: The tokens of this rank's core.
        segments: First token of each segment, rank by rank.
    """
    if not plan.needs_summary(SPEC):
        return None
    reach, channels = SPEC.convolution.reach, SPEC.convolution.channels
    inputs_TC = numbers.sections_TW[:, :channels]
    own, shape = segments[numbers.rank], SPEC.state.shape
    written_F = torch.tensor([_written(start) for start in own]).view(-1, 1, 1, 1)
    x = numbers.leaf(inputs_TC[rows_t])
    # Halving and small numbers, so that every order of composing gives the same state.
    halving = torch.eye(shape[1]).mul(0.5).expand(len(own), shape[0], shape[1], shape[1])
    transition, written = (
        numbers.leaf(part) for part in (halving, written_F.expand(-1, *shape).contiguous())
    )

    def forward() -> tuple[Tensor, ...]:
        halo = plan.conv_halo(SPEC, x)
        states = plan.entry_states(SPEC, (transition, written))
        assert halo is not None
        assert states is not None
        return halo, states

    def expected() -> tuple[Tensor | None, ...]:
        halo = torch.zeros(len(own), reach, channels)
        origins = [max(o for o in numbers.cu_seqlens if o <= start) for start in own]
        for place, (start, origin) in enumerate(zip(own, origins, strict=True)):
            count = min(reach, start - origin)
            halo[place, reach - count :] = inputs_TC[start - count : start]
        states = torch.tensor(_entered(numbers.cu_seqlens, segments, own)).view(-1, 1, 1, 1)
        return halo, states.expand(-1, *shape), None, None, None

    grads = torch.Generator().manual_seed(2)
    return ExchangeCase(
        (x, transition, written),
        forward,
        (
            torch.rand(len(own), reach, channels, generator=grads),
            torch.rand(len(own), *shape, generator=grads),
        ),
        expected,
    )


def _written(start: int) -> float:
    return 1.0 + start % 7


def _entered(cu_seqlens: tuple[int, ...], segments: list[list[int]], own: list[int]) -> list[float]:
    """The state in which each of `own` starts, when segments halve it and add `_written`."""
    found, origins = {}, set(cu_seqlens)
    state = 0.0
    for start in sorted(start for of_rank in segments for start in of_rank):
        found[start] = state = 0.0 if start in origins else state
        state = 0.5 * state + _written(start)
    return [found[start] for start in own]


LOOPS: dict[str, Cut] = {"loop": slices, "split loop": split}
PLANNED: dict[StrategyName, Callable[[CaseTensors, Plan], ExchangeCase | None]] = {
    "heads": heads_case,
    "docs": documents_case,
    "state": state_case,
    "gather": gather_case,
}
FORMS: tuple[str, ...] = (*LOOPS, "fused", *PLANNED)

# Of one rank's maps, after the gather. Some hundred segments have more bytes than the tokens
# themselves, and all ranks of this machine share its memory.
_MOST_STATE_BYTES = 128 << 20
# Above so many sequences, forms that handle them one by one are timed with one kind of lengths.
_MOST_TWICE = 16
_MOST_KIND = 64


def build_form(name: str, numbers: CaseTensors, collectives: Collectives) -> ExchangeCase | None:
    """The form of this name; None where it has nothing to exchange."""
    for strategy, case_of in PLANNED.items():
        if strategy == name:
            return case_of(numbers, plan_of(numbers.cu_seqlens, collectives, strategy))
    if name == "fused":
        exchange = partial(
            fused_exchange,
            cu_seqlens_N=torch.tensor(numbers.cu_seqlens),
            columns_W=column_order(numbers.size),
        )
    else:
        exchange = partial(sequence_loop, cu_seqlens=numbers.cu_seqlens, cut=LOOPS[name])
    return numbers.by_heads(partial(exchange, collectives=differentiable(collectives)))


def obstacle(name: str, pack: PackCase, collectives: Collectives) -> str:
    """Why a form is left out of a pack; empty if it is not."""
    # Their time is that of so many messages, so once is enough; it is seconds a round.
    if name in (*LOOPS, "state") and not pack.is_random and pack.num_sequences > _MOST_TWICE:
        return "timed with random lengths only"
    if name == "split loop" and pack.num_sequences > _MOST_KIND:
        return "it is to `loop` as with fewer sequences, and takes long"
    if name != "state":
        return ""
    traffic = plan_of(pack.cu_seqlens, collectives, "state").traffic(SPEC)
    # Forward every rank sends its maps to all others, and backward it sends what those had.
    gathered = traffic.backward_bytes + traffic.forward_bytes // (collectives.size - 1)
    if gathered > _MOST_STATE_BYTES:
        return f"each rank would gather {gathered / 1e6:.0f} MB of maps"
    return ""
