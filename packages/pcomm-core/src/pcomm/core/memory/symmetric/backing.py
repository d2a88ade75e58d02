"""What is different between kinds of symmetric memory: how it is made, mapped and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["Backing"]


class Backing(Protocol):
    """Symmetric memory of one kind, opened in two phases with an agreement of all ranks after each.

    Attributes:
        name: Name of the kind, such as `"shm"`.
        device: Device of the tensors.
        buffer_ptrs: Address of the buffer of each rank, in this process; from `rendezvous` on.
        signal_pad_ptrs: Address of the signal pad of each rank, likewise.
        multicast_ptr: Address at which a store reaches all buffers; None where there is none.
    """

    name: str
    device: torch.device
    buffer_ptrs: tuple[int, ...]
    signal_pad_ptrs: tuple[int, ...]
    multicast_ptr: int | None

    def allocate(self) -> str:
        """Allocate what this rank contributes. Local; returns a text for all ranks."""
        ...

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Map the memory of all ranks, of which `texts` has what `allocate` returned. Collective.

        After it the signal pad of this rank is zero.
        """
        ...

    def finish(self) -> None:
        """Give back what only `rendezvous` of other ranks needed. Local, when all are through."""
        ...

    def buffer(self, rank: int) -> torch.Tensor:
        """The buffer of a rank: uint8, `[num_bytes]`. It keeps the memory mapped. Local."""
        ...

    def signal_pad(self, rank: int) -> torch.Tensor:
        """The signal pad of a rank: int32, `[signal_bytes // 4]`. It keeps the memory mapped."""
        ...

    def quiesce(self) -> None:
        """Return when the device has done all that it was given. Local."""
        ...

    def release(self) -> None:
        """Drop all references to the memory, also of a half-opened one. Local; never raises."""
        ...
