"""A GPU and peers that do not exist: the whole way of the host to a launch, and no launch.

Kernels are compiled for the device that is claimed; the driver call itself does nothing. For tests
of what the host does, and for its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

from pcomm.core.control.votes import Vote
from pcomm.core.groups.group import Group
from pcomm.nvls.hardware.rank_facts import RankFacts
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["FakeStream", "fake_driver", "fake_workspace"]

STREAM = 7
_BEFORE = 5


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


class _Utilities:
    """Loads nothing, and says that there is room for everything."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class _Driver:
    """What Triton asks of a driver; see `fake_driver`."""

    def __init__(self, capability: int, launches: list[tuple[Any, ...]] | None) -> None:
        self.utils, self._target = _Utilities(), GPUTarget("cuda", capability, 32)
        self._launches = launches

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        launches = self._launches
        if launches is None:
            return _do_nothing

        def note(grid: int, y: int, z: int, stream: int, *rest: Any) -> None:
            # The function, its metadata and two hooks come before the arguments.
            values = (
                value.data_ptr() if isinstance(value, torch.Tensor) else value
                for value in rest[_BEFORE:]
            )
            launches.append((source.fn.fn.__name__, grid, stream, *values))

        return note


def _do_nothing(*arguments: Any) -> None:
    return None


@contextmanager
def fake_driver(
    capability: int = 90, launches: list[tuple[Any, ...]] | None = None
) -> Iterator[None]:
    """Have Triton of this process launch into nothing. Local.

    Kernels must not be interpreted.

    Args:
        capability: Architecture that kernels are compiled for, 90 for Hopper.
        launches: List that gets the name of each kernel, number of blocks, stream, and
            arguments with addresses for tensors;
            None for nothing, at no cost.
    """
    config = triton.runtime.driver
    before = config._active
    config.set_active(_Driver(capability, launches))
    try:
        yield
    finally:
        config._active = before


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
    """A device of an architecture; see `Probe`."""

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
