"""Checks of the numbers that a workspace is opened with."""

from __future__ import annotations

import os

import torch

from pcomm.core.errors import ConfigError

__all__ = ["check_memory", "check_positive", "check_room", "check_whole", "device_of"]

# Kernels get the wait in ns, in 64 bits.
_LONGEST_WAIT_S = 1e9


def check_whole(**values: object) -> None:
    """Refuse what is no integer, naming its argument. Local."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"Workspace: {name}={value!r}",
                found=f"a number of type {type(value).__name__}",
                why="Bytes and slots are counted.",
                fix=f"Pass {name} as an integer.",
            )


def check_positive(*, max_bytes: int, timeout_s: float) -> None:
    """Refuse a size or a time that is not above 0, and a time without end. Local."""
    for name, value in (("max_bytes", max_bytes), ("timeout_s", timeout_s)):
        if not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(
                f"Workspace: {name}={value!r}",
                found="no positive number",
                why="Memory and waits have a size.",
                fix=f"Pass {name} > 0.",
            )
    if timeout_s > _LONGEST_WAIT_S:
        raise ConfigError(
            f"Workspace: timeout_s={timeout_s}",
            found=f"more than {_LONGEST_WAIT_S:g} s",
            why="Kernels count the wait in ns, in 64 bits.",
            fix=f"Pass timeout_s <= {_LONGEST_WAIT_S:g}.",
        )


def check_room(lamport_bytes: int) -> None:
    """Refuse a negative size of the memory without barriers. Local."""
    if lamport_bytes < 0:
        raise ConfigError(
            f"Workspace: lamport_bytes={lamport_bytes}",
            found="a negative number",
            why="It is the size of memory.",
            fix="Pass 0 for a workspace without operations that have no barrier.",
        )


def device_of(device: torch.device | str) -> torch.device:
    """A device, or that of a name. Local."""
    try:
        found = torch.device(device)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("this process has no CUDA device")
        return found
    except (RuntimeError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"Workspace: device={device!r}",
            found=f"{type(error).__name__}: {first_line}",
            why="Tensors are on a device that torch has here.",
            fix='Pass a torch.device, or a name such as "cuda:0" or "cpu".',
        ) from None


def check_memory(max_bytes: int, num_bytes: int, device: torch.device) -> None:
    """Refuse what this rank can never have, and what all would do without. Local.

    Args:
        max_bytes: Size of the largest tensor, in bytes.
        num_bytes: Size of the memory of this rank, in bytes.
        device: Device of the memory.
    """
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elif torch.cuda.is_available():
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        return
    if num_bytes > total:
        raise ConfigError(
            f"Workspace: max_bytes={max_bytes}",
            found=f"{num_bytes} bytes for this rank, whose device has {total}",
            why="The slots would fit nowhere, and every operation take torch.distributed.",
            fix="Pass the size of the largest tensor in bytes, such as 8 << 20.",
        )
