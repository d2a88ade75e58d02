"""Whether kernels run under Triton's interpreter, which knows no inline assembly."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

__all__ = ["EMULATED"]

# Decided when Triton decides what its decorator makes of a kernel: when the kernels are imported.
EMULATED = tl.constexpr(bool(triton.knobs.runtime.interpret))
