"""Whether a micro-batch can be in memory at all, before anything is tokenised or built."""

from __future__ import annotations

import os

import torch

from pcomm.core.errors import ConfigError
from pcomm.integration.config_resolved import Resolved

__all__ = ["check_batch_memory", "largest_memory"]

# The id of each token and of the one after it.
_HOST_BYTES = 2 * 8
# A block has what comes in and what goes out.
_HIDDEN_STATES = 2
_GIB = 2**30


def largest_memory(device: torch.device) -> int:
    """Bytes that no rank can have more of, used or not: those of its host or GPU. Local."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_batch_memory(config: Resolved, memory_bytes: int) -> None:
    """Refuse a micro-batch of which a part is larger than all memory. Local.

    What is counted is the least: token ids, and the hidden states at both ends of one block. What
    passes may still be too large, once weights and what backward needs come to it.

    Args:
        config: The configuration.
        memory_bytes: Bytes of `largest_memory`.

    Raises:
        ConfigError: The micro-batch is larger; names the most tokens that are not.
    """
    train, parallel = config.train, config.parallel
    sharers = parallel.cp * (parallel.tp if parallel.sequence else 1)
    number = 2 if train.dtype == "bf16" else 4
    per_token = _HOST_BYTES + _HIDDEN_STATES * config.model.width * number / sharers
    tokens = train.micro_batch_tokens
    if (needed := tokens * per_token) <= memory_bytes:
        return
    most = int(memory_bytes / per_token)
    is_row = train.sequence_length > most
    raise ConfigError(
        "train.sequence_length" if is_row else "train.micro_batch_tokens",
        found=f"{train.sequence_length if is_row else tokens} tokens; {tokens} at once take at "
        f"least {needed / _GIB:.1f} GiB on each rank, and it has {memory_bytes / _GIB:.1f} GiB",
        why="A rank computes a micro-batch of whole rows at once: their token ids, and the hidden "
        f"states at both ends of a block of width {config.model.width}.",
        fix=f"Set train.sequence_length far below {most}, and train.global_batch_tokens to a "
        "multiple of it."
        if is_row
        else f"Set train.micro_batch_tokens far below {most}, to a multiple of "
        f"train.sequence_length = {train.sequence_length}.",
    )
