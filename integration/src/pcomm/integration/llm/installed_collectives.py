"""Operations between ranks that an installed package brings, such as pcomm-nvls."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points

import torch

from pcomm.core import Group
from pcomm.core.collectives import Collectives
from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["GROUP", "installed_collectives"]

GROUP = "pcomm.collectives"
"""Entry points: each names a function without arguments that returns what `open_groups` takes."""


def installed_collectives(device: torch.device) -> Callable[[Group], Collectives] | None:
    """The argument `collectives` of `open_groups`, for an engine whose tensors are on `device`.

    Local; equal on ranks with the same packages. None where no package brings any. They are made
    for GPUs, so on a CPU nothing is looked for or imported, unless Triton's interpreter is turned
    on. The package itself decides whether the ranks of a group can use them, or keep theirs.

    Args:
        device: Device of the model.

    Raises:
        ConfigError: Several packages bring some.
        UnsupportedError: The package cannot be imported.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    # One distribution is found twice where its source folder is on the path as well.
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    if len(entries) > 1:
        raise ConfigError(
            "collectives of an engine on several ranks",
            found=f"{', '.join(sorted(entry.name for entry in entries.values()))} are installed",
            why="The operations of a group have one implementation.",
            fix="Uninstall all but one.",
        )
    for value, entry in entries.items():
        try:
            make: Callable[[Group], Collectives] = entry.load()()
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"collectives {entry.name!r} of an engine on several ranks",
                found=f"{type(error).__name__}: {error}",
                why=f"An installed package brings them as {value}, which cannot be loaded.",
                fix="Install that package again with what it needs, or uninstall it.",
            ) from error
        return make
    return None
