"""An embedding and a cross-entropy over a vocabulary that is split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import FastModule
from pcomm.core.tensor_parallel.split import (
    ParamLayout,
    add_up,
    check_ids,
    check_partition,
    check_rank_order,
    empty_parameters,
    first_position,
    leave,
    scatter_tokens,
    take_parameters,
)

__all__ = ["VocabularyParallelEmbedding", "vocabulary_parallel_cross_entropy"]


# Shape suffixes: T tokens, V vocabulary, D width; t, v one rank's shard.


class VocabularyParallelEmbedding(FastModule):
    """Rows of a table, looked up on the rank that holds them and summed over all.

    On one rank this is `F.embedding` and nothing else. Otherwise collective: an all-reduce, or
    a reduce-scatter of tokens under sequence parallelism. Where no gradient is recorded the
    all-reduce is in place, without an `autograd.Function`.

    Args:
        layout: Layout of the V rows, in rank order.
        width: D, the number of columns.
        collectives: Collectives of the tensor-parallel group, without gradients.
        sequence_parallel: True if the output is this rank's shard of the tokens.
        check_ids: False trusts that ids are in the layout, for a caller that has checked them; one
            that is not gives a row of zeros.
        initialise: False allocates this rank's rows alone and leaves them as the memory was, for
            weights that are loaded; otherwise the whole table is allocated first.
        device: Device of the table.
        dtype: Data type of the table.

    Shape: `[T]` int64, the same on all ranks, to `[T, D]`, or `[T / size, D]` under sequence
    parallelism. Table `[v, D]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or not in rank order; when
            called, an id outside it (on a GPU a device assertion instead).
    """

    weight: nn.Parameter

    def __init__(
        self,
        layout: Layout,
        width: int,
        collectives: Collectives,
        *,
        sequence_parallel: bool = False,
        check_ids: bool = True,
        initialise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_partition("VocabularyParallelEmbedding", layout, collectives)
        check_rank_order("VocabularyParallelEmbedding", layout)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {"weight": ParamLayout(layout)}
        if initialise:
            whole = nn.Embedding(layout.length, width, device=device, dtype=dtype)
            take_parameters(self, whole, collectives.rank)
        else:
            shapes = {"weight": (layout.length, width)}
            empty_parameters(self, shapes, collectives.rank, device=device, dtype=dtype)
        if collectives.size == 1:
            self.run = _embedding
            return
        self._first = first_position(layout, collectives.rank)
        self._leave = scatter_tokens if sequence_parallel else leave
        self._scatters_tokens, self._checks_ids = sequence_parallel, check_ids
        self.run = type(self)._split

    def _split(self, ids_T: Tensor) -> Tensor:
        if self._checks_ids:
            check_ids("VocabularyParallelEmbedding", ids_T, self.layout)
        rows = self._own_rows(ids_T)
        if torch.is_grad_enabled():
            return self._leave(rows, self.collectives)
        return add_up(rows, self.collectives, scatters_tokens=self._scatters_tokens)

    def _own_rows(self, ids_T: Tensor) -> Tensor:
        """Rows that this rank holds, zero for tokens of other ranks."""
        table_vD = self.weight
        if not table_vD.shape[0]:
            # No row to look up, but still a part of the graph: the other ranks' backward waits.
            return table_vD.sum() + table_vD.new_zeros(*ids_T.shape, table_vD.shape[1])
        local_T = ids_T - self._first
        is_other_T = (local_T < 0) | (local_T >= table_vD.shape[0])
        rows_TD = F.embedding(local_T.masked_fill(is_other_T, 0), table_vD)
        return rows_TD.masked_fill(is_other_T.unsqueeze(-1), 0.0)


def _embedding(module: VocabularyParallelEmbedding, ids_T: Tensor) -> Tensor:
    try:
        return F.embedding(ids_T, module.__dict__["_parameters"]["weight"])
    except KeyError:
        # A parametrization has put something else in its place.
        return F.embedding(ids_T, module.weight)


# Shape suffixes: T tokens, V vocabulary; v one rank's shard.


_NAME = "vocabulary_parallel_cross_entropy"


def vocabulary_parallel_cross_entropy(
    logits_Tv: Tensor,
    targets_T: Tensor,
    layout: Layout,
    collectives: Collectives,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """Nats per token, the same on all ranks, from each rank's columns of the logits.

    Collective in forward only: two all-reduces of one and two numbers per token (largest logit; sum
    of exponentials and target's logit). On one rank nothing is sent, and few logits go through
    `F.cross_entropy`.

    Args:
        logits_Tv: This rank's columns, any floating dtype. They are computed in fp32 or wider, some
            tokens at a time, so that not all of them are ever there in that dtype.
        targets_T: int64, the same on all ranks; `ignore_index` gives zero loss and gradient.
        layout: Layout of the V columns, in rank order.
        collectives: Collectives of the tensor-parallel group, without gradients.
        ignore_index: Target of the tokens that do not count.

    Returns:
        `[T]`, fp32 or fp64.

    Raises:
        LayoutError: The layout is over another number of ranks, or not in rank order, or gives
            this rank another number of columns; a target outside it (on a GPU a device
            assertion instead).
    """
    check_partition(_NAME, layout, collectives)
    check_rank_order(_NAME, layout)
    if logits_Tv.shape[1] != layout.sizes[collectives.rank]:
        raise LayoutError(
            f"{_NAME}: logits of shape {tuple(logits_Tv.shape)}",
            found=f"a share of {layout.sizes[collectives.rank]} columns on rank {collectives.rank}",
            why="Each rank passes its own columns, which are never gathered.",
            fix="Pass the output of a ColumnParallelLinear over this layout, not gathered.",
        )
    dtype = torch.promote_types(logits_Tv.dtype, torch.float32)
    rows = _rows(logits_Tv, dtype)
    if collectives.size == 1 and len(targets_T) <= rows:
        wide_Tv = logits_Tv.to(dtype)
        return F.cross_entropy(wide_Tv, targets_T, reduction="none", ignore_index=ignore_index)
    check_ids(_NAME, targets_T, layout, ignored=ignore_index)
    first = first_position(layout, collectives.rank)
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_Tv, targets_T, first, collectives, ignore_index, dtype, rows
    )
    return loss


# Bytes of logits in fp32 or wider that are there at once. On a CPU they stay in its cache, in which
# the loss is faster than of whole logits; on a device a chunk is enough work for one launch.
_CPU_BYTES, _DEVICE_BYTES = 2**20, 2**27
# So many tokens at least, since each chunk is some calls of torch.
_LEAST_ROWS = 16


def _rows(logits_Tv: Tensor, dtype: torch.dtype) -> int:
    """How many tokens are computed at once, so that their logits in `dtype` are few bytes."""
    num_bytes = _CPU_BYTES if logits_Tv.device.type == "cpu" else _DEVICE_BYTES
    return max(_LEAST_ROWS, num_bytes // max(1, logits_Tv.shape[1] * dtype.itemsize))


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came, and two numbers of each token.

    Exponentials are computed again in backward, so that only those of one chunk are ever there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        targets_T: Tensor,
        first: int,
        collectives: Collectives,
        ignore_index: int,
        dtype: torch.dtype,
        rows: int,
    ) -> Tensor:
        num_tokens, num_own = logits_Tv.shape
        local_T = targets_T - first
        is_own_T = (local_T >= 0) & (local_T < num_own) & (targets_T != ignore_index)
        own_T = local_T.masked_fill(~is_own_T, 0)
        # Of this rank's columns: the largest logit, the sum of exponentials, the target's logit. A
        # rank whose logits are all minus infinity still has a number to subtract.
        least = torch.finfo(dtype).min
        own_largest_T = logits_Tv.new_full((num_tokens,), least, dtype=dtype)
        sums_2T = logits_Tv.new_zeros((2, num_tokens), dtype=dtype)
        room_Rv = logits_Tv.new_empty((min(rows, num_tokens), num_own), dtype=dtype)
        # Where there is no column there is no target to look up either.
        for part in _chunks(num_tokens if num_own else 0, rows):
            own_Rv = logits_Tv[part]
            largest_R = own_Rv.amax(-1).to(dtype).clamp_min_(least)
            target_R = own_Rv.gather(-1, own_T[part].unsqueeze(-1)).squeeze(-1)
            wide_Rv = torch.sub(own_Rv, largest_R.unsqueeze(-1), out=room_Rv[: len(own_Rv)])
            torch.sum(wide_Rv.exp_(), -1, out=sums_2T[0, part])
            own_largest_T[part], sums_2T[1, part] = largest_R, target_R
        largest_T = collectives.all_reduce(own_largest_T, op="max")
        sums_2T[0] *= (own_largest_T - largest_T).exp_()
        # Before the logarithm: a small loss is lost when the largest logit is added to that first.
        sums_2T[1] = (sums_2T[1] - largest_T).masked_fill_(~is_own_T, 0.0)
        sums_2T = collectives.all_reduce(sums_2T)
        is_ignored_T = targets_T == ignore_index
        loss_T = sums_2T[0].log() - sums_2T[1]
        ctx.size, ctx.rows = collectives.size, rows
        ctx.save_for_backward(logits_Tv, largest_T, sums_2T[0], own_T, is_own_T, is_ignored_T)
        return loss_T.masked_fill_(is_ignored_T, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{_NAME}: backward with create_graph=True",
                found=f"logits over {ctx.size} rank(s), computed {ctx.rows} tokens at a time",
                why="Backward keeps two sums of each token, through which no gradient would pass.",
                fix="Take second derivatives of F.cross_entropy, or of another loss.",
            )
        logits_Tv, largest_T, sum_T, own_T, is_own_T, is_ignored_T = ctx.saved_tensors
        slope_T = gradients[0].masked_fill(is_ignored_T, 0.0)
        scale_T = slope_T / sum_T
        at_target_T1 = slope_T.masked_fill_(~is_own_T, 0.0).neg_().unsqueeze(-1)
        result_Tv, dtype = torch.empty_like(logits_Tv), sum_T.dtype
        is_wide = logits_Tv.dtype == dtype
        shape_Rv = (0 if is_wide else min(ctx.rows, len(sum_T)), logits_Tv.shape[1])
        room_Rv = logits_Tv.new_empty(shape_Rv, dtype=dtype)
        for part in _chunks(len(sum_T) if logits_Tv.shape[1] else 0, ctx.rows):
            own_Rv, place_Rv = logits_Tv[part], result_Tv[part]
            wide_Rv = place_Rv if is_wide else room_Rv[: len(own_Rv)]
            torch.sub(own_Rv, largest_T[part].unsqueeze(-1), out=wide_Rv)
            wide_Rv.exp_().mul_(scale_T[part].unsqueeze(-1))
            wide_Rv.scatter_add_(-1, own_T[part].unsqueeze(-1), at_target_T1[part])
            if not is_wide:
                place_Rv.copy_(wide_Rv)
        return result_Tv, None, None, None, None, None, None


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, num_tokens, rows)]
