"""The stream of the operations of a workspace, which take turns in its memory in stream order."""

from __future__ import annotations

import torch

from pcomm.core.errors import ConfigError

__all__ = ["StreamOrder"]


class StreamOrder:
    """The stream on which operations were enqueued so far. Local, without waiting.

    Operations that go into a CUDA graph are left alone: a graph is replayed on any stream.

    Args:
        device: Device of the workspace; a CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Go on on the current stream, which from now on is behind the operations so far."""
        current = self._current()
        if current is None:
            return
        if self._stream is not None and current.cuda_stream != self._stream.cuda_stream:
            current.wait_stream(self._stream)
        self._stream = current

    def next_is_captured(self) -> bool:
        """Whether the next operation goes into a CUDA graph.

        Raises:
            ConfigError: It does not, and the current stream is another than so far.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        current = self._current()
        if current is None:
            return False
        if self._stream is not None and current.cuda_stream != self._stream.cuda_stream:
            raise ConfigError(
                "an operation on a workspace",
                found="another stream than that of the operations before",
                why="Operations of one workspace take turns in its memory in stream order.",
                fix="Open a workspace for each stream, or use nvls_collectives, whose operations "
                "follow each other also from stream to stream.",
            )
        self._stream = current
        return False

    def _current(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        return torch.cuda.current_stream(self._device)
