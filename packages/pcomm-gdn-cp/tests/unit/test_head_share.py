"""Which heads a rank works on, against the rule that value head h has key head h // ratio."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.gdn_cp import AttentionSpec, GdnSpec, HeadShare, Mamba2Spec


@given(
    shared=st.integers(1, 6),
    ratio=st.integers(1, 6),
    size=st.sampled_from([1, 2, 3, 4, 6, 8]),
)
def test_every_value_head_finds_its_key_head_on_its_rank(
    shared: int, ratio: int, size: int
) -> None:
    spec = AttentionSpec(shared * ratio, shared, 1)
    if shared * ratio % size:
        with pytest.raises(LayoutError, match=f"{shared * ratio} heads over {size} ranks"):
            HeadShare(spec, size, 0)
        return
    everything = []
    for rank in range(size):
        share = HeadShare(spec, size, rank)
        queries, keys = share.heads("q"), share.heads("k")
        assert len(queries) % len(keys) == 0
        serves = len(queries) // len(keys)
        # The core knows only the local numbers; the pairs must be those of the whole mixer.
        assert [keys[i // serves] for i in range(len(queries))] == [q // ratio for q in queries]
        everything += queries
    assert everything == list(range(shared * ratio))


@given(
    shared=st.integers(1, 6),
    ratio=st.integers(1, 6),
    size=st.sampled_from([1, 2, 3, 4, 6, 8]),
)
def test_the_columns_of_all_ranks_side_by_side_are_those_of_the_whole(
    shared: int, ratio: int, size: int
) -> None:
    if shared * ratio % size:
        return
    spec, names = GdnSpec(shared, shared * ratio, 2, 3), ("q", "k", "v")
    shares = [HeadShare(spec, size, rank) for rank in range(size)]
    widths = {section.name: section.head_width for section in spec.sections}
    columns = [
        (name, head, i)
        for share in shares
        for name in names
        for head in share.heads(name)
        for i in range(widths[name])
    ]
    found = [columns[place] for place in shares[0].gathered_columns(names)]
    counts = {section.name: section.num_heads for section in spec.sections}
    assert found == [
        (name, head, i)
        for name in names
        for head in range(counts[name])
        for i in range(widths[name])
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_parameters_add_up_to_the_gradient_of_the_whole(size: int) -> None:
    spec = GdnSpec(2, 4, 3, 5)
    conv = torch.randn(spec.convolution.channels, 4, dtype=torch.float64)
    seen = torch.zeros(spec.convolution.channels)
    total = torch.zeros_like(conv)
    for rank in range(size):
        share = HeadShare(spec, size, rank)
        mine = conv.clone().requires_grad_()
        taken = share.take(mine, ("q", "k", "v"))
        columns = [2 * 3, 2 * 3, 4 * 5]
        expected = torch.cat(
            [
                part.unflatten(0, (-1, width))[list(share.heads(name))].flatten(0, 1)
                for part, name, width in zip(conv.split(columns), "qkv", (3, 3, 5), strict=True)
            ]
        )
        assert_equal(taken.detach(), expected)
        taken.sum().backward()
        assert mine.grad is not None
        for name, part in zip("qkv", mine.grad.split(columns), strict=True):
            width = 5 if name == "v" else 3
            outside = set(range(len(part) // width)) - set(share.heads(name))
            assert not part.unflatten(0, (-1, width))[sorted(outside)].any()
        total += mine.grad
        seen += (mine.grad != 0).any(1)
    copies = size // 2 if size > 2 else 1
    expected_total = torch.ones_like(conv)
    expected_total[: 2 * 2 * 3] *= copies
    assert_equal(total, expected_total)


def test_entries_by_head_and_by_column_and_any_dimension() -> None:
    share = HeadShare(Mamba2Spec(4, 3, 1, 2), 2, 1)
    assert share.take(torch.arange(4), "dt").tolist() == [2, 3]
    assert share.take(torch.arange(4), "x").tolist() == [2, 3]
    assert share.take(torch.arange(12), "x").tolist() == list(range(6, 12))
    assert share.take(torch.arange(12).view(1, 12), "x", dim=1).tolist() == [list(range(6, 12))]
    assert share.take(torch.arange(2), "B").tolist() == [0, 1]
    # Alone a parameter is itself.
    parameter = torch.zeros(4, requires_grad=True)
    assert HeadShare(Mamba2Spec(4, 3, 1, 2), 1, 0).take(parameter, "dt") is parameter


def test_sections_side_by_side_are_split_into_heads() -> None:
    # 2 key heads for 4 value heads on 4 ranks: each rank has one of each, key heads twice.
    share = HeadShare(GdnSpec(2, 4, 3, 5), 4, 1)
    q, k, v = share.split(torch.arange(22).view(2, 11), ("q", "k", "v"))
    assert q.tolist() == [[[0, 1, 2]], [[11, 12, 13]]]
    assert k[1].tolist() == [[14, 15, 16]]
    assert v.shape == (2, 1, 5)
    whole = HeadShare(GdnSpec(2, 4, 3, 5), 1, 0)
    v, q = whole.split(torch.arange(26).view(1, 26), ("v", "q"))
    assert q.tolist() == [[[20, 21, 22], [23, 24, 25]]]
    assert v.shape == (1, 4, 5)


NARROW = HeadShare(GdnSpec(2, 4, 3, 5), 2, 0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: NARROW.take(torch.zeros(4), "z"), ConfigError, "section 'z'"),
        (
            lambda: NARROW.take(torch.zeros(7), "v"),
            LayoutError,
            r"so 7 along dim 0(.|\n)*4 heads and 20 columns",
        ),
        (
            lambda: NARROW.split(torch.zeros(2, 17), ("q", "k", "v")),
            LayoutError,
            r"shape \(2, 17\)(.|\n)*these have \[3, 3, 10\]",
        ),
        (lambda: HeadShare(NARROW.spec, 3, 0), LayoutError, "'docs' or 'state' or 'gather'"),
        (lambda: HeadShare(AttentionSpec(4, 2, 8), 8, 0), LayoutError, "'docs' or 'gather'"),
        (lambda: GdnSpec(2, 3, 4, 4), ConfigError, "3 heads over 2 shared heads"),
        (lambda: GdnSpec(2, 4, 0, 4), ConfigError, "'key_dim': 0"),
        (lambda: Mamba2Spec(4, 2, 3, 2), ConfigError, "4 heads over 3"),
        (lambda: AttentionSpec(0, 1, 2), ConfigError, "'num_heads': 0"),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
