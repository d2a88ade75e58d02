"""The kernels that pack, launched as on a GPU: a driver that checks each argument takes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

# In a process of its own: where Triton interprets, it is decided by the import of the kernels.
PROGRAM = """
import sys
import torch
from core_support.fake_driver import fake_driver
from pcomm.gdn_cp import GdnSpec, HeadShare
from pcomm.gdn_cp.triton_packing import TritonPacking

launches, packing = [], TritonPacking()
with fake_driver(int(sys.argv[1]), launches):
    for dtype in map(torch.__dict__.get, sys.argv[2:]):
        shares = HeadShare(GdnSpec(4, 8, 16, 16), 4, 0).sections
        shards = [share.columns for share in shares]
        sections = [torch.zeros(16, share.section.width, dtype=dtype) for share in shares]
        message = packing.pack_sections(sections, shards)
        packing.unpack_sections(message, shards)
        for order in (None, torch.arange(len(message)).flip(0)):
            packing.take_rows([message], order)
            packing.take_rows(message.split([share.width for share in shares], 1), order)
print(*(launch[0] for launch in launches))
"""


BOTH = ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        (90, BOTH[:1]),
        pytest.param(90, BOTH, marks=pytest.mark.soak),
        pytest.param(100, BOTH, marks=pytest.mark.soak),
    ],
)
def test_packs_are_launched_as_they_were_compiled(capability, dtypes):
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(capability), *dtypes],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == len(dtypes) * [
        "pack_kernel",
        "unpack_kernel",
        *4 * ["pack_kernel"],
    ]
