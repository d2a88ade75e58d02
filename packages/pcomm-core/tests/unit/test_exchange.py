"""Positions on several ranks, before and after, and several sections, against brute force.

The oracle lists for every rank the flat numbers of the elements that it holds, picks an owner by
looping over the ranks, and moves and adds elements one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import LayoutError
from pcomm.core.exchange import ColumnShards, Exchange, Permutation, RowMoves
from pcomm.core.layout import Layout, Run
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

SIZES = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def covers(draw: st.DrawFn, length: int, size: int) -> Layout:
    """Any cover of a dimension: a partition, and some of its runs on further ranks as well."""
    kind = draw(st.sampled_from(["runs", "runs", "partition", "whole", "repeated", "even"]))
    if kind == "whole":
        return Layout.whole(length, size)
    if kind == "repeated":
        copies = draw(st.integers(1, 4))
        if length * copies % size == 0:
            return Layout.repeated(length, size, copies=copies)
    if kind == "even" and length % size == 0:
        return Layout.even(length, size)
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set()
    runs = [Run(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), length])]
    own: list[list[Run]] = [[] for _ in range(size)]
    for run in draw(st.permutations(runs)):
        most = 1 if kind == "partition" else size
        for rank in draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=most)):
            own[rank].append(run)
    return Layout(length, own)


@st.composite
def regions(draw: st.DrawFn, lengths: tuple[int, int], size: int) -> dict[int, Layout]:
    """One dimension covered and the other whole, or a grid of ranks with replicas."""
    rows, columns = lengths
    kind = draw(st.sampled_from(["rows", "columns", "grid"] if size < 6 else ["columns", "grid"]))
    if kind == "rows":
        return {0: draw(covers(rows, size)), 1: Layout.whole(columns, size)}
    if kind == "columns":
        return {0: Layout.whole(rows, size), 1: draw(covers(columns, size))}
    # The place of each rank in a grid of 2 x 2; a place may have several ranks.
    places = draw(st.permutations([i % 4 for i in range(max(size, 4))]))[:size]
    if set(places) != {0, 1, 2, 3}:
        return {0: Layout.whole(rows, size), 1: Layout.whole(columns, size)}
    halves = [Layout.balanced(length, 2).runs for length in lengths]
    return {d: Layout(lengths[d], [halves[d][(p >> d) & 1] for p in places]) for d in (0, 1)}


@st.composite
def exchanges(draw: st.DrawFn, size: int) -> Exchange:
    lengths = (draw(st.integers(1, 8)), draw(st.integers(1, 6)))
    source = draw(regions(lengths, size))
    owners = draw(st.none() | st.permutations(range(size)))
    return Exchange(source, draw(regions(lengths, size)), owners and tuple(owners))


@st.composite
def sections(draw: st.DrawFn) -> list[Exchange]:
    size = draw(SIZES)
    if draw(st.booleans()):
        return draw(st.lists(exchanges(size), min_size=1, max_size=3))
    # Rows of all sections become columns, which is what the fast way is for.
    rows = draw(covers(draw(st.integers(1, 8)), size).filter(lambda x: x.is_partition or size == 1))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 6))
        whole = [Layout.whole(length, size) for length in (rows.length, width)]
        found.append(Exchange({0: rows, 1: whole[1]}, {0: whole[0], 1: draw(covers(width, size))}))
    return found


def held(layouts: dict[int, Layout], rank: int) -> Tensor:
    """`[rows, columns]`: the numbers of the elements of a rank, as they lie there."""
    rows, columns = layouts[0].positions(rank), layouts[1].positions(rank)
    index = [[r * layouts[1].length + c for c in columns] for r in rows]
    return torch.tensor(index, dtype=torch.int64).view(len(rows), len(columns))


def sent_from(plan: Exchange) -> dict[int, tuple[int, int]]:
    """The rank and the place there from which each element comes: the first that has it."""
    found: dict[int, tuple[int, int]] = {}
    for rank in plan.owners or range(plan.size):
        for place, element in enumerate(held(dict(plan.source), rank).flatten().tolist()):
            found.setdefault(element, (rank, place))
    return found


def arrived(plan: Exchange, regions: list[Tensor]) -> list[Tensor]:
    """The target regions of all ranks, from their source regions, element by element."""
    origin, found = sent_from(plan), []
    for rank in range(plan.size):
        wanted = held(dict(plan.target), rank)
        values = [regions[r].flatten()[i] for r, i in map(origin.get, wanted.flatten().tolist())]  # type: ignore[misc]
        found.append(
            torch.stack(values).view(wanted.shape) if values else torch.zeros(wanted.shape)
        )
    return found


def gradients(plan: Exchange, upstream: list[Tensor]) -> list[Tensor]:
    """The gradients of all source regions: those of all copies go to the owner."""
    origin = sent_from(plan)
    found = [torch.zeros(held(dict(plan.source), r).shape).double() for r in range(plan.size)]
    for rank, gradient in enumerate(upstream):
        elements = held(dict(plan.target), rank).flatten().tolist()
        for element, value in zip(elements, gradient.flatten(), strict=True):
            owner, place = origin[element]
            found[owner].view(-1)[place] += value
    return found


def moved(plan: Exchange) -> list[int]:
    """Number of elements that each rank sends to others."""
    origin, counts = sent_from(plan), [0] * plan.size
    for rank in range(plan.size):
        for element in held(dict(plan.target), rank).flatten().tolist():
            counts[origin[element][0]] += origin[element][0] != rank
    return counts


def numbers(layouts: Mapping[int, Layout], seed: int) -> list[Tensor]:
    """Whole numbers, which add exactly; they differ from rank to rank, so that owners do."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [held(dict(layouts), rank).shape for rank in range(layouts[0].size)]
    return [torch.randint(-999, 999, shape, generator=generator).double() for shape in shapes]


@given(plans=sections(), trailing=st.sampled_from([(), (2,)]))
@settings(max_examples=50, deadline=None)
def test_several_sections_arrive_and_their_gradients_come_back(
    plans: list[Exchange], trailing: tuple[int, ...]
) -> None:
    size = plans[0].size
    # A third dimension of the same numbers twice: they are moved along with the first two.
    spread = (lambda x: x[..., None].repeat(1, 1, 2)) if trailing else (lambda x: x)
    sources = [numbers(p.source, n) for n, p in enumerate(plans)]
    upstream = [numbers(p.target, n + 9) for n, p in enumerate(plans)]
    expected = [arrived(p, x) for p, x in zip(plans, sources, strict=True)]
    expected_back = [gradients(p, x) for p, x in zip(plans, upstream, strict=True)]
    sent = [sum(counts) for counts in zip(*map(moved, plans), strict=True)]

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        rank = spy.rank
        mine = [spread(x[rank]).requires_grad_() for x in sources]
        there = Exchange.sections(plans).apply(mine, spy)
        for plan, found, wanted, x in zip(plans, there, expected, mine, strict=True):
            assert_equal(found.detach(), spread(wanted[rank]).double())
            assert plan.sent_elements(rank, x.shape) == moved(plan)[rank] * math.prod(trailing)
            if plan.is_bijection:
                assert_equal(plan.inverse.apply(found.detach(), collectives), x.detach())
        if size > 1:
            assert len(spy.calls) == 1
            assert spy.sent_bytes == sent[rank] * math.prod(trailing) * 8
        spy.clear()
        back = torch.autograd.grad(there, mine, [spread(x[rank]) for x in upstream])
        for found, wanted in zip(back, expected_back, strict=True):
            assert_equal(found, spread(wanted[rank]))
        assert len(spy.calls) == (size > 1 or bool(spy.counts))

    run_virtual(on_rank, size)


@given(plans=sections(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_fused_sections_are_one_tensor_and_its_gradient_is_taken_apart(
    plans: list[Exchange], data: st.DataObject
) -> None:
    # Fused sections have equal numbers of rows on every rank.
    first = plans[0]
    alike = [p for p in plans if p.target[0] == first.target[0]]
    fused, size = data.draw(st.integers(1, len(alike))), first.size
    sources = [numbers(p.source, n) for n, p in enumerate(alike)]

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = [x[collectives.rank].requires_grad_() for x in sources]
        together = Exchange.sections(alike)
        apart = together.apply(mine, collectives)
        found = together.apply(mine, collectives, fused=fused)
        assert len(found) == len(alike) - fused + 1
        assert_equal(found[0], torch.cat(apart[:fused], -1))
        ones = [torch.ones_like(x) * (n + 2) for n, x in enumerate(apart)]
        expected = torch.autograd.grad(apart, mine, ones)
        upstream = [torch.cat(ones[:fused], -1), *ones[fused:]]
        for one, other in zip(torch.autograd.grad(found, mine, upstream), expected, strict=True):
            assert_equal(one, other)

    run_virtual(on_rank, size)


@given(data=st.data(), size=SIZES)
@settings(max_examples=25, deadline=None)
def test_the_adjoint_and_its_own_adjoint_satisfy_the_definition(
    data: st.DataObject, size: int
) -> None:
    """<y, A x> = <A* y, x> over all ranks, and the second derivative passes through A again."""
    plan = data.draw(exchanges(size))
    sources, upstream = numbers(plan.source, 1), numbers(plan.target, 2)

    def on_rank(collectives: VirtualCollectives) -> tuple[float, float, Tensor]:
        x = sources[collectives.rank].requires_grad_()
        y = upstream[collectives.rank].clone().requires_grad_()
        there = plan.apply(x, collectives)
        (back,) = torch.autograd.grad(there, x, y, create_graph=True)
        (again,) = torch.autograd.grad(back, y, x.detach())
        there, back, y, x = (one.detach() for one in (there, back, y, x))
        return float((there * y).sum()), float((back * x).sum()), again - there

    found = run_virtual(on_rank, size)
    assert sum(one for one, _, _ in found) == sum(other for _, other, _ in found)
    assert not any(difference.any() for _, _, difference in found)


def test_copies_of_short_elements_are_added_in_fp32() -> None:
    # Rank 0 keeps the second position to itself, so that this is no plain gather.
    target = [(Run(0, 1), Run(1, 2)), *[(Run(0, 1),)] * 7]
    plan = Exchange({0: Layout.uneven([2] + [0] * 7)}, {0: Layout(2, target)})

    def on_rank(collectives: VirtualCollectives) -> list[float]:
        mine = torch.zeros(2 if collectives.rank == 0 else 0).bfloat16().requires_grad_()
        # 1 + 6 / 256 is a number of bf16; added in bf16, each of the six would be lost.
        upstream = [[1.0, 5.0], *[[1 / 256]] * 6, [0.0]][collectives.rank]
        plan.apply(mine, collectives).backward(torch.tensor(upstream).bfloat16())
        assert mine.grad is not None
        return mine.grad.tolist()  # type: ignore[no-any-return]

    assert run_virtual(on_rank, 8)[0] == [1 + 6 / 256, 5.0]


def test_everything_on_every_rank_is_an_all_gather_and_back_a_reduce_scatter() -> None:
    zigzag = Layout(8, ((Run(0, 2), Run(6, 8)), (Run(2, 6),)))
    uneven = Layout.uneven([3, 5])
    for rows in (zigzag, uneven):
        plan = Exchange({0: rows}, {0: Layout.whole(8, 2)})

        def on_rank(
            collectives: VirtualCollectives, rows: Layout = rows, plan: Exchange = plan
        ) -> None:
            spy = SpyCollectives(collectives)
            whole = torch.arange(24.0).view(8, 3)
            mine = whole[rows.positions(spy.rank)].requires_grad_()
            there = plan.apply(mine, spy)
            assert_equal(there.detach(), whole)
            (gradient,) = torch.autograd.grad(there, mine, whole)
            assert_equal(gradient, 2 * mine.detach())
            assert spy.counts == {"all_gather": 1, "reduce_scatter": 1}

        run_virtual(on_rank, 2)


def test_the_inverse_of_a_cover_takes_one_copy_and_adds_none_up() -> None:
    rows, keys = Layout.even(4, 2), Layout.repeated(2, 2, copies=2)
    whole = torch.arange(8.0).view(4, 2)
    plan = Exchange(
        {0: rows, 1: Layout.whole(2, 2)},
        {0: Layout.whole(4, 2), 1: Layout.repeated(2, 2, copies=2)},
    )
    assert keys.positions(0) == [0, 0]

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = whole[rows.positions(collectives.rank)]
        there = plan.apply(mine, collectives)
        assert_equal(there, whole[:, keys.positions(collectives.rank)])
        assert_equal(plan.inverse.apply(there, collectives), mine)

    run_virtual(on_rank, 2)


def test_lost_shards_come_from_the_preferred_replica() -> None:
    """Ranks 0 and 1 are a replica, 2 and 3 another one, of which rank 3 has lost its shard."""
    halves = ((Run(0, 2),), (Run(2, 4),))
    source = Layout(4, (*halves, halves[0], ()))
    target = Layout(4, (*halves, *halves))
    contents = {0: [0.0, 1.0], 1: [2.0, 3.0], 2: [10.0, 11.0], 3: []}

    def after(owners: tuple[int, ...] | None) -> list[list[float]]:
        plan = Exchange({0: source}, {0: target}, owners)

        def on_rank(collectives: VirtualCollectives) -> list[float]:
            found: list[float] = plan.apply(
                torch.tensor(contents[collectives.rank]), collectives
            ).tolist()
            return found

        return run_virtual(on_rank, 4)

    assert after(None) == [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0]]
    assert after((2, 1)) == [[10.0, 11.0], [2.0, 3.0], [10.0, 11.0], [2.0, 3.0]]
    with pytest.raises(LayoutError, match="not every position of dimension 0 is held"):
        Exchange({0: source}, {0: target}, (0, 2, 3))


@pytest.mark.parametrize("owners", [(0, 0), (2,), (-1, 0), ()], ids=str)
def test_owners_are_different_ranks(owners: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"owners \("):
        Exchange({0: Layout.whole(4, 2)}, {0: Layout.even(4, 2)}, owners)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_columns_in_equal_shards_are_known_by_their_layout(
    num_units: int, unit: int, copies: int, num_ranks: int
) -> None:
    if num_units * copies % num_ranks:
        return
    shards = ColumnShards(num_units, unit, copies, num_ranks)
    found = ColumnShards.of(shards.layout)
    assert found is not None
    assert found.layout.edges == shards.layout.edges or shards.copies == 1
    assert [found.layout.positions(r) for r in range(num_ranks)] == [
        shards.layout.positions(r) for r in range(num_ranks)
    ]
    assert (found.width, found.width_per_rank) == (shards.width, shards.width_per_rank)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.uneven([1, 3]),
        Layout.uneven([0, 0]),
        Layout(4, ((Run(2, 4),), (Run(0, 2),))),
        Layout(4, ((Run(0, 2),), (Run(0, 2),))),
        Layout(4, ((Run(0, 1), Run(1, 4)), (Run(0, 1), Run(1, 4)))),
    ],
    ids=["uneven", "empty", "reversed", "incomplete", "units of several widths"],
)
def test_other_columns_are_not_taken_for_equal_shards(layout: Layout) -> None:
    assert ColumnShards.of(layout) is None


def test_sections_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    plan = Exchange({0: Layout.even(4, 2)}, {0: Layout.uneven([1, 3])})
    both = Exchange.sections([plan, plan])
    with pytest.raises(LayoutError, match=r"exchanges over \[\] ranks"):
        Exchange.sections([])
    alone = Exchange({0: Layout.even(4, 1)}, {0: Layout.even(4, 1)})
    with pytest.raises(LayoutError, match=r"exchanges over \[2, 1\] ranks"):
        Exchange.sections([plan, alone])

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        x = torch.zeros(2)
        for tensors, fused in (([x], 1), ([x, x.double()], 1), ([x, x], 0), ([x, x], 3)):
            with pytest.raises(LayoutError, match="one message has one dtype"):
                both.apply(tensors, spy, fused=fused)
        with pytest.raises(LayoutError, match=r"shape \(3,\)"):
            both.apply([x, torch.zeros(3)], spy)
        assert not spy.calls

    run_virtual(on_rank, 2)


def test_rows_in_copies_are_added_up_in_their_order() -> None:
    """Every row goes twice, to ranks that are known at run time only."""
    wanted = [[1, 0, 0, 1], [1, 1, 0, 0]]

    def on_rank(collectives: VirtualCollectives) -> None:
        to = torch.tensor(wanted[collectives.rank])
        sent = torch.bincount(to, minlength=2)
        received = torch.tensor(wanted).eq(collectives.rank).sum(1)
        moves = RowMoves(
            tuple(sent.tolist()), tuple(received.tolist()), Permutation.sorting(to), None, copies=2
        )
        rows = torch.tensor([[1.0], [2.0]], dtype=torch.float64).requires_grad_()
        there = moves.apply(rows, collectives)
        back = moves.inverse.apply(there, collectives).detach()
        assert_equal(back, rows.detach().repeat_interleave(2, 0))
        (gradient,) = torch.autograd.grad(there, rows, there.detach())
        assert_equal(gradient, 2 * rows.detach())

    run_virtual(on_rank, 2)


TWICE_ON_ONE = Layout.repeated(2, 2, copies=2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # Rank 0 has position 0 twice: the number of elements is right, and half of them are gone.
        ({0: TWICE_ON_ONE, 1: Layout.even(4, 2)}, {0: Layout.whole(2, 2), 1: Layout.whole(4, 2)}),
        # Without elements their number says nothing, and row 3 is on no rank.
        (
            {0: Layout.even(6, 2), 1: Layout.whole(0, 2)},
            {0: Layout(6, ((Run(0, 3),), (Run(4, 6),))), 1: Layout.whole(0, 2)},
        ),
    ],
    ids=["copies in place of others", "no columns"],
)
def test_what_is_on_no_rank_is_refused_however_many_elements_there_are(
    source: dict[int, Layout], target: dict[int, Layout]
) -> None:
    with pytest.raises(LayoutError):
        Exchange(source, target)


def test_copies_on_one_rank_make_no_bijection_and_their_gradients_add_up() -> None:
    exchange = Exchange(
        {0: Layout.even(2, 2), 1: Layout.whole(4, 2)},
        {0: Layout.repeated(2, 2, copies=2), 1: Layout.whole(4, 2)},
    )
    assert not exchange.is_bijection

    def on_rank(collectives: VirtualCollectives) -> Tensor:
        x = torch.zeros(1, 4, requires_grad=True)
        y = exchange.apply(x, collectives)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    copies = sum(len(exchange.target[0].positions(rank)) for rank in range(2)) / 2
    for gradient in run_virtual(on_rank, 2):
        assert_equal(gradient, torch.full((1, 4), copies))


@pytest.mark.parametrize("columns", [0, 3])
def test_rows_without_columns_have_the_shape_of_rows_with_them(columns: int) -> None:
    exchange = Exchange(
        {0: Layout.whole(6, 2), 1: Layout.whole(columns, 2)},
        {0: Layout.even(6, 2), 1: Layout.whole(columns, 2)},
    )
    moved = run_virtual(lambda group: exchange.apply(torch.zeros(6, columns), group).shape, 2)
    assert moved == [(3, columns)] * 2


def test_one_rank_takes_each_element_from_its_owner_as_several_do() -> None:
    exchange = Exchange({0: Layout.repeated(2, 1, copies=2)}, {0: Layout.repeated(2, 1, copies=2)})
    found = []
    for apply in (
        lambda x: exchange.apply(x, IdentityCollectives()),
        lambda x: Exchange.sections([exchange]).apply([x], IdentityCollectives())[0],
    ):
        x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        y = apply(x)
        y.sum().backward()
        assert x.grad is not None
        found.append((y.tolist(), x.grad.tolist()))
    assert found[0] == found[1]
    assert sum(found[0][1]) == 4.0


def test_regions_are_equal_however_their_runs_are_cut() -> None:
    cut, whole = (Run(0, 1), Run(1, 2)), (Run(0, 2),)
    source = {
        0: Layout(4, (cut, whole, (Run(2, 4),), (Run(0, 4),))),
        1: Layout(4, (whole, whole, whole, (Run(2, 4),))),
    }
    exchange = Exchange(source, {dim: Layout.whole(4, 4) for dim in source})
    full = torch.arange(16.0).view(4, 4)

    def on_rank(collectives: VirtualCollectives) -> Tensor:
        rows, columns = (source[dim].positions(collectives.rank) for dim in (0, 1))
        return exchange.apply(full[rows][:, columns], collectives)

    for result in run_virtual(on_rank, 4):
        assert_equal(result, full)


def test_a_section_may_lie_on_a_rank_in_copies() -> None:
    layout = Layout.sections([Layout.even(4, 2), Layout.repeated(2, 2, copies=2)])
    assert layout.length == 6
    assert [layout.positions(rank)[:2] for rank in range(2)] == [[0, 1], [2, 3]]
    assert {p for rank in range(2) for p in layout.positions(rank)[2:]} == {4, 5}


def region(whole: Tensor, layouts: dict[int, Layout], rank: int) -> Tensor:
    """What `rank` holds of `whole`, by listing positions: the oracle."""
    for dim, layout in layouts.items():
        whole = whole.index_select(dim, torch.tensor(layout.positions(rank), dtype=torch.int64))
    return whole


def test_a_gradient_that_is_not_contiguous_is_exchanged_right() -> None:
    plan = Exchange(
        {0: Layout.even(8, 2), 1: Layout.whole(4, 2)}, {0: Layout.whole(8, 2), 1: Layout.even(4, 2)}
    )
    weights = torch.randn(4, 8).t()

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = torch.zeros(4, 4, requires_grad=True)
        upstream = weights[:, collectives.rank * 2 : collectives.rank * 2 + 2]
        assert not upstream.is_contiguous()
        plan.apply(mine, collectives).backward(upstream)
        assert mine.grad is not None
        assert_equal(mine.grad, weights[collectives.rank * 4 : collectives.rank * 4 + 4])

    run_virtual(on_rank, 2)


def test_rows_in_a_thousand_runs_move_in_one_message_and_come_back() -> None:
    """As a pack of many sequences does: only the first dimension is split, by many runs."""
    size, each = 4, 250
    runs = [Run(8 * i + 2 * part, 8 * i + 2 * part + 2) for i in range(each) for part in range(4)]
    dealt = Layout(2000, tuple(tuple(runs[rank::size]) for rank in range(size)))
    plan = Exchange({0: dealt}, {0: Layout.uneven([500, 0, 1400, 100])})
    whole = torch.arange(2000.0)[:, None] + torch.arange(3.0)

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        plan.prepare(spy.rank, torch.device("cpu"))
        mine = region(whole, plan.source, spy.rank).requires_grad_()
        there = plan.apply(mine, spy)
        assert_equal(there.detach(), region(whole, plan.target, spy.rank))
        assert spy.sent_bytes == plan.sent_elements(spy.rank, mine.shape) * 4
        (gradient,) = torch.autograd.grad(there, mine, there.detach() * 2)
        assert_equal(gradient, mine.detach() * 2)
        assert spy.counts == {"all_to_all": 2}

    run_virtual(on_rank, size)


def test_alone_it_is_the_identity_and_can_still_reorder() -> None:
    x = torch.arange(4.0)
    same = Exchange({0: Layout.even(4, 1)}, {0: Layout.even(4, 1)})
    assert same.apply(x, IdentityCollectives()) is x
    swapped = Exchange({0: Layout.even(4, 1)}, {0: Layout(4, ((Run(2, 4), Run(0, 2)),))})
    assert swapped.apply(x, IdentityCollectives()).tolist() == [2.0, 3.0, 0.0, 1.0]


HALVES, WHOLE = Layout.even(4, 2), Layout.whole(4, 2)
SAME_HALF = Layout(4, ((Run(0, 2),), (Run(0, 2),)))
PART = Layout(4, ((Run(0, 3),), (Run(1, 4),)))
GRID = {0: HALVES, 1: WHOLE}


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({0: HALVES}, {1: HALVES}, "before and"),
        ({0: HALVES}, {0: Layout.even(6, 2)}, r"\(6, 2\)"),
        ({0: HALVES}, {0: Layout.even(4, 4)}, r"\(4, 4\)"),
        ({0: SAME_HALF}, {0: HALVES}, "source .*(?s:.)not every position of dimension 0"),
        ({0: HALVES}, {0: SAME_HALF}, "target .*(?s:.)not every position of dimension 0"),
        (GRID, {0: HALVES, 1: HALVES}, r"target .*(?s:.)ranks hold \[4, 4\] elements of 16"),
        ({0: PART, 1: PART}, GRID, "source .*(?s:.)regions of ranks 0 and 1 overlap in part"),
        ({-1: HALVES}, {-1: HALVES}, "dimensions >= 0"),
        ({}, {}, "before and"),
    ],
)
def test_sides_that_do_not_describe_one_tensor_are_refused(
    source: dict[int, Layout], target: dict[int, Layout], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        Exchange(source, target)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_of_no_layout_is_refused(rank: int) -> None:
    # By rows, and by the general way.
    columns = Exchange({0: HALVES, 1: WHOLE}, {0: WHOLE, 1: HALVES})
    for plan in (Exchange({0: HALVES}, {0: Layout.uneven([1, 3])}), columns):
        with pytest.raises(LayoutError, match=f"rank {rank}"):
            plan.sent_elements(rank, [2, 4])
        with pytest.raises(LayoutError, match=f"rank {rank}"):
            plan.prepare(rank, torch.device("cpu"))


def test_a_tensor_or_group_of_another_size_is_refused_before_anything_is_sent() -> None:
    plan = Exchange({0: HALVES}, {0: Layout.uneven([1, 3])})
    with pytest.raises(LayoutError, match="a group of 1 ranks"):
        plan.apply(torch.zeros(2), IdentityCollectives())

    def on_rank(collectives: VirtualCollectives) -> None:
        spy = SpyCollectives(collectives)
        with pytest.raises(LayoutError, match=r"shape \(3,\)"):
            plan.apply(torch.zeros(3), spy)
        assert not spy.calls

    run_virtual(on_rank, 2)
