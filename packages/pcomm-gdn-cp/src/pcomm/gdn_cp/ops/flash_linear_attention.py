"""Packs for the Triton kernels of flash-linear-attention, on CUDA.

Written after the sources of version 0.6.0, and never run on hardware. Its `chunk_simple_gla` reads
the number of chunks from the device, once forward and twice backward, so the host waits there;
`chunk_gated_delta_rule` counts them on the host.
"""

# T tokens, N sequences, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets

__all__ = ["filled_sequences", "run_on_pack"]


def filled_sequences(
    offsets: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences with tokens, on `device`; and their offsets there and on the host.

    Kept by `PackOffsets.derived`, as the kernels find what they made of a tensor by its identity.
    """
    filled = [n for n, (a, b) in enumerate(pairwise(offsets)) if b > a]
    cut = torch.tensor([*dict.fromkeys(offsets)])
    return torch.tensor(filled, dtype=torch.int64).to(device), cut.to(device), cut


def run_on_pack(
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    offsets: PackOffsets,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What one of its operations returns for a pack; differentiable, also without tokens.

    Args:
        run: The operation.
        tensors: Queries, keys, `[T, H, K]`, values, `[T, H, V]`, and gates, as `run` takes them
            without the dimension of a batch; queries and keys may have fewer heads.
        offsets: Offsets of the sequences, which keep the index tensors.
        initial_state: `[N, H, K, V]`, the state before each sequence; zeros if None.

    Returns:
        `[T, H, V]`, and `[N, H, K, V]` in fp32.

    Raises:
        ConfigError: A state of another shape.
    """
    keys, values = tensors[1], tensors[2]
    shape = (len(offsets) - 1, values.shape[1], keys.shape[2], values.shape[2])
    if initial_state is None:
        initial_state = values.new_zeros(shape, dtype=torch.float32)
    check_shape("Kernels: initial_state", initial_state, shape)
    initial_state = initial_state.float()
    if not offsets[-1]:
        # Backward still passes here, on its way to collectives that every rank takes part in.
        nothing = sum(x.sum() for x in tensors)
        return values + nothing, initial_state + nothing
    # Sequences without tokens never reach the kernels; their states go around them.
    filled_N, cut, cut_on_host = offsets.derived(filled_sequences, values.device)
    output, final = run(
        *(x.unsqueeze(0) for x in tensors),
        scale=1.0,
        initial_state=initial_state.index_select(0, filled_N),
        output_final_state=True,
        cu_seqlens=cut,
        cu_seqlens_cpu=cut_on_host,
    )
    return output.squeeze(0), initial_state.index_copy(0, filled_N, final)
