"""The kernels that pack, launched as on a GPU: a driver that checks each argument takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from core_support.fake_driver import fake_driver
from pcomm.gdn_cp import GdnSpec, HeadShare
from pcomm.gdn_cp.triton_packing import TritonPacking

BOTH = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        (90, BOTH[:1]),
        pytest.param(90, BOTH, marks=pytest.mark.soak),
        pytest.param(100, BOTH, marks=pytest.mark.soak),
    ],
)
def test_packs_are_launched_as_they_were_compiled(
    capability: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    launches: list[tuple[Any, ...]] = []
    packing = TritonPacking()
    with fake_driver(capability, launches):
        for dtype in dtypes:
            shares = HeadShare(GdnSpec(4, 8, 16, 16), 4, 0).sections
            shards = [share.columns for share in shares]
            sections = [torch.zeros(16, share.section.width, dtype=dtype) for share in shares]
            message = packing.pack_sections(sections, shards)
            packing.unpack_sections(message, shards)
            for order in (None, torch.arange(len(message)).flip(0)):
                packing.take_rows([message], order)
                packing.take_rows(message.split([share.width for share in shares], 1), order)
    names = ["pack_kernel", "unpack_kernel", *4 * ["pack_kernel"]]
    assert [launch[0] for launch in launches] == len(dtypes) * names
