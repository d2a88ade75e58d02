"""When a communicator of its own pays, and how much of a buffer is measured."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.group import Group
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.fsdp import separation as measure
from pcomm.fsdp.separation import Separation, measure_separation

SIZE = 2
MOST = 1024


@pytest.mark.parametrize(("saved", "pays"), [(0.0299, False), (0.0301, True)], ids=str)
def test_it_pays_from_three_percent_on(saved: float, pays: bool) -> None:
    found = Separation("gather", "reduce", 1.0, 1.0, 100.0, 100.0 * (1 - saved), None)
    assert found.pays == pays


@pytest.mark.parametrize("num_elements", [2, MOST - 2, MOST, MOST + 2], ids=str)
def test_a_buffer_is_measured_whole_up_to_32_mebibytes(
    monkeypatch: pytest.MonkeyPatch, num_elements: int
) -> None:
    assert measure._MOST_BYTES == 32 << 20
    # As many bytes need seconds.
    monkeypatch.setattr(measure, "_MOST_BYTES", MOST * 4)
    monkeypatch.setattr(measure, "_ROUNDS", 1)

    def on_rank(virtual: VirtualCollectives) -> set[int]:
        spy = SpyCollectives(virtual)
        group = Group("dp", tuple(range(SIZE)), None, rank=virtual.rank).with_collectives(spy)
        options = {"gather_dtype": torch.float32, "reduce_dtype": torch.float32}
        measure_separation(
            group, group, num_elements=num_elements, device=torch.device("cpu"), **options
        )
        return {c.input_shape[0] for c in spy.calls if c.operation == "reduce_scatter"}

    assert run_virtual(on_rank, SIZE) == [{min(num_elements, MOST)}] * SIZE
