"""What a GPU would be asked for, counted without one: launches, waits, uploads and bytes.

Tensors of the device have shapes and no memory: they are on torch's device "meta", or fake ones. An
operation is counted where torch hands it to a device, behind autograd and behind operations that
are made of others. Each is one launch but for those of which `_LAUNCHES` says that CUDA makes more;
libraries may make more of a product. It reads its inputs and writes its results, as if no cache
kept them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counted", "bytes_of_launch", "counting"]

aten = torch.ops.aten


@dataclass
class Counted:
    """What was counted.

    Attributes:
        launches: Number of launches of each operation or kernel.
        waits: Number of times that the host waits for a value.
        uploads: Number of copies from the host.
        num_bytes: Bytes that are read and written.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    uploads: int = 0
    num_bytes: int = 0

    @property
    def total(self) -> int:
        """Launches of all kinds."""
        return self.launches.total()

    def __sub__(self, earlier: Counted) -> Counted:
        """What came since."""
        return Counted(
            self.launches - earlier.launches,
            self.waits - earlier.waits,
            self.uploads - earlier.uploads,
            self.num_bytes - earlier.num_bytes,
        )

    def so_far(self) -> Counted:
        """A copy, which does not change any more."""
        return self - Counted()


@contextmanager
def counting(kernel_bytes: Mapping[str, Callable[..., int]] | None = None) -> Iterator[Counted]:
    """Count what is done within, in this thread, with tensors that have no memory.

    Args:
        kernel_bytes: By the name of a Triton kernel: the bytes that a launch with such arguments
            moves. A kernel that is not here moves all of its tensors.
    """
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    found = Counted()
    sizes = kernel_bytes or {}

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.launches[kernel.__name__] += 1
        found.num_bytes += bytes_of_launch(kernel.__name__, arguments, named, sizes)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        stack.enter_context(mock.patch.object(bias, "CausalBias", _Causal))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Fused(found))
        stack.enter_context(_Counter(found))
        yield found


def bytes_of_launch(
    name: str,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    sizes: Mapping[str, Callable[..., int]],
) -> int:
    """Bytes that a launch of a Triton kernel moves: of all its tensors, or what `sizes` says."""
    if of_kernel := sizes.get(name):
        return of_kernel(**named)
    leaves = tree_leaves((arguments, named))
    # One that is given twice, or in the place of one that is not read, counts once.
    tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}.values()
    return sum(map(_extent, tensors))


# -- operations ------------------------------------------------------------------------------

# They make a tensor, or another view of one, and launch nothing.
_NOTHING = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "set_", "resize_"),
    )
)
_WAITING = frozenset(
    ("_local_scalar_dense", "item", "nonzero", "equal", "masked_select", "is_nonzero")
)
# In place of one: `softmax` and sums of many rows are one, sorts are several.
_LAUNCHES = {"sort": 4, "topk": 2, "cumsum": 1, "embedding_dense_backward": 4}
# Rows that are asked for are read, and not the whole of what they are taken from.
_TAKING = frozenset(("embedding", "index_select", "gather", "index"))
# Rows are written in place.
_PUTTING = {"index_copy_": 3, "index_put_": 2, "scatter_": 3}
_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))
# A launch of torch's `multi_tensor_apply` takes so many pieces, each of so many numbers.
_PIECE, _PIECES = 65_536, 320


class _Counter(TorchDispatchMode):
    def __init__(self, found: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "prim":
            return func(*args, **kwargs)
        # On CUDA it is one kernel, and made of others elsewhere.
        if name != "_fused_rms_norm" and func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in _WAITING:
            self._found.waits += 1
            if name == "_local_scalar_dense":
                return 0
        result = func(*args, **kwargs)
        if name not in _NOTHING and not func.is_view:
            self._note(func, name, args, kwargs, result)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if _is_on_device(one)]
        made = [one for one in tree_leaves(result) if _is_on_device(one)]
        if not given and not made:
            return
        if name in ("_to_copy", "copy_") and not _is_on_device(args[name == "copy_"]):
            self._found.uploads += 1
            return
        if name.startswith("_fused_adamw"):
            numbers = [one.numel() for one in args[0]]
            pieces = sum(-(-count // _PIECE) for count in numbers)
            self._found.launches[name] += -(-pieces // _PIECES)
            # Parameters and both averages are read and written, and gradients read.
            size = sum(one.nbytes for one in args[0])
            self._found.num_bytes += 7 * size
            return
        self._found.launches[name] += _LAUNCHES.get(name, 1)
        self._found.num_bytes += _moved(func, name, args, given, made)


def _is_on_device(value: object) -> bool:
    """Whether it is a tensor without memory; those of the host have real numbers."""
    return isinstance(value, Tensor) and (isinstance(value, FakeTensor) or value.is_meta)


def _moved(func: Any, name: str, args: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    if name in _TAKING:
        own = sum(map(_extent, made))
        return 2 * own + sum(_extent(one) for one in given[1:])
    if name in _PUTTING:
        return sum(_extent(one) for one in given[1:]) + _extent(given[-1])
    if name in _OVERWRITING:
        return sum(map(_extent, given)) if name == "copy_" else _extent(given[0])
    read = {id(one): _extent(one) for one in given}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        # Where it is no result either, it is counted here, and written.
        if argument.name == "out" and any(value is one for one in made):
            read.pop(id(value), None)
    return sum(read.values()) + sum(map(_extent, made))


def _extent(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; those that are repeated count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


# -- what CUDA has one kernel for ------------------------------------------------------------


class _Causal:
    """In the place of torch's mask for the last rows of a causal one, which is a tensor."""

    def __init__(self, variant: Any, num_queries: int, num_keys: int) -> None:
        pass

    @classmethod
    def __torch_function__(cls, *unused: Any) -> Any:
        return NotImplemented


class _Fused(TorchFunctionMode):
    """What is one kernel on CUDA and several operations elsewhere; values that go to the host."""

    def __init__(self, found: Counted) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and _is_on_device(args[0]):
            self._found.waits += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self._found.uploads += 1
        if func is F.scaled_dot_product_attention and _is_flash(*args, **kwargs):
            return _One.apply(self._found, "flash_attention", (1, 3), _attended, *args[:3])  # type: ignore[no-untyped-call]
        if func in (F.rms_norm, torch.rms_norm) and isinstance(args[0], FakeTensor):
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            return _One.apply(self._found, "_fused_rms_norm", (1, 2), _normed, args[0], weight)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _is_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0, **options: Any
) -> bool:
    """Whether torch's attention is one kernel, which takes no mask but a causal one."""
    is_causal = mask is None or isinstance(mask, _Causal)
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return is_causal and is_half and q.shape[-1] == v.shape[-1] <= 256


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.transpose(1, 2).new_empty(q.transpose(1, 2).shape).transpose(1, 2)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


class _One(torch.autograd.Function):
    """An operation of which the launches forward and backward are known."""

    @staticmethod
    def forward(ctx: Any, found: Counted, name: str, launches: Any, shaped: Any, *x: Any) -> Tensor:
        result: Tensor = shaped(*x)
        ctx.told = found, f"{name} backward", launches[1]
        ctx.save_for_backward(*x, result)
        found.launches[name] += launches[0]
        found.num_bytes += sum(map(_extent, x)) + _extent(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found, name, launches = ctx.told
        *x, result = ctx.saved_tensors
        found.launches[name] += launches
        found.num_bytes += 2 * sum(map(_extent, x)) + 2 * _extent(result)
        return None, None, None, None, *(torch.empty_like(one) for one in x)
