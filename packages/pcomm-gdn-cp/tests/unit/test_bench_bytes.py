"""Bytes by arithmetic, against what a spy counts while the forms of the benchmark run."""

from __future__ import annotations

import pytest

from gdn_cp_bench.exchange_case import CaseTensors
from gdn_cp_bench.measure import check_and_count
from gdn_cp_bench.sent_bytes import COUNTED, QWEN3_NEXT, LayerShape, sent_bytes
from gdn_cp_bench.settings import HIDDEN_DIM, SPEC, Settings
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

MEASURED = LayerShape(SPEC, HIDDEN_DIM, 4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pack", [(0, 256), (0, 16, 128, 144, 256)], ids=["one", "four"])
@pytest.mark.parametrize("form", COUNTED)
def test_the_arithmetic_is_what_is_counted(form: str, pack: tuple[int, ...], size: int) -> None:
    def on_rank(collectives: VirtualCollectives) -> int:
        numbers = CaseTensors(pack, collectives.rank, size)
        return check_and_count(form, numbers, collectives).sent_bytes

    assert run_virtual(on_rank, size) == [sent_bytes(form, MEASURED, pack, size)] * size


def test_bytes_of_states_do_not_shrink_like_those_of_activations() -> None:
    """The reason for these figures: one sequence over 2 and 4 ranks, against the fused form."""
    pack = next(pack.cu_seqlens for pack in Settings().packs() if pack.num_sequences == 1)

    def ratio(form: str, shape: LayerShape, size: int) -> float:
        return sent_bytes(form, shape, pack, size) / sent_bytes("fused", shape, pack, size)

    assert [round(ratio("state", MEASURED, size), 2) for size in (2, 4)] == [0.02, 0.12]
    assert [round(ratio("state", QWEN3_NEXT, size), 2) for size in (2, 4)] == [0.09, 0.46]
    assert round(ratio("heads", MEASURED, 2), 2) == round(ratio("heads", QWEN3_NEXT, 2), 2) == 0.75
