"""A recurrence over packed sequences, one token after the other: what both definitions share."""

# T tokens, N sequences, H heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["token_by_token"]


def token_by_token(
    asked: str,
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor],
    offsets: PackOffsets,
    like_THV: Tensor,
    key_dim: int,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens, `[T, H, V]`, and the state after each sequence, `[N, H, K, V]`.

    Args:
        asked: Name of the call, for the error.
        step: Maps a state, `[1, H, K, V]`, and a row of each of `tokens` to an output and a state.
        tokens: `[T, ...]` each.
        offsets: Offsets of the sequences.
        like_THV: `[T, H, V]`, which gives heads, value dim, dtype and device.
        key_dim: Number of rows of the state of a head.
        initial_state: `[N, H, K, V]`; zeros if None.

    Raises:
        ConfigError: A state of another shape.
    """
    shape = (len(offsets) - 1, like_THV.shape[1], key_dim, like_THV.shape[2])
    if initial_state is None:
        initial_state = like_THV.new_zeros(shape, dtype=compute_dtype(like_THV))
    check_shape(f"{asked}: initial_state", initial_state, shape)
    initial_state = initial_state.to(compute_dtype(like_THV))
    outputs, states = [like_THV[:0]], [initial_state[:0]]
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        state = initial_state[sequence : sequence + 1]
        for token in range(start, stop):
            output, state = step(state, *(x[token : token + 1] for x in tokens))
            outputs.append(output)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)
