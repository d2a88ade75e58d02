"""Attention of rows that read the same keys: torch's own, or by scores that are changed."""

# Shape suffixes: N requests of one call, H query heads, G key and value heads, M rows for each key
# head, L keys, K width of a key, V width of a value.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.inference.attention.plan import rounded_rows

__all__ = ["PLAIN", "Softmax", "attend_rows"]


class Softmax(NamedTuple):
    """How scores become weights: what `paged_attention` is given beside tensors and places."""

    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    alibi_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention computes it."""
        return self.softcap is None and self.sinks_H is None and self.alibi_H is None


PLAIN = Softmax()


def attend_rows(
    q_NGMK: Tensor,
    k_NGLK: Tensor,
    v_NGLV: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    places: Tensor | None,
    rows_per_token: int,
) -> Tensor:
    """`[N, G, M, V]`: torch's attention, in a call with `rounded_rows` rows.

    Queries that read one key head are rows of one matrix. The mask has as many rows as the call, or
    one for all. So have `places`, those of the tokens among the L keys, which slopes need.
    """
    num_rows, width, value_width = q_NGMK.shape[2], q_NGMK.shape[3], v_NGLV.shape[3]
    num_added = rounded_rows(num_rows, q_NGMK.dtype) - num_rows
    if num_added:
        q_NGMK = F.pad(q_NGMK, (0, 0, 0, num_added))
    scale = width**-0.5 if softmax.scale is None else softmax.scale
    if not softmax.is_plain:
        mixed = _attend_by_scores(
            q_NGMK, k_NGLK, v_NGLV, mask, softmax, scale, places, rows_per_token
        )
    elif width == value_width:
        mixed = F.scaled_dot_product_attention(q_NGMK, k_NGLK, v_NGLV, mask, scale=softmax.scale)
    else:
        # Torch has a fast way on a CPU, whose bits are known, for keys and values of one width.
        both = max(width, value_width)
        q_NGMK, k_NGLK, v_NGLV = (
            F.pad(one, (0, both - one.shape[3])) for one in (q_NGMK, k_NGLK, v_NGLV)
        )
        mixed = F.scaled_dot_product_attention(q_NGMK, k_NGLK, v_NGLV, mask, scale=scale)
        mixed = mixed[..., :value_width]
    return mixed[:, :, :num_rows] if num_added else mixed


def _attend_by_scores(
    q_NGMK: Tensor,
    k_NGLK: Tensor,
    v_NGLV: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    scale: float,
    places: Tensor | None,
    rows_per_token: int,
) -> Tensor:
    """`[N, G, M, V]` by the scores themselves, which torch's attention does not show.

    In fp32 where queries have 16 bits: scores of 50, as they are with a cap, would be rounded to
    quarters.
    """
    given = q_NGMK.dtype
    dtype = torch.float32 if given.itemsize == 2 else given
    q_NGMK, k_NGLK, v_NGLV = (one.to(dtype) for one in (q_NGMK, k_NGLK, v_NGLV))
    rows_M = torch.arange(q_NGMK.shape[2], device=q_NGMK.device) % rows_per_token

    def of_rows(numbers_H: Tensor) -> Tensor:
        numbers_GR = numbers_H.to(dtype).view(q_NGMK.shape[1], -1)
        return numbers_GR.index_select(1, rows_M).unsqueeze(2)

    scores_NGML = (q_NGMK @ k_NGLK.transpose(2, 3)).mul_(scale)
    if softmax.softcap is not None:
        scores_NGML.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    if softmax.alibi_H is not None:
        assert places is not None
        distances = torch.arange(k_NGLK.shape[2], device=q_NGMK.device) - places
        scores_NGML.addcmul_(of_rows(softmax.alibi_H), distances.to(dtype))
    if mask is not None:
        scores_NGML.add_(mask)
    largest_NGM1 = scores_NGML.amax(3, keepdim=True)
    if softmax.sinks_H is None:
        weights_NGML = scores_NGML.sub_(largest_NGM1).exp_()
        sums_NGM1 = weights_NGML.sum(3, keepdim=True)
    else:
        sinks_GM1 = of_rows(softmax.sinks_H)
        largest_NGM1 = torch.maximum(largest_NGM1, sinks_GM1)
        weights_NGML = scores_NGML.sub_(largest_NGM1).exp_()
        sums_NGM1 = weights_NGML.sum(3, keepdim=True) + (sinks_GM1 - largest_NGM1).exp()
    return (weights_NGML @ v_NGLV).div_(sums_NGM1).to(given)
