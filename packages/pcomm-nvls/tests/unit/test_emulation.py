"""`emulate()` in a process that has imported kernels without the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

PROGRAM = """
import nvls_support.calls
from nvls_support import virtual_kernels
from nvls_support.emulation import emulate
from pcomm.nvls import operators, Workspace
from pcomm.nvls.kernels.reductions import one_shot_all_reduce_kernel
from pcomm.nvls.workspace.launch import is_interpreted
old = virtual_kernels.virtual_all_gather_kernel
assert not is_interpreted(one_shot_all_reduce_kernel) and not is_interpreted(old)
before = operators, nvls_support.calls.all_reduce, Workspace
emulate()
from nvls_support import calls, virtual_kernels
from nvls_support.emulation import emulate as same
from pcomm.nvls import operators, Workspace
from pcomm.nvls.kernels.reductions import one_shot_all_reduce_kernel
from pcomm.nvls.workspace.launch import is_interpreted
assert is_interpreted(one_shot_all_reduce_kernel)
assert is_interpreted(virtual_kernels.virtual_all_gather_kernel)
assert virtual_kernels.one_shot_all_reduce_kernel is one_shot_all_reduce_kernel
assert not {*before} & {operators, calls.all_reduce, Workspace}
assert calls.Workspace is Workspace and same is emulate
"""


def test_nothing_stays_that_was_imported_before() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
