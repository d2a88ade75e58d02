"""A GPU that does not exist: Triton compiles for it, and each launch is checked and not made.

For tests of what the host does until a kernel starts, of any package, and for its time.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import mangle_type  # type: ignore[import-untyped]

__all__ = ["STREAM", "binary_resources", "fake_driver"]

STREAM = 7
_FIRST_FUNCTION = 0x7F0000000000
# Numbers that no device of the machine has. None is used twice, as the address of a driver would be
# when the one before has ended.
_DEVICES = itertools.count(1 << 20)
# Shared memory that a block may ask for, in bytes, by architecture (CUDA C++ Programming Guide,
# Compute Capabilities); registers of a multiprocessor, and how many a warp takes at a time.
_MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
_REGISTERS, _REGISTERS_AT_A_TIME = 1 << 16, 256


class _Utilities:
    """Loads nothing; says what a device of the architecture has, and what a kernel needs of it."""

    def __init__(self, capability: int) -> None:
        self.loading: _CheckedLauncher | None = None
        self._num_loaded, self._most_shared = 0, _MOST_SHARED[capability]

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        self._num_loaded += 1
        function = _FIRST_FUNCTION + 16 * self._num_loaded
        registers, most_threads = 0, 1024
        if self.loading is not None:
            # Triton makes the launcher of a kernel, and then loads that kernel.
            self.loading.function = function
            registers, most_threads = _registers_and_threads(binary)
        return function - 8, function, registers, 0, most_threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._most_shared,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }


class _Driver:
    """What Triton asks of a driver; see `fake_driver`."""

    def __init__(self, capability: int, launches: list[tuple[Any, ...]] | None) -> None:
        self.utils, self._target = _Utilities(capability), GPUTarget("cuda", capability, 32)
        self._launches, self._device = launches, next(_DEVICES)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps kernels by device: those of another driver, or of a real GPU, are not found.
        return self._device

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        if self._launches is None:
            return self._do_nothing
        self.utils.loading = _CheckedLauncher(source, metadata, self._launches)
        return self.utils.loading

    def _do_nothing(self, *arguments: Any) -> None:
        return None


@cache
def binary_resources(binary: bytes) -> dict[str, int]:
    """Registers of a thread as REG; bytes of STACK and LOCAL, to which those go that do not fit."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command: list[str | Path] = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", told)}


def _registers_and_threads(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and the most threads of a block that there are registers for."""
    registers = binary_resources(binary)["REG"]
    of_warp = -(-32 * registers // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
    return registers, min(1024, _REGISTERS // of_warp * 32)


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
    A kernel that needs more shared memory, threads or registers than a block of the architecture
    may have is Triton's own OutOfResources.

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
