"""Kernels under the interpreter in a process that may have imported them without it."""

from __future__ import annotations

import os
import sys

__all__ = ["emulate"]


def emulate() -> None:
    """Have Triton interpret the kernels of this process from now on. Local.

    Triton decides it when a kernel is imported, so the modules of this package are imported anew:
    import what is used of them after the call. The variable `TRITON_INTERPRET` stays set.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    loaded = sys.modules.get("pcomm.nvls.primitives.emulation")
    if loaded is None or loaded.EMULATED:
        return
    for name in [name for name in sys.modules if name.startswith("pcomm.nvls.")]:
        if name != __name__:
            del sys.modules[name]
    # The face keeps what was used of it.
    package = sys.modules["pcomm.nvls"]
    for name in package.__all__:
        vars(package).pop(name, None)
