"""A kernel with its arguments: launched as Triton does it, and again at little cost to the host.

Triton derives on each launch which variant of a kernel its arguments need, from the types of all
arguments, the size and divisibility of integers and the alignment of tensors. The launcher sorts
arguments by the same properties, and calls the variant that it had before. That a compiled kernel
can be called so, `compiled[grid](*arguments)`, is part of Triton's interface (tutorial 2).

Checks, choice and arguments of a call follow from the shapes and types of its tensors. So they are
kept with the first call, for those like it: `remember` here, and `again` beside the operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.nvls.workspace.slots import DeviceStream, SlotLease

__all__ = [
    "CachedCall",
    "Launch",
    "Launcher",
    "Repeat",
    "Runner",
    "Variant",
    "guard_of",
    "is_interpreted",
    "remember",
    "values_of",
]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid and its arguments.

    Args:
        kernel: Triton kernel of `pcomm.nvls.kernels`.
        num_blocks: Number of thread blocks.
        num_warps: Number of warps of a block.
        arguments: Arguments of the kernel, by name.
        device: Device of the memory.
        tensors: Tensors whose addresses are among the arguments: they live until it has run.
        max_registers: Number of registers of a thread that the compiler may use; None for its own
            choice, which may put a few into local memory so that more blocks fit on a processor.
    """

    kernel: Any
    num_blocks: int
    num_warps: int
    arguments: dict[str, Any]
    device: torch.device
    tensors: tuple[torch.Tensor, ...] = ()
    max_registers: int | None = None

    def run(self) -> None:
        """Enqueue it on the current stream of the current device; under the interpreter, do it.

        Triton looks its variant up by itself, which takes the host longer than a `Launcher` does.
        """
        options = {"num_warps": self.num_warps, "maxnreg": self.max_registers}
        self.kernel[(self.num_blocks,)](**self.arguments, **options)


# In these the launcher takes grid, stream, function, metadata, and hooks with what they are told.
# That is private to Triton, and kept for the rows `nvls host`: an all-reduce that is launched again
# takes the host 5 us so, and 55 us by the checks and Triton's own launch (a Xeon of 2.5 GHz).
_KNOWN_TRITON = ("3.6.", "3.7.", "3.8.")

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
            for form in _forms_in_capture(launch.arguments):
                other = replace(launch, arguments={**launch.arguments, **form})
                if (other_key := _key(other)) not in self._runners:
                    self._runners[other_key] = self._compiled(other)
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


def _forms_in_capture(arguments: Mapping[str, Any]) -> list[dict[str, bool]]:
    """What the same call may need in a capture, so that one call before it is enough.

    The first operation of a graph has an entry barrier. One that has it finds no input in its slot:
    what wrote that would have had to wait.
    """
    if "ENTRY" not in arguments:
        return []
    first = {"ENTRY": True, "IN_PLACE": False}
    forms = [{"ENTRY": False}, {"ENTRY": False, "IN_PLACE": True}]
    wanted = forms if arguments["ENTRY"] else [first]
    return [{name: form[name] for name in form if name in arguments} for form in wanted]


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


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """A function that is true of tensors like these, which are looked at now. Local.

    Like them are tensors of the same shape, strides, dtype, device and meaning of their bytes
    (conjugated, negated), which record no gradients. It may be false of such tensors, too: in
    inference mode if it was made outside, and where one is passed twice.

    It is what compiled graphs of torch check their inputs by, and takes as long as two or three
    questions to a tensor. That class is not documented: without it nothing is found to be alike.
    """
    if any(tensor.requires_grad for tensor in tensors):
        # Whether it is asked for gradients in the mode of then or of now depends on the version.
        return _never
    try:
        guards: Any = torch._C._dynamo.guards
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = made.check
        return check if check(*tensors) is True else _never
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return _never


def _in_place(is_like: Callable[..., bool]) -> Callable[..., bool]:
    """What is true of an input that is its own result, which no guard of two tensors takes."""
    return lambda x, out: x is out and is_like(x)


def _never(*tensors: Tensor) -> bool:
    return False


_MOST_CALLS = 1024


class CachedCall(NamedTuple):
    """What `remember` is told of a call that may come again, and makes a `Repeat` of.

    Attributes:
        key: Operation, shape and dtype of the input, and the arguments that are no tensors.
        x: Input as it was launched, dense and aligned.
        out: Result as it was launched, dense and aligned.
        place: Distance in bytes from the result to the input at which the operation works in
            place; None if it never does.
    """

    key: Hashable
    x: Tensor
    out: Tensor
    place: int | None


class Variant(NamedTuple):
    """The launch of a call in one slot.

    Attributes:
        runner: Compiled kernel.
        arguments: Arguments of the kernel.
        x_at: Place of the address of the input among them.
        out_at: Place of that of the result.
    """

    runner: Runner
    arguments: list[Any]
    x_at: int
    out_at: int


@dataclass(slots=True)
class Repeat:
    """What `again` knows of a call whose tensors were dense and aligned.

    Args:
        shape: Shape of the result.
        device: Number of the device of its tensors, as `Tensor.get_device` has it.
        input_bytes: Size of the input, in bytes.
        result_bytes: Size of the result, in bytes.
        place: `place` of the `CachedCall`.
        is_like: True of an input like the first one; see `guard_of`.
        are_like: True of an input and a result like the first ones.
        variants: Launches by slot and need of an entry barrier.
        in_slot: Launches by the slot in which the input lies.
    """

    shape: tuple[int, ...]
    device: int
    input_bytes: int
    result_bytes: int
    place: int | None
    is_like: Callable[..., bool]
    are_like: Callable[..., bool]
    variants: dict[tuple[int, bool], Variant] = field(default_factory=dict)
    in_slot: dict[int, Variant] = field(default_factory=dict)

    @classmethod
    def of(cls, call: CachedCall) -> Repeat:
        """A call that was launched; its tensors are looked at."""
        _, x, out, place = call
        is_like = guard_of(x)
        are_like = _in_place(is_like) if out is x else guard_of(x, out)
        return cls(out.shape, x.get_device(), x.nbytes, out.nbytes, place, is_like, are_like)

    def takes(self, x: Tensor, out: Tensor | None) -> bool:
        """Whether shapes, types and strides are those of a call of this kind. Local."""
        if not x.is_contiguous() or x.get_device() != self.device or x.is_neg():
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
        if out is None:
            return True
        if out.shape != self.shape or out.dtype is not x.dtype or out.get_device() != self.device:
            return False
        # `is_dense` without what a tensor that is not complex cannot be.
        return out.is_contiguous() and not out.requires_grad and not out.is_neg()


def remember(
    repeats: dict[Hashable, Repeat],
    call: CachedCall,
    launcher: Launcher,
    launch: Launch,
    lease: SlotLease,
) -> None:
    """Keep a call that was launched, for calls like it. Local.

    Args:
        repeats: Calls so far.
        call: The call.
        launcher: Launcher that has compiled it.
        launch: Launch of the kernel, with addresses of tensors among the arguments.
        lease: Turn of the operation.
    """
    key, x, _, _ = call
    is_in_slot = launch.arguments.get("IN_PLACE", False)
    if is_interpreted(launch.kernel) or lease.is_prepared is not is_in_slot:
        return
    if x.layout is not torch.strided or x.dtype.is_complex:
        return
    if len(repeats) >= _MOST_CALLS:
        repeats.clear()
    repeat = repeats.get(key)
    if repeat is None:
        repeat = repeats[key] = Repeat.of(call)
    names = launch.kernel.arg_names
    variant = Variant(
        launcher.runner(launch), values_of(launch), names.index("x"), names.index("out")
    )
    if is_in_slot:
        repeat.in_slot[lease.slot] = variant
    else:
        repeat.variants[lease.slot, lease.needs_entry] = variant
