"""The stream on which the operations of a workspace run, and whether it is captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

__all__ = ["CudaStream", "DeviceStream", "NoStream", "stream_of"]


class DeviceStream(Protocol):
    """What launches ask about the device; a test can describe any state of it so."""

    def current(self) -> int:
        """Handle of the current stream."""
        ...

    def is_captured(self) -> bool:
        """Whether a CUDA graph records the current stream."""
        ...

    def wait_for(self, handle: int) -> None:
        """Has the current stream wait for all that another one has so far."""
        ...

    def is_current_device(self) -> bool:
        """Whether launches go to the device now."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one."""
        ...


class CudaStream:
    """The current stream of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._index = index
        # What torch's compiler calls; torch.cuda.current_stream makes an object each time.
        self._raw: Callable[[int], int] | None
        self._raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def current(self) -> int:
        """Handle of the current stream."""
        if self._raw is not None:
            return self._raw(self._index)
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def is_captured(self) -> bool:
        """Whether a CUDA graph records the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def wait_for(self, handle: int) -> None:
        """Has the current stream wait for all that another one has so far."""
        other = torch.cuda.ExternalStream(handle, device=self._index)
        torch.cuda.current_stream(self._index).wait_stream(other)

    def is_current_device(self) -> bool:
        """Whether launches go to the device now."""
        return torch.cuda.current_device() == self._index

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one."""
        return torch.cuda.device(self._index)


class NoStream:
    """A CPU: everything happens at once, and no graph records it."""

    def current(self) -> int:
        """0."""
        return 0

    def is_captured(self) -> bool:
        """False."""
        return False

    def wait_for(self, handle: int) -> None:
        """Does nothing."""

    def is_current_device(self) -> bool:
        """True."""
        return True

    def on_device(self) -> AbstractContextManager[object]:
        """Changes nothing."""
        return nullcontext()


def stream_of(device: torch.device) -> DeviceStream:
    """What launches on a device ask. Local."""
    return CudaStream(device) if device.type == "cuda" else NoStream()
