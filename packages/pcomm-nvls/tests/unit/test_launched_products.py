"""What a row-parallel layer launches: counts through a driver that checks each launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from core_support.fake_driver import fake_driver
from nvls_support.fake_device import FakeStream, fake_workspace
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import RowParallelLinear
from pcomm.nvls._nvls_collectives import NvlsCollectives
from pcomm.nvls.policy.table import Band, Table, Threshold
from pcomm.nvls.workspace.workspace import Workspace

# Every call takes a barrier, whatever its size.
BARRIERS = Table(
    (
        Band(
            ("sm_90",),
            ("all_reduce", "reduce_scatter_tensor"),
            (2, 2),
            (Threshold("p2p", 1 << 20, 16, 16, "a test"),),
        ),
    )
)
LAYERS = 5


class _TwoRanks(IdentityCollectives):
    """Collectives of a rank whose peer does not exist; only kernels may be asked for."""

    size = 2


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def workspace(stream: FakeStream) -> Iterator[Workspace]:
    with fake_driver(), fake_workspace(2, 1 << 20, stream=stream, table=BARRIERS) as made:
        yield made


def layers_of(workspace: Workspace, **options: Any) -> list[RowParallelLinear]:
    collectives = NvlsCollectives(_TwoRanks(), workspace)
    layout = Layout.even(16, 2)
    return [RowParallelLinear(layout, 8, collectives, **options) for _ in range(LAYERS)]


class Counts:
    """Launches of kernels: all, those with an entry barrier, and those that copy their input."""

    def __init__(self, workspace: Workspace) -> None:
        self._launcher = workspace.launcher
        self._runner = workspace.launcher.runner
        self.all = self.entries = self.copies = 0
        self._forms: dict[int, tuple[bool, bool]] = {}

    def runner(self, launch: Any) -> Any:
        found = self._runner(launch)
        arguments = launch.arguments
        self._forms[id(found)] = (arguments["ENTRY"], not arguments["IN_PLACE"])
        return found

    def note(self, runner: Any) -> None:
        entry, copies = self._forms[id(runner)]
        self.all += 1
        self.entries += entry
        self.copies += copies

    def take(self) -> tuple[int, int, int]:
        found = self.all, self.entries, self.copies
        self.all = self.entries = self.copies = 0
        return found


@pytest.fixture
def counts(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Counts:
    from pcomm.nvls.workspace.launch import Runner

    made = Counts(workspace)
    monkeypatch.setattr(workspace.launcher, "runner", made.runner)
    run = Runner.run

    def noted(self: Any, arguments: list[Any], stream: int) -> None:
        made.note(self)
        run(self, arguments, stream)

    monkeypatch.setattr(Runner, "run", noted)
    return made


@pytest.mark.parametrize("scatters", [False, True], ids=["all_reduce", "reduce_scatter"])
@torch.no_grad()
def test_no_layer_copies_its_product_and_a_graph_copies_one(
    workspace: Workspace, stream: FakeStream, counts: Counts, scatters: bool
) -> None:
    """Before, each layer copied: five of five."""
    layers = layers_of(workspace, sequence_parallel=scatters)
    x = torch.ones(32, 8)

    def step() -> None:
        for layer in layers:
            layer(x)

    step()
    assert counts.take() == (LAYERS, 0, 0)
    for rows in (32, 2048):
        x = torch.ones(rows, 8)
        # As an engine does it: a call before, on no graph, and then what is recorded.
        step()
        counts.take()
        compiled = workspace.launcher.num_compiled
        with workspace.turns.recording():
            stream.captured = True
            step()
        stream.captured = False
        # The first one of a graph has its barrier before it copies.
        assert counts.take() == (LAYERS, 1, 1)
        assert workspace.launcher.num_compiled == compiled
    # After a graph: each of its own, or as a sequence.
    step()
    assert counts.take() == (LAYERS, LAYERS, LAYERS)
    with layers[0].collectives.sequence():
        step()
    assert counts.take() == (LAYERS, 1, 1)


@torch.no_grad()
def test_a_product_in_a_slot_is_launched_again_without_a_look_at_its_call(
    workspace: Workspace, stream: FakeStream, counts: Counts
) -> None:
    layer, x = layers_of(workspace)[0], torch.ones(32, 8)
    for _ in range(2):  # one a slot
        layer(x)
    with mock.patch.object(workspace, "choose", side_effect=AssertionError("the long way")):
        for _ in range(4):
            layer(x)
    assert counts.take() == (6, 0, 0)
    slots = [workspace.regions.slot(place) for place in range(2)]
    assert len(set(slots)) == 2
    # Memory that was handed out is followed from stream to stream.
    stream.handle += 1
    layer(x)
    assert stream.waits == [(stream.handle, stream.handle - 1)]


@torch.no_grad()
def test_prepared_layers_compile_nothing_in_a_graph(
    workspace: Workspace, stream: FakeStream, counts: Counts
) -> None:
    layer, x = layers_of(workspace)[0], torch.ones(32, 8)
    workspace.prepare(lambda: layer(x))
    generation = workspace.turns.rotation.generation
    assert generation == 0
    stream.captured = True
    with workspace.sequence():
        for _ in range(3):
            layer(x)
    for _ in range(2):
        layer(x)
    assert counts.take() == (5, 3, 3)
