"""The stream of the operations of a workspace, which take turns in its memory in stream order."""

from __future__ import annotations

from pcomm.core.errors import ConfigError
from pcomm.nvls.workspace.device_stream import DeviceStream

__all__ = ["StreamOrder"]


class StreamOrder:
    """The stream on which operations were enqueued so far. Local, without waiting.

    Operations that go into a CUDA graph are left alone: a graph is replayed on any stream.

    Args:
        stream: Source of the current stream of the device.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._last: int | None = None

    def follow(self) -> None:
        """Go on on the current stream, which from now on is behind the operations so far."""
        if self._stream.is_captured():
            return
        current, last = self._stream.current(), self._last
        if last is not None and current != last:
            self._stream.wait_for(last)
        self._last = current

    def same(self) -> int | None:
        """Handle of the current stream, if that is the one so far and no CUDA graph records it."""
        current = self._stream.current()
        return current if current == self._last and not self._stream.is_captured() else None

    def next_is_captured(self) -> bool:
        """Whether the next operation goes into a CUDA graph.

        Raises:
            ConfigError: It does not, and the current stream is another than so far.
        """
        stream = self._stream
        if stream.is_captured():
            return True
        current, last = stream.current(), self._last
        if last is None:
            self._last = current
        elif current != last:
            raise ConfigError(
                "an operation on a workspace",
                found="another stream than that of the operations before",
                why="Operations of one workspace take turns in its memory in stream order.",
                fix="Open a workspace for each stream, or use nvls_collectives, whose operations "
                "follow each other also from stream to stream.",
            )
        return False
