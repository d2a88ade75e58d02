"""A device on a CPU that is as late as it may be: it does nothing before the host waits for it.

Its tensors are on torch's device "meta" for the host, which sees their shapes. What is to be done
with them stands in a queue, and is done with tensors that have numbers once the host asks for one:
in the order of the queue, as on a stream. A copy from the host that need not be waited for reads
the host's memory then, and finds what has been written there since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from pcomm.core.kernel_launch import KernelLaunch

__all__ = ["DEVICE", "LateDevice"]

DEVICE = torch.device("meta")
_HOST = torch.device("cpu")


class LateDevice(TorchDispatchMode):
    """The device; a recorder of graphs, too, which are replayed with the tensors of the recording.

    Attributes:
        uploads: Number of copies from the host.
        waits: Number of times that the host waited: for a value, or for a copy of memory that may
            change.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uploads = self.waits = 0
        self._queue: list[Callable[[], None]] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._is_recording = False

    @property
    def num_queued(self) -> int:
        """Number of operations and launches that wait to be done."""
        return len(self._queue)

    @contextmanager
    def running(self) -> Iterator[LateDevice]:
        """Have tensors on "meta" be on this device, in this thread."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(KernelLaunch, "run", lambda one: self._launch(one)))
            stack.enter_context(patch.object(bias, "causal_lower_right", _lower_right))
            stack.enter_context(_Tensors())
            stack.enter_context(self)
            yield self

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        """Run it."""
        body()

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Queue nothing of it but where it is replayed."""
        queue, self._queue, self._is_recording = self._queue, [], True
        try:
            result = body()
        finally:
            recorded, self._queue, self._is_recording = self._queue, queue, False
        return result, lambda: self._queue.extend(recorded)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        target = torch.device(kwargs["device"]) if kwargs.get("device") else None
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_on_device = [one.is_meta for one in given]
        if not any(is_on_device) and target != DEVICE:
            return func(*args, **kwargs)
        if func._can_decompose():
            # In inference mode operations that are made of others come as a whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        is_copy = name in ("_to_copy", "copy_")
        if name == "_local_scalar_dense" or (is_copy and target == _HOST):
            self._wait()
            return func(self._numbers[args[0]], *args[1:], **kwargs)
        if is_copy and not all(is_on_device):
            args = self._uploaded(args, kwargs.get("non_blocking") or args[2:] == (True,))
        result = func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = _HOST
        self._queue.append(lambda: self._do(func, args, kwargs, result))
        return result

    def _uploaded(self, args: Any, is_late: bool) -> Any:
        """The arguments of a copy from the host: what stands there now, where the host waits."""
        self.uploads += 1
        if is_late:
            return args
        self._wait()
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_cpu else x, args)

    def _do(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs = tree_map(self._number_of, (args, kwargs))
        self._keep(result, func(*args, **kwargs))

    def _launch(self, launch: KernelLaunch) -> None:
        def work() -> None:
            launch.kernel[launch.grid](**tree_map(self._number_of, launch.arguments))

        self._queue.append(work)

    def _number_of(self, value: Any) -> Any:
        return self._numbers[value] if isinstance(value, Tensor) and value.is_meta else value

    def _keep(self, result: Any, numbers: Any) -> None:
        for one, number in zip(tree_leaves(result), tree_leaves(numbers), strict=True):
            if isinstance(one, Tensor):
                assert (one.shape, one.dtype) == (number.shape, number.dtype)
                self._numbers[one] = number

    def _wait(self) -> None:
        if self._is_recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.waits += 1
        queue, self._queue = self._queue, []
        for work in queue:
            work()


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """A tensor in the place of torch's mask, which cannot be made where a mode sees operations."""
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=DEVICE)
    return every.tril(num_keys - num_queries)


class _Tensors(TorchFunctionMode):
    """Numbers of the host that become a tensor are copied; torch would leave them out."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or _HOST) == DEVICE:
            return func(*args, **{**kwargs, "device": _HOST}).to(DEVICE)
        if func is Tensor.tolist and args[0].is_meta:
            return args[0].to(_HOST).tolist()
        return func(*args, **kwargs)
