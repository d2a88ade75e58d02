"""A workspace whose device and peers do not exist, for tests of what the host does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

from core_support.fake_driver import STREAM
from pcomm.core.control.control import Vote
from pcomm.core.groups.group import Group
from pcomm.nvls._capability import RankFacts
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["FakeStream", "fake_workspace"]


class FakeStream:
    """A stream whose state a test sets; see `DeviceStream`.

    Attributes:
        handle: Handle of the current stream.
        captured: True if a graph records it.
        waits: Handle of a stream and of that which it waits for, once for each wait.
    """

    def __init__(self) -> None:
        self.handle, self.captured = STREAM, False
        self.waits: list[tuple[int, int]] = []

    def current(self) -> int:
        """`handle`."""
        return self.handle

    def is_captured(self) -> bool:
        """`captured`."""
        return self.captured

    def wait_for(self, handle: int) -> None:
        """Goes into `waits`."""
        self.waits.append((self.handle, handle))

    def is_current_device(self) -> bool:
        """True."""
        return True

    def on_device(self) -> AbstractContextManager[object]:
        """Changes nothing."""
        return nullcontext()


class _Echo:
    """A control whose other ranks say what this one says."""

    def __init__(self, size: int) -> None:
        self._size = size

    def among(self, ranks: Sequence[int]) -> _Echo:
        return self

    def agree(self, topic: str, lines: Sequence[str], **options: Any) -> None:
        if options.get("error") is not None:
            raise options["error"]

    def vote(self, topic: str, value: int, reason: str = "", **options: Any) -> Vote:
        if options.get("error") is not None:
            raise options["error"]
        return Vote(value, (value,) * self._size, (reason,) * self._size)


class _Claim:
    """A device of an architecture; see `RankProbe`."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def facts(self, device: torch.device) -> RankFacts:
        return RankFacts(
            is_cuda=True,
            triton=triton.__version__,
            domain="one",
            compute_capability=divmod(self._capability, 10),
            has_multicast=True,
        )


def fake_workspace(
    size: int = 8, max_bytes: int = 1 << 20, *, capability: int = 90, **options: Any
) -> Workspace:
    """A workspace of the first of ranks that do not exist, with tensors on the CPU. Local.

    Args:
        size: Number of ranks.
        max_bytes: Size of the largest tensor, in bytes.
        capability: Architecture of the device that is claimed.
        options: Further arguments of `Workspace`.
    """
    group = Group("tp", tuple(range(size)), None)
    control: Any = _Echo(size)
    return Workspace(
        group,
        max_bytes,
        device=torch.device("cpu"),
        control=control,
        probe=_Claim(capability),
        stream=options.pop("stream", FakeStream()),
        **options,
    )
