"""Launches kernels at little cost to the host: what was compiled is found by itself.

Triton derives on each launch which variant of a kernel its arguments need, from the types of all
arguments, the size and divisibility of integers and the alignment of tensors. The launcher sorts
arguments by the same properties, and calls the variant that it had before. That a compiled kernel
can be called so, `compiled[grid](*arguments)`, is part of Triton's interface (tutorial 2).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.nvls.workspace.device_stream import DeviceStream
from pcomm.nvls.workspace.launch import Launch

__all__ = ["Launcher", "Runner", "is_interpreted", "values_of"]

# In these the launcher takes grid, stream, function, metadata, and hooks with what they are told.
_KNOWN_TRITON = ("3.6.", "3.7.")

# Triton's interpreter keeps in one place of the process which block of which grid it is in.
_interpreter = threading.Lock()


class Launcher:
    """Variants of kernels that were compiled for one device.

    Args:
        stream: Source of the current stream of the device.

    Attributes:
        num_compiled: Number of variants so far.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._runners: dict[tuple[Any, ...], Runner] = {}
        self.num_compiled = 0

    def run(self, launch: Launch) -> None:
        """Enqueue a launch on the current stream; under the interpreter, do it.

        Raises:
            ConfigError: It has to be compiled, and a CUDA graph is being captured.
            UnsupportedError: The interpreter runs a kernel of another thread.
        """
        if is_interpreted(launch.kernel):
            _interpret(launch)
            return
        with self._stream.on_device():
            runner = self.runner(launch)
            runner.run(values_of(launch), self._stream.current())

    def runner(self, launch: Launch) -> Runner:
        """The compiled kernel of a launch, with its grid. Local.

        The device has to be the current one.

        Raises:
            ConfigError: It has to be compiled, and a CUDA graph is being captured.
        """
        key = _key(launch)
        found = self._runners.get(key)
        if found is None:
            if self._stream.is_captured():
                raise _in_capture(launch)
            found = self._runners[key] = self._compiled(launch)
            if launch.arguments.get("ENTRY") is False:
                # What the same call needs in a capture, so that one call before it is enough.
                self.runner(replace(launch, arguments={**launch.arguments, "ENTRY": True}))
        return found

    def _compiled(self, launch: Launch) -> Runner:
        grid = (launch.num_blocks, 1, 1)
        options = {"num_warps": launch.num_warps, "maxnreg": launch.max_registers}
        compiled = launch.kernel.warmup(**launch.arguments, grid=grid, **options)
        # A compiler with several threads gives a promise.
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        self.num_compiled += 1
        return _runner_of(compiled, grid)

    def compile(self, launch: Launch) -> None:
        """Compile what a launch needs, and load it, without running it. Local.

        Raises:
            ConfigError: A CUDA graph is being captured.
        """
        if not is_interpreted(launch.kernel):
            with self._stream.on_device():
                self.runner(launch)


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton runs a kernel as Python, and has nothing to compile. Local."""
    return not hasattr(kernel, "params")


def _interpret(launch: Launch) -> None:
    # Not waited for: two threads of each rank that take turns in different orders never end.
    if not _interpreter.acquire(blocking=False):
        raise UnsupportedError(
            "a kernel of pcomm.nvls on the CPU",
            found="another thread of this process runs one",
            why="Triton's interpreter runs one kernel of a process at a time.",
            fix="Call the operations of all workspaces from one thread, or use a GPU.",
        )
    try:
        launch.run()
    finally:
        _interpreter.release()


@dataclass(frozen=True, slots=True)
class Runner:
    """A compiled kernel with its grid.

    Args:
        public: Launch of the kernel by Triton, of its arguments and `stream`.
        start: Launch without what hooks are told, of `grid`, stream, `behind` and the arguments;
            None in versions of Triton that are not known.
        grid: Number of blocks in each dimension.
        behind: Function, metadata, and nothing for the hooks.
        hooks: Settings of Triton, with the hooks of launches.
    """

    public: Any
    start: Any
    grid: tuple[int, int, int]
    behind: tuple[Any, ...]
    hooks: Any

    def run(self, arguments: list[Any], stream: int) -> None:
        """Enqueue the kernel on a stream."""
        entry, end = self.hooks.launch_enter_hook, self.hooks.launch_exit_hook
        has_hooks = (entry is not None and entry.calls) or (end is not None and end.calls)
        if has_hooks or self.start is None:
            self.public(*arguments, stream=stream)
        else:
            self.start(*self.grid, stream, *self.behind, *arguments)


def _runner_of(compiled: Any, grid: tuple[int, int, int]) -> Runner:
    import triton  # type: ignore[import-untyped]

    is_known = triton.__version__.startswith(_KNOWN_TRITON)
    # Loads the kernel: before that its function is None, which no launch takes.
    public = compiled[grid]
    behind = (compiled.function, compiled.packed_metadata, None, None, None) if is_known else ()
    start = compiled.run if is_known else None
    return Runner(public, start, grid, behind, triton.knobs.runtime)


def values_of(launch: Launch) -> list[Any]:
    """The arguments in the order of the parameters."""
    arguments = launch.arguments
    return [arguments[name] for name in launch.kernel.arg_names]


def _key(launch: Launch) -> tuple[Any, ...]:
    """What is equal where Triton would take the same variant; it may tell apart more."""
    arguments = launch.arguments
    kinds = [
        arguments[parameter.name] if parameter.is_constexpr else _kind(arguments[parameter.name])
        for parameter in launch.kernel.params
    ]
    return (launch.kernel.fn, launch.num_blocks, launch.num_warps, launch.max_registers, *kinds)


def _kind(value: Any) -> Any:
    if type(value) is int:
        if value == 1:
            return 1
        size = 32 if -(1 << 31) <= value < 1 << 31 else 64 if value < 1 << 63 else 65
        return (size, value % 16 == 0)
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.data_ptr() % 16 == 0)
    return (type(value), value)


def _in_capture(launch: Launch) -> ConfigError:
    name = launch.kernel.__name__
    entry = launch.arguments.get("ENTRY")
    variant = "" if entry is None else f" with ENTRY={entry}"
    return ConfigError(
        f"a launch of {name}{variant} during the capture of a CUDA graph",
        found="a variant of the kernel that is not compiled yet",
        why="Compiling and loading a kernel is no work of a stream: a capture cannot hold it.",
        fix="Make the same calls once before the capture, or pass them to Workspace.prepare.",
    )
