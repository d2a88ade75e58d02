"""A tensor at an address, by DLPack: on any device, without a copy and without torch's C++.

`__cuda_array_interface__` would ask the driver to which device an address belongs, which for the
memory of a peer is another one than that which reads it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

__all__ = ["tensor_at"]

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
