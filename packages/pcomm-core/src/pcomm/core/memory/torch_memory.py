"""Symmetric memory of torch, whose interface is not stable, and tensors at an address."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from pcomm.core.errors import UnsupportedError
from pcomm.core.memory.backing import Segments

__all__ = ["TorchMemory", "tensor_at"]


class TorchMemory:
    """The `Backing` of torch's symmetric memory.

    Args:
        process_group: Torch's group of the ranks.
        rank: Place of this rank in the group.
        segments: Sizes.
        device: GPU of this rank.
        module: Module with the functions of `torch.distributed._symmetric_memory`; None for that.
    """

    name = "torch"

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        rank: int,
        segments: Segments,
        device: torch.device,
        module: Any = None,
    ) -> None:
        self.device, self._process_group = device, process_group
        self._rank, self._segments, self._module = rank, segments, module
        self._tensor: torch.Tensor | None = None
        self._handle: Any = None
        self.buffer_ptrs: tuple[int, ...] = ()
        self.signal_pad_ptrs: tuple[int, ...] = ()
        self.multicast_ptr: int | None = None

    def allocate(self) -> str:
        """Allocate the buffer, with a signal pad of the size that was asked for.

        Raises:
            UnsupportedError: Torch refused, or has no symmetric memory.
        """
        try:
            if self._module is None:
                self._module = importlib.import_module("torch.distributed._symmetric_memory")
            # For the whole process, and read at each allocation.
            self._module.set_signal_pad_size(self._segments.signal_bytes)
            self._tensor = self._module._SymmetricMemory.empty_strided_p2p(
                (self._segments.num_bytes,), (1,), torch.uint8, self.device
            )
        except (AttributeError, ImportError, RuntimeError) as problem:
            raise self._failed("allocate", f"{type(problem).__name__}: {problem}") from problem
        return ""

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Map the memory of all ranks.

        Raises:
            UnsupportedError: Torch refused, or returned other ranks or addresses than it says.
        """
        try:
            handle = self._module.rendezvous(self._tensor, self._process_group)
            place = handle.rank, handle.world_size
            self.buffer_ptrs = tuple(map(int, handle.buffer_ptrs))
            self.signal_pad_ptrs = tuple(map(int, handle.signal_pad_ptrs))
            # Zero where the system has no multicast, although the rendezvous went well.
            self.multicast_ptr = int(handle.multicast_ptr) or None
        except (AttributeError, RuntimeError, TypeError) as problem:
            raise self._failed("rendezvous", f"{type(problem).__name__}: {problem}") from problem
        self._handle = handle
        size = self._segments.size
        pointers = len(self.buffer_ptrs), len(self.signal_pad_ptrs)
        if place != (self._rank, size) or pointers != (size, size):
            found = f"rank {place[0]} of {place[1]}, with {pointers[0]} and {pointers[1]} addresses"
            raise self._failed("rendezvous", found)
        if not all(self.buffer_ptrs + self.signal_pad_ptrs):
            raise self._failed("rendezvous", "an address that is zero")
        assert self._tensor is not None
        if self._tensor.data_ptr() != self.buffer_ptrs[self._rank]:
            raise self._failed("rendezvous", "a buffer that does not begin its allocation")
        self.signal_pad(self._rank).zero_()
        self.quiesce()

    def finish(self) -> None:
        """There is nothing to give back."""

    def buffer(self, rank: int) -> torch.Tensor:
        """The buffer of a rank, at its address in this process."""
        return self._at(self.buffer_ptrs[rank], self._segments.num_bytes)

    def signal_pad(self, rank: int) -> torch.Tensor:
        """The signal pad of a rank, at its address in this process."""
        pad = self._at(self.signal_pad_ptrs[rank], self._segments.signal_bytes)
        return pad.view(torch.int32)

    def quiesce(self) -> None:
        """Wait for all streams of this rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Drop the allocation and the handle, which the last tensor keeps."""
        self._tensor = self._handle = None

    def _at(self, address: int, num_bytes: int) -> torch.Tensor:
        return tensor_at(address, num_bytes, self.device, (self._handle, self._tensor))

    def _failed(self, what: str, found: str) -> UnsupportedError:
        sizes = f"{self._segments.num_bytes} bytes for each of {self._segments.size} ranks"
        return UnsupportedError(
            f"SymmetricMemory.open: {sizes} by torch, {what}",
            found=found,
            why="Torch's symmetric memory needs GPUs that reach each other's memory.",
            fix="Look at `pcomm doctor` for peer access and multicast; or use a group within one "
            "NVLink domain.",
        )


def tensor_at(address: int, num_bytes: int, device: torch.device, keep: object) -> torch.Tensor:
    """A tensor around memory that is there already: uint8, `[num_bytes]`. Local.

    Args:
        address: First byte, readable by `device`.
        num_bytes: Length, in bytes; above 0.
        device: Device of the tensor, a CPU or a GPU of CUDA.
        keep: Object that keeps the memory; the tensor and its views refer to it.
    """
    holder = _Holder(address, num_bytes, device, keep)
    new_capsule: Any = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.addressof(holder.managed), b"dltensor", None)
    # Given back by `_delete`, when torch frees the tensor.
    ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(holder)))
    tensor: torch.Tensor = from_dlpack(capsule)
    return tensor


_KINDS = {"cpu": 1, "cuda": 2}
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    """`DLTensor` of dlpack.h; `code` 1 is an unsigned integer."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h; `context` is a reference to a `_Holder`."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


class _Holder:
    """What lives as long as the tensor: its description, and what keeps the memory."""

    def __init__(self, address: int, num_bytes: int, device: torch.device, keep: object) -> None:
        self.keep = keep
        self.shape = (ctypes.c_int64 * 1)(num_bytes)
        self.managed = _ManagedTensor()
        inner = self.managed.tensor
        inner.data, inner.shape, inner.ndim = address, self.shape, 1
        inner.device_type, inner.device_id = _KINDS[device.type], device.index or 0
        inner.code, inner.bits, inner.lanes = 1, 8, 1
        self.managed.context, self.managed.deleter = id(self), _delete


def _drop_holder(managed: int) -> None:
    context = _ManagedTensor.from_address(managed).context
    ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(context))


_delete = _Deleter(_drop_holder)
