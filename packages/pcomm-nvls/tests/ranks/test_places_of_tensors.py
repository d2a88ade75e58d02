"""Where inputs and results may lie: in the workspace, over each other, with any strides."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from core_support.mappings import shared_mappings
from nvls_support.emulation import emulate, opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing import ranks


@ranks(2)
def test_gathers_refuse_inputs_where_other_ranks_store(rank: int) -> None:
    with opened(1 << 14) as workspace:
        x = torch.full((4, 8), float(rank))
        view = workspace.empty(x.shape, x.dtype).copy_(x)
        named: dict[str, Any] = {"workspace": workspace}
        for algo in ("auto", "p2p", "dist"):
            named["algo"] = algo
            refused(ConfigError, "other ranks store", nvls.all_gather_into_tensor, view, **named)
            refused(ConfigError, "other ranks store", nvls.all_gather_coalesced, [x, view], **named)
            refused(ConfigError, "other ranks store", nvls.all_gather_v, view, [4, 4], **named)
            refused(ConfigError, "other ranks store", nvls.gather_to_rank, view, **named)
            with pytest.raises(ConfigError, match="other ranks store"):
                nvls.all_reduce_add_rmsnorm(x, view, x[0], 1e-5, **named)
            with pytest.raises(ConfigError, match="other ranks store"):
                nvls.all_reduce_add_rmsnorm(x, x, view[0], 1e-5, **named)
        # The turn was not used up, and the slot not written to.
        assert nvls.all_reduce(view, workspace=workspace, algo="p2p").unique().tolist() == [1.0]


@ranks(2)
def test_an_operation_that_is_refused_uses_up_no_slot(rank: int) -> None:
    with opened(1 << 14) as workspace:
        x = torch.full((8,), float(rank))
        named: dict[str, Any] = {"workspace": workspace, "algo": "p2p"}
        last = nvls.all_gather_into_tensor(x, copy=False, **named)
        for _ in range(3):
            # Three, so that the slots that they would have used are not those of a whole round.
            for operation, algo in (
                (nvls.all_reduce, "p2p"),
                (nvls.reduce_scatter_tensor, "lamport"),
                (nvls.reduce_scatter_tensor, "p2p"),
            ):
                options = {"workspace": workspace, "algo": algo}
                refused(ConfigError, "not handed out", operation, last, **options)
            # Another rank may still read the last result, and has not been waited for.
            view = nvls.all_gather_into_tensor(x, copy=False, **named)
            assert view.data_ptr() != last.data_ptr()
            assert view.tolist() == [0.0] * 8 + [1.0] * 8
            last = view
        refused(ConfigError, "not handed out", nvls.all_reduce, last, **named)
        addends = workspace.empty((8,), x.dtype).copy_(x)
        assert addends.data_ptr() != last.data_ptr()
        assert nvls.all_reduce(addends, **named).tolist() == [1.0] * 8


@ranks(2)
def test_torch_reduces_a_copy_of_what_lies_where_other_ranks_store(rank: int) -> None:
    """A rank that has its segment may store into the slot from which this one still sends."""
    with opened(1 << 14) as workspace:
        from pcomm.nvls import references

        begin, end = workspace.own_range
        named: dict[str, Any] = {"workspace": workspace, "algo": "dist"}
        for operation, counts in (
            (nvls.reduce_scatter_tensor, ()),
            (nvls.reduce_scatter_v, ([2, 2],)),
        ):
            name = operation.__name__
            view = workspace.empty((4, 8), torch.float32).fill_(rank)
            with mock.patch.object(references, name, wraps=getattr(references, name)) as passed_on:
                assert operation(view, *counts, **named).unique().tolist() == [1.0]
            assert not begin <= passed_on.call_args.args[0].data_ptr() < end


@ranks(2)
def test_rows_of_8_bits_over_the_addends_that_they_are_made_of(rank: int) -> None:
    with opened(1 << 14) as workspace:
        random = torch.Generator().manual_seed(rank)
        x = torch.randn(8, 128, generator=random).bfloat16()
        residual, weight = torch.zeros(4, 128).bfloat16(), torch.ones(128).bfloat16()
        named: dict[str, Any] = {"workspace": workspace, "fp8": "rows"}
        expected = nvls.reduce_scatter_add_rmsnorm_all_gather(
            x, residual, weight, 1e-5, algo="dist", **named
        )
        for start in (0, x.numel()):
            passed = x.clone()
            out = passed.view(torch.float8_e4m3fn).view(-1)[start : start + x.numel()]
            out = out.view(x.shape)
            found = nvls.reduce_scatter_add_rmsnorm_all_gather(
                passed, residual, weight, 1e-5, out=out, algo="p2p", **named
            )
            assert found.rows is out
            assert torch.equal(out.view(torch.uint8), expected.rows.view(torch.uint8))
            assert torch.equal(found.residual, expected.residual)


@ranks(2)
def test_results_of_any_strides_and_none_that_share_elements(rank: int) -> None:
    with opened(1 << 14, deterministic=True) as workspace:
        number = torch.full((8,), complex(rank, 1 + rank))
        one, integers = torch.ones(16), torch.ones(16, dtype=torch.int64)
        for algo in ("lamport", "p2p", "dist"):
            named: dict[str, Any] = {"workspace": workspace, "algo": algo}
            conjugated = torch.zeros(16, dtype=number.dtype).conj()
            nvls.all_gather_into_tensor(number, out=conjugated, **named)
            assert conjugated.tolist() == [1j] * 8 + [1 + 2j] * 8
            leaf = torch.zeros(16, 2, requires_grad=True)
            nvls.all_reduce(one, out=leaf[:, 0], **named)
            assert leaf.tolist() == [[2.0, 0.0]] * 16
            with pytest.raises(LayoutError, match="one place in memory"):
                nvls.all_reduce(one, out=torch.zeros(1).expand(16), **named)
            inside = workspace.empty((17,), one.dtype)[1:]
            refused(ConfigError, "other ranks read", nvls.all_reduce, one, out=inside, **named)
        # Without a kernel, too, and in rank order.
        with pytest.raises(LayoutError, match="a result of shape"):
            nvls.all_reduce(integers, out=torch.zeros(16), workspace=workspace)
        with pytest.raises(LayoutError, match="a result of shape"):
            nvls.all_reduce(integers, out=integers.expand(2, 16).clone(), workspace=workspace)


@ranks(2)
def test_an_opening_that_fails_leaves_nothing_mapped(rank: int) -> None:
    from pcomm.core.errors import DivergenceError

    before = shared_mappings()
    emulate()
    from pcomm.nvls.policy.table import Table

    table = Table()
    fewer = Table(table.bands[:-1])
    refused(DivergenceError, "policy", opened, 1 << 14, table=fewer if rank else table)
    assert not shared_mappings() - before
    for wrong in ({"timeout_s": float("inf")}, {"timeout_s": float("nan")}, {"slots": 1.5}):
        refused(ConfigError, next(iter(wrong)), opened, 1 << 14, **wrong)
    refused(ConfigError, "as an integer", opened, 1 << 14, lamport_bytes=1e4)
