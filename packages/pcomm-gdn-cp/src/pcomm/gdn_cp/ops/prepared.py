"""Index tensors of the cores, made before a layer needs them."""

from __future__ import annotations

import torch

from pcomm.gdn_cp.ops.causal_conv1d import boundary_indices
from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout, default_chunk
from pcomm.gdn_cp.ops.flash_linear_attention import filled_sequences
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets

__all__ = ["prepare_convolution", "prepare_recurrence"]


def prepare_convolution(offsets: PackOffsets, width: int, device: torch.device) -> None:
    """Make what a causal convolution of `width` taps derives from `offsets`. Local."""
    offsets.derived(boundary_indices, width, device)


def prepare_recurrence(
    offsets: PackOffsets, key_dim: int, device: torch.device, chunk: int | None
) -> None:
    """Make what a recurrence derives from `offsets`. Local.

    Args:
        offsets: Offsets of the sequences that the core sees; they keep the tensors.
        key_dim: Number of rows of the state of a head.
        device: Device of the core.
        chunk: Tokens of a chunk; the default of the cores if None.

    Raises:
        ConfigError: A chunk without tokens.
    """
    layout = ChunkLayout.of(offsets, default_chunk(key_dim) if chunk is None else chunk)
    layout.indices(device)
    offsets.derived(filled_sequences, device)
