"""The likeliest tokens of each row, without sorting the vocabulary."""

# Shape suffixes: R rows, V vocabulary, C candidates of a row.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["candidates", "least_of_top", "likeliest_first"]

# Tokens of which only the largest logit is looked at in a first pass, at most; and blocks for each
# token that is wanted, at least, so that few others come along.
_LARGEST_BLOCK, _BLOCKS_PER_TOKEN = 64, 8


def least_of_top(x_RV: Tensor, numbers: Sequence[int]) -> Tensor:
    """`[R]`, for each row a number that at least so many of its tokens reach. Local.

    The maxima of blocks of tokens are tokens, too: as many of the row reach the k-th largest
    maximum. So all but one read of the logits is on a fraction of them.

    Args:
        x_RV: Logits.
        numbers: Number of tokens wanted of each row; all of them where it is 0.
    """
    vocabulary = x_RV.shape[1]
    wanted = [min(number, vocabulary) for number in numbers]
    block = min(vocabulary // (_BLOCKS_PER_TOKEN * max(wanted)), _LARGEST_BLOCK)
    if block > 1:
        # Tokens behind the last whole block may only raise the bound, which stays one.
        whole = vocabulary // block * block
        x_RV = x_RV[:, :whole].unflatten(1, (-1, block)).amax(-1)
    top_RK = x_RV.topk(max(wanted)).values
    last_R = torch.tensor([max(number - 1, 0) for number in wanted], device=x_RV.device)
    all_R = torch.tensor([number == 0 for number in wanted], device=x_RV.device)
    least_R = top_RK.gather(1, last_R[:, None])[:, 0]
    return least_R.masked_fill_(all_R, -torch.inf)


def candidates(x_RV: Tensor, least_R: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row that reach its bound, in the order of their ids. Local.

    Args:
        x_RV: Logits; minus infinity for tokens that are not there.
        least_R: Least logit of a candidate.

    Returns:
        int64 ids `[R, C]` and their logits `[R, C]`, C that of the row with most of them, and at
        least 1. Behind the last candidate of a row stand id 0 and minus infinity.
    """
    keep_RV = x_RV >= least_R[:, None].clamp(min=torch.finfo(x_RV.dtype).min)
    counts_R = keep_RV.sum(1)
    size = (len(x_RV), max(int(counts_R.max()), 1))
    rows, ids = keep_RV.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=rows.device) - (counts_R.cumsum(0) - counts_R)[rows]
    ids_RC = torch.zeros(size, dtype=torch.int64, device=x_RV.device)
    ids_RC[rows, places] = ids
    x_RC = torch.full(size, -torch.inf, dtype=x_RV.dtype, device=x_RV.device)
    x_RC[rows, places] = x_RV[rows, ids]
    return ids_RC, x_RC


def likeliest_first(ids_RC: Tensor, x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates sorted by their logits, equal ones by their ids. Local.

    Args:
        ids_RC: Token ids, ascending in each row up to its last candidate.
        x_RC: Their logits; minus infinity behind the last candidate.
    """
    # Ids ascend, and a stable sort keeps their order among equals.
    x_RC, order_RC = x_RC.sort(dim=1, descending=True, stable=True)
    return ids_RC.gather(1, order_RC), x_RC
