"""Which parameters are summed together: in reverse order, as backward reaches them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["deal_out"]


def deal_out(
    params: Sequence[SyncedParam], bucket_bytes: int, full_degree: int
) -> list[list[SyncedParam]]:
    """Parameters of each bucket, in the order in which buckets are started. Local.

    Equal on all ranks of a stage: sizes are those of a shard at the full degree, and a bucket is
    closed as soon as it has `bucket_bytes`. Gradients and sums of a bucket have one type.

    Args:
        params: Parameters in the order of the model.
        bucket_bytes: Size of a bucket, in bytes of the sum.
        full_degree: Number of ranks over which split parameters lie in a whole replica.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[int, SyncedParam]]] = {}
    filled: list[list[tuple[int, SyncedParam]]] = []
    sizes: dict[object, int] = {}
    for turn, param in enumerate(reversed(params)):
        key = param.grad_dtype, param.reduce_dtype, param.parameter.device
        own = kinds.setdefault(key, [])
        own.append((turn, param))
        num_bytes = param.logical_shape.numel() * param.reduce_dtype.itemsize
        sizes[key] = sizes.get(key, 0) + num_bytes // (full_degree if param.units else 1)
        if sizes[key] >= bucket_bytes:
            filled.append(kinds.pop(key))
            sizes[key] = 0
    filled += kinds.values()
    # One is complete when its last gradient arrives.
    filled.sort(key=lambda own: own[-1][0])
    return [[param for _, param in own] for own in filled]
