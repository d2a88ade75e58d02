"""The device that a user names."""

from __future__ import annotations

import contextlib

import torch

from pcomm.core.errors import ConfigError

__all__ = ["device_of"]


def device_of(device: str | torch.device) -> torch.device:
    """A device that this machine has. Local.

    Args:
        device: `cpu`, `cuda` or `cuda:0`; a `torch.device` is returned as it is.

    Raises:
        ConfigError: The name means nothing, or there is no such device.
    """
    if isinstance(device, torch.device):
        return device
    found = f"{device!r}"
    place: torch.device | None = None
    with contextlib.suppress(RuntimeError):
        place = torch.device(device)
    if place is not None and place.type == "cpu":
        return place
    if place is not None and place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) < count:
            return place
        found += f", and {count} CUDA devices"
    raise ConfigError(
        "device",
        found=found,
        why="A model is on the CPU, or on a CUDA device of this machine.",
        fix="Give cpu, or cuda or cuda:N where there are such devices.",
    )
