"""Calls like one before: all but the addresses and the turn is known, and no launch is built.

Checks, choice and arguments of a call follow from the shapes and types of its tensors. So they are
kept with the first call, and what can still differ is looked at: strides, alignment, overlap, and
whether a tensor lies in the workspace. A call that differs in these goes the long way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.launcher import Launcher, Runner, is_interpreted
from pcomm.nvls.workspace.slots import Turn

if TYPE_CHECKING:
    from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["Call", "Repeat", "again", "remember"]

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


@dataclass(slots=True)
class Repeat:
    """A call whose tensors were dense, aligned and outside of the workspace.

    Args:
        shape: Shape of the result.
        device: Number of the device of its tensors, as `Tensor.get_device` has it.
        input_bytes: Size of the input, in bytes.
        result_bytes: Size of the result, in bytes.
        place: The same of the `Call`.
        variants: Launcher and arguments by slot and need of an entry barrier.
    """

    shape: tuple[int, ...]
    device: int
    input_bytes: int
    result_bytes: int
    place: int | None
    variants: dict[tuple[int, bool], tuple[Runner, list[Any], int, int]] = field(
        default_factory=dict
    )


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
    if repeat is None:
        return None
    stream, turns = workspace.stream, workspace.turns
    if not turns.are_plain or workspace.failure_word.value or not stream.is_current_device():
        return None
    if not x.is_contiguous() or x.get_device() != repeat.device or x.is_neg():
        return None
    if x.requires_grad and torch.is_grad_enabled():
        return None
    address = x.data_ptr()
    begin, end = workspace.own_range
    if out is not None:
        if out.shape != repeat.shape or out.dtype is not x.dtype:
            return None
        # `is_dense` without what a tensor that is not complex cannot be.
        if not out.is_contiguous() or out.requires_grad or out.is_neg():
            return None
        target = out.data_ptr()
        ahead = address - target
        overlaps = -repeat.input_bytes < ahead < repeat.result_bytes and ahead != repeat.place
        if overlaps or begin <= target < end or out.get_device() != repeat.device:
            return None
    if address & _ALIGNMENT or begin <= address < end:
        return None
    result = out
    if result is None:
        result = x.new_empty(repeat.shape)
        target = result.data_ptr()
    if target & _ALIGNMENT:
        return None
    turn = turns.take()
    variant = repeat.variants.get((turn.slot, turn.needs_entry))
    if variant is None:
        turns.put_back(turn)
        return None
    runner, arguments, x_at, out_at = variant
    arguments = arguments.copy()
    arguments[x_at], arguments[out_at] = address, target
    runner(*arguments, stream=stream.current())
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
    key, x, out, place = call
    if is_interpreted(launch.kernel) or turn.is_prepared:
        return
    if x.layout is not torch.strided or x.dtype.is_complex:
        return
    if len(repeats) >= _MOST_CALLS:
        repeats.clear()
    repeat = repeats.setdefault(key, Repeat(out.shape, x.get_device(), x.nbytes, out.nbytes, place))
    names = launch.kernel.arg_names
    values = [launch.arguments[name] for name in names]
    variant = (launcher.runner(launch), values, names.index("x"), names.index("out"))
    repeat.variants[turn.slot, turn.needs_entry] = variant
