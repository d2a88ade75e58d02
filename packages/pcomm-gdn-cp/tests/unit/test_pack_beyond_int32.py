"""Kernels on tensors of more than 2^31 elements: offsets of 32 bits would end elsewhere.

Tensors lie in sparse files, of which only a few pages are ever touched. The kernels run under
Triton's interpreter in a process of their own, which a wrong address would end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

PROGRAM = '''
import sys
from dataclasses import replace

import torch
from triton.runtime import interpreter

from pcomm.gdn_cp import triton_packing as packing
from pcomm.gdn_cp.triton_packing import Columns

# It would copy whole storages onto themselves, and so touch every page.
interpreter.GridExecutor._restore_args_dev = lambda *given: None
WIDE, NARROW = 2**30 + 16, 16
assert 2 * WIDE > 2**31


def far(name):
    """Three rows, of which the third begins behind the last offset of 32 bits."""
    file = f"{sys.argv[1]}/{name}"
    return torch.from_file(file, shared=True, size=3 * WIDE, dtype=torch.int16).view(3, WIDE)


def near(rows=3, columns=NARROW):
    return torch.arange(1, rows * columns + 1, dtype=torch.int16).view(rows, columns)


def packed(part, message, order, num_ranks):
    columns = [Columns(0, NARROW, 1, 1, NARROW)]
    packing.pack_launch([part], columns, message, order, num_ranks).run()


def far_rows_are_read(order):
    part = far("a")[:, :NARROW]
    part.copy_(near())
    message = near() * 0
    packed(part, message, order, 1)
    assert torch.equal(message, near() if order is None else near()[order])


def far_columns_are_read():
    part = far("b").view(-1).as_strided((3, NARROW), (1, 2**31 // 15 + 16))
    assert part.stride(1) * (NARROW - 1) > 2**31
    part.copy_(near())
    message = near() * 0
    packed(part, message, None, 1)
    assert torch.equal(message, near())


def far_rows_are_written(num_ranks):
    message = far(f"c{num_ranks}")
    part = near(3 // num_ranks, NARROW * num_ranks)
    packed(part, message, None, num_ranks)
    found = message[:, :NARROW]
    assert torch.equal(found, part.view(3, NARROW)), found


def far_messages_are_unpacked(num_ranks):
    message = far(f"d{num_ranks}")
    message[:, :NARROW] = near()
    section = torch.zeros(3 // num_ranks, NARROW * num_ranks, dtype=torch.int16)
    packing.unpack_launch(message, [Columns(0, NARROW, 1, 1, NARROW)], [section]).run()
    assert torch.equal(section.view(3, NARROW), near()), section


def far_sections_are_unpacked():
    message, section = far("e"), far("f")
    message[:, :NARROW] = near()
    launch = packing.unpack_launch(message, [Columns(0, WIDE, 1, 1, WIDE)], [section])
    # The first tile, which has all rows: there are two million of them.
    replace(launch, num_programs=1).run()
    assert torch.equal(section[:, :NARROW], near())


far_rows_are_read(None)
far_rows_are_read(torch.tensor([2, 0, 1]))
far_columns_are_read()
far_rows_are_written(1)
far_rows_are_written(3)
far_messages_are_unpacked(1)
far_messages_are_unpacked(3)
far_sections_are_unpacked()
print("every offset is right")
'''


def test_offsets_of_kernels_go_beyond_32_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (found.returncode, found.stdout) == (0, "every offset is right\n"), found.stderr
