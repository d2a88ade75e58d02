"""A GPU and peers that do not exist: the whole way of the host to a launch, and no launch.

Kernels are compiled for the device that is claimed; the driver call itself does nothing. For tests
of what the host does, and for its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import mangle_type  # type: ignore[import-untyped]

from pcomm.core.control.control import Vote
from pcomm.core.groups.group import Group
from pcomm.nvls._capability import RankFacts
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["FakeStream", "fake_driver", "fake_workspace"]

STREAM = 7
_FIRST_FUNCTION = 0x7F0000000000


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

    def __init__(self) -> None:
        self.loading: _CheckedLauncher | None = None
        self._num_loaded = 0

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        self._num_loaded += 1
        function = _FIRST_FUNCTION + 16 * self._num_loaded
        if self.loading is not None:
            # Triton makes the launcher of a kernel, and then loads that kernel.
            self.loading.function = function
        return function - 8, function, 0, 0, 1024

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
        # Triton keeps kernels by device: those of another driver, or of a real GPU, are not found.
        return id(self)

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        if self._launches is None:
            return self._do_nothing
        self.utils.loading = _CheckedLauncher(source, metadata, self._launches)
        return self.utils.loading

    def _do_nothing(self, *arguments: Any) -> None:
        return None


class _CheckedLauncher:
    """The launcher of one kernel, which Triton has in C: refuses what that does, and more.

    That one takes an address of 0, numbers that it cuts off, and constants and alignments other
    than those that were compiled.
    """

    def __init__(self, source: Any, metadata: Any, launches: list[tuple[Any, ...]]) -> None:
        self.function: int | None = None
        self._source, self._launches = source, launches
        self._metadata = (metadata.num_warps, metadata.num_ctas, metadata.shared)

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: int,
        metadata: tuple[int, int, int],
        told: Any,
        enter: Callable[[Any], object] | None,
        leave: Callable[[Any], object] | None,
        *arguments: Any,
    ) -> None:
        name = self._source.fn.fn.__name__
        for place, (blocks, most) in enumerate(((x, (1 << 31) - 1), (y, 65535), (z, 65535))):
            if type(blocks) is not int or not 0 < blocks <= most:
                raise TypeError(f"{name}: dimension {place} of the grid is {blocks!r}")
        if type(stream) is not int or not 0 <= stream < 1 << 64:
            raise TypeError(f"{name}: the stream is {stream!r}")
        if type(function) is not int or function != self.function:
            raise TypeError(f"{name}: the function is {function!r}, loaded was {self.function!r}")
        if metadata != self._metadata or {type(number) for number in metadata} != {int}:
            raise TypeError(f"{name}: the metadata are {metadata!r}, not {self._metadata!r}")
        kinds = self._source.signature
        if len(arguments) != len(kinds):
            raise TypeError(f"{name}: {len(arguments)} arguments for {len(kinds)} parameters")
        for place, ((parameter, kind), value) in enumerate(
            zip(kinds.items(), arguments, strict=True)
        ):
            self._check(f"{name}({parameter})", (place,), kind, value)
        if enter is not None:
            enter(told)
        values = (value.data_ptr() if isinstance(value, Tensor) else value for value in arguments)
        self._launches.append((name, x, stream, *values))
        if leave is not None:
            leave(told)

    def _check(self, where: str, path: tuple[int, ...], kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            if not isinstance(value, tuple) or len(value) != len(kind):
                raise TypeError(f"{where}: {value!r} for {kind}")
            for place, parts in enumerate(zip(kind, value, strict=True)):
                self._check(f"{where}[{place}]", (*path, place), *parts)
            return
        if kind == "constexpr":
            constant = self._source.constants[path]
            if type(value) is not type(constant) or value != constant:
                raise TypeError(f"{where}: {value!r}, compiled for {constant!r}")
            return
        if kind.startswith("*"):
            if not isinstance(value, Tensor) or mangle_type(value) != kind or value.numel() == 0:
                raise TypeError(f"{where}: {value!r} for {kind}")
            value = value.data_ptr()
        elif kind.startswith(("fp", "bf")):
            if type(value) is not float:
                raise TypeError(f"{where}: {value!r} for {kind}")
            return
        else:
            bits = int(kind[1:])
            low, high = (0, 1 << bits) if kind[0] == "u" else (-1 << (bits - 1), 1 << (bits - 1))
            wanted = bool if bits == 1 else int
            if type(value) is not wanted or not (bits == 1 or low <= value < high):
                raise TypeError(f"{where}: {value!r} for {kind}")
        if self._source.attrs.get(path) == [["tt.divisibility", 16]] and value % 16:
            raise TypeError(f"{where}: {value} is no multiple of 16")


@contextmanager
def fake_driver(
    capability: int = 90, launches: list[tuple[Any, ...]] | None = None
) -> Iterator[None]:
    """Have Triton of this process launch into nothing. Local.

    Kernels must not be interpreted. With `launches`, a launch that Triton's own launcher would
    refuse is a TypeError: also an argument of another type, value or alignment than was compiled.

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
