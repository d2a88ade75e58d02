"""Calls like one before: all but the addresses and the turn is known, and no launch is built.

Checks, choice and arguments of a call follow from the shapes and types of its tensors. So they are
kept with the first call, and what can still differ is looked at: strides, alignment, overlap, and
whether a tensor lies in the workspace. A call that differs in these goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.launcher import (
    Launcher,
    Runner,
    is_interpreted,
    values_of,
)
from pcomm.nvls.workspace.slots import Turn
from pcomm.nvls.workspace.tensor_guard import guard_of

if TYPE_CHECKING:
    from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["Call", "Repeat", "Variant", "again", "remember"]

_MOST_CALLS = 1024
_ALIGNMENT = 15


class Call(NamedTuple):
    """A call that may come again.

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
        arguments: Its arguments.
        x_at: Place of the address of the input among them.
        out_at: Place of that of the result.
    """

    runner: Runner
    arguments: list[Any]
    x_at: int
    out_at: int


@dataclass(slots=True)
class Repeat:
    """A call whose tensors were dense, aligned and outside of the workspace.

    Args:
        shape: Shape of the result.
        device: Number of the device of its tensors, as `Tensor.get_device` has it.
        input_bytes: Size of the input, in bytes.
        result_bytes: Size of the result, in bytes.
        place: The same of the `Call`.
        is_like: True of an input like the first one; see `guard_of`.
        are_like: True of an input and a result like the first ones.
        variants: Launches by slot and need of an entry barrier.
    """

    shape: tuple[int, ...]
    device: int
    input_bytes: int
    result_bytes: int
    place: int | None
    is_like: Callable[..., bool]
    are_like: Callable[..., bool]
    variants: dict[tuple[int, bool], Variant] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call) -> Repeat:
        """A call that was launched; its tensors are looked at."""
        _, x, out, place = call
        is_like = guard_of(x)
        are_like = is_like if out is x else guard_of(x, out)
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


def again(workspace: Workspace, key: Hashable, x: Tensor, out: Tensor | None) -> Tensor | None:
    """Launch a call that is like one before. Local.

    Args:
        workspace: Workspace of the call.
        key: Key of the `Call`.
        x: Input.
        out: Tensor for the result; None for a new one.

    Returns:
        The result; None where the call has to go the long way, which has not begun then.
    """
    repeat = workspace.repeats.get(key)
    if repeat is None or workspace.failure_word.value:
        return None
    is_like = repeat.is_like(x) if out is None else repeat.are_like(x, out)
    if not is_like and not repeat.takes(x, out):
        return None
    address = x.data_ptr()
    begin, end = workspace.own_range
    if address & _ALIGNMENT or begin <= address < end:
        return None
    result = x.new_empty(repeat.shape) if out is None else out
    target = result.data_ptr()
    if target & _ALIGNMENT or begin <= target < end:
        return None
    ahead = address - target
    if -repeat.input_bytes < ahead < repeat.result_bytes and ahead != repeat.place:
        return None
    stream = workspace.turns.plain_stream()
    if stream is None or not workspace.stream.is_current_device():
        return None
    rotation = workspace.turns.rotation
    variant = repeat.variants.get(rotation.step(is_captured=False))
    if variant is None:
        rotation.undo()
        return None
    runner, arguments, x_at, out_at = variant
    arguments = arguments.copy()
    arguments[x_at], arguments[out_at] = address, target
    runner.run(arguments, stream)
    workspace.num_launches += 1
    if out is not None:
        # The launch has only its address: autograd is told that it has changed.
        increment_version(out)
    return result


def remember(
    repeats: dict[Hashable, Repeat], call: Call, launcher: Launcher, launch: Launch, turn: Turn
) -> None:
    """Keep a call that was launched, for calls like it. Local.

    Args:
        repeats: Calls so far.
        call: The call.
        launcher: Launcher that has compiled it.
        launch: Its launch, with the addresses of its tensors among the arguments.
        turn: Its turn.
    """
    key, x, _, _ = call
    if is_interpreted(launch.kernel) or turn.is_prepared:
        return
    if x.layout is not torch.strided or x.dtype.is_complex:
        return
    if len(repeats) >= _MOST_CALLS:
        repeats.clear()
    repeat = repeats.get(key)
    if repeat is None:
        repeat = repeats[key] = Repeat.of(call)
    names = launch.kernel.arg_names
    repeat.variants[turn.slot, turn.needs_entry] = Variant(
        launcher.runner(launch), values_of(launch), names.index("x"), names.index("out")
    )
