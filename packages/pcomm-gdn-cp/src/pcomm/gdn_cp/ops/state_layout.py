"""States of sequences, from the shape that callers have to the one of the scans.

Callers have `[N, H, K, V]` in the order of the pack. The scans want the longest sequence first, and
the value heads of a key head side by side behind the key dimension, `[N, G, K, R, V]`.
"""

# N sequences, H value heads, G key heads, R value heads for each key head, K key dim, V value dim

from __future__ import annotations

from torch import Tensor

from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout
from pcomm.gdn_cp.ops.input_checks import check_shape

__all__ = ["state_for_scan", "state_for_user"]


def state_for_scan(
    asked: str,
    state_NHKV: Tensor | None,
    layout: ChunkLayout,
    like: Tensor,
    num_groups: int,
    key_dim: int,
) -> Tensor:
    """The state before each sequence as the scans take it, zeros where there is none.

    Args:
        asked: Name of the call, for the error.
        state_NHKV: `[N, H, K, V]` in the order of the pack, or nothing.
        layout: Chunks of the pack.
        like: `[M, G, R, C, V]` values: their dtype and device are the scan's.
        num_groups: `G`.
        key_dim: `K`.

    Returns:
        `[N, G, K, R, V]`, longest sequence first.

    Raises:
        ConfigError: The state has another shape.
    """
    num_repeats, width = like.shape[2], like.shape[-1]
    num_sequences = layout.num_sequences
    if state_NHKV is None:
        return like.new_zeros(num_sequences, num_groups, key_dim, num_repeats, width)
    shape = (num_sequences, num_groups * num_repeats, key_dim, width)
    check_shape(f"{asked}: initial_state", state_NHKV, shape)
    state = state_NHKV.to(like.dtype)
    if num_sequences > 1:
        state = state.index_select(0, layout.indices(like.device).order_N)
    state = state.reshape(num_sequences, num_groups, num_repeats, key_dim, width)
    return state.transpose(2, 3).contiguous()


def state_for_user(state_NGKRV: Tensor, layout: ChunkLayout) -> Tensor:
    """`[N, H, K, V]` in the order of the pack: what `state_for_scan` undoes."""
    state = state_NGKRV.transpose(2, 3).flatten(1, 2)
    if layout.num_sequences > 1:
        return state.index_select(0, layout.indices(state.device).rank_N)
    return state.contiguous()
