"""Index tensors of the cores, made before any layer needs them."""

from __future__ import annotations

import torch

from pcomm.gdn_cp.ops.causal_conv1d import border_indices
from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout, default_chunk
from pcomm.gdn_cp.ops.flash_linear_attention import filled_sequences
from pcomm.gdn_cp.ops.offsets import PackOffsets
from pcomm.gdn_cp.specs import GdnSpec, Mamba2Spec

__all__ = ["prepare_cores"]


def prepare_cores(
    offsets: PackOffsets, spec: GdnSpec | Mamba2Spec, device: torch.device, chunk: int | None
) -> None:
    """Make what the convolution and the recurrence of a mixer derive from `offsets`. Local.

    Args:
        offsets: Of the sequences that the core sees; they keep the tensors.
        spec: The mixer.
        device: Where it computes.
        chunk: Tokens of a chunk; the default of the cores if None.

    Raises:
        ConfigError: A chunk without tokens.
    """
    _, key_dim, _ = spec.state_shape
    offsets.derived(border_indices, spec.conv_width, device)
    layout = ChunkLayout.of(offsets, default_chunk(key_dim) if chunk is None else chunk)
    with torch.inference_mode(False):
        layout.indices(device)
    offsets.derived(filled_sequences, device)
