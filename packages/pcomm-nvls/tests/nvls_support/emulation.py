"""Kernels under the interpreter in a process that may have imported them without it."""

from __future__ import annotations

import os
import sys
from typing import Any

from core_support.interpreter import patch_once

__all__ = ["emulate", "opened"]

# Modules of these hold kernels, or classes beside them.
_PACKAGES = ("pcomm.nvls.", "nvls_support.", "nvls_bench.")


def emulate() -> None:
    """Have Triton interpret the kernels of this process from now on. Local.

    Triton decides it when a kernel is imported, so the modules of this package, and those of its
    tests that import them, are imported anew: import what is used of them after the call. The
    variable `TRITON_INTERPRET` stays set.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    patch_once()
    loaded = sys.modules.get("pcomm.nvls.primitives.emulation")
    if loaded is None or loaded.EMULATED:
        return
    for name in [name for name in sys.modules if name.startswith(_PACKAGES)]:
        if name != __name__:
            del sys.modules[name]
            parent, _, own = name.rpartition(".")
            if parent in sys.modules:
                # `from PACKAGE import MODULE` looks there first.
                vars(sys.modules[parent]).pop(own, None)
    # The face keeps what was used of it.
    package = sys.modules["pcomm.nvls"]
    for name in package.__all__:
        vars(package).pop(name, None)


def opened(max_bytes: int = 1 << 12, **options: Any) -> Any:
    """A workspace of the group of all ranks, under emulation. Collective.

    Args:
        max_bytes: Size of the largest tensor, in bytes.
        options: Further arguments of `Workspace`.
    """
    emulate()
    from pcomm.core.groups.group import Group
    from pcomm.core.testing.on_ranks import default_group
    from pcomm.nvls import Workspace

    return Workspace(Group.from_process_group("tp", default_group()), max_bytes, **options)
