"""Tensors of the caller for results: of any kind that torch has, or refused before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.testing import assert_equal, ranks


@ranks(2)
def test_outs_are_filled_whatever_their_memory_means(rank: int) -> None:
    """Negated, conjugated, misaligned and strided ones, and those whose gradient is recorded."""
    with opened() as workspace:
        x, z = torch.full((8,), 1.0 + rank), torch.full((8,), 1 + 2j * (rank + 1))
        both = torch.cat([torch.full((8,), 1 + 2j), torch.full((8,), 1 + 4j)])
        for algo in ("lamport", "p2p", "multimem", "dist"):
            named: dict[str, Any] = {"workspace": workspace, "algo": algo}
            leaf = torch.zeros(16, requires_grad=True)
            outs = torch._neg_view(torch.zeros(8)), torch.zeros(9)[1:], torch.zeros(16)[::2]
            for out in (*outs, leaf[:8], leaf[1::2], torch.zeros(8, requires_grad=True)):
                assert nvls.all_reduce(x, out=out, **named) is out
                assert_equal(out.detach().resolve_neg(), torch.full((8,), 3.0))
            conjugated = torch.zeros(16, dtype=torch.complex64).conj()
            nvls.all_gather_into_tensor(z, out=conjugated, **named)
            assert_equal(conjugated.resolve_conj(), both)


@ranks(2)
def test_outs_that_cannot_take_a_result_are_refused_before_a_launch(rank: int) -> None:
    with opened() as workspace:
        x = torch.ones(8)
        for algo in ("lamport", "p2p", "multimem", "dist"):
            with pytest.raises(LayoutError, match="several elements are one place"):
                nvls.all_reduce(x, out=torch.zeros(1).expand(8), workspace=workspace, algo=algo)
        # Also where the kernel itself would write elsewhere.
        for part in (slice(8), slice(1, 9), slice(0, 16, 2)):
            inside = workspace.empty((16,), torch.float32)[part]
            with pytest.raises(ConfigError, match="out at byte"):
                nvls.all_reduce(x, out=inside, workspace=workspace, algo="p2p")
        assert workspace.num_launches == 0


@ranks(2)
def test_a_backward_that_needs_what_was_in_an_out_raises(rank: int) -> None:
    with opened() as workspace:
        for algo in ("lamport", "p2p", "multimem", "dist"):
            out, factor = torch.ones(8), torch.ones(8, requires_grad=True)
            loss = (out * factor).sum()
            nvls.all_reduce(torch.ones(8), out=out, workspace=workspace, algo=algo)
            refused(RuntimeError, "modified by an inplace operation", loss.backward)


def test_two_threads_do_not_share_the_interpreter() -> None:
    """Its state is that of the process: the second kernel would be another block of the first."""
    from pcomm.nvls.workspace.launch import Launch, Launcher
    from pcomm.nvls.workspace.slots import stream_of

    launcher = Launcher(stream_of(torch.device("cpu")))

    class Kernel:
        """Launches another one, as a second thread would meanwhile."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **_: launcher.run(Launch(Kernel(), 1, 4, {}, torch.device("cpu")))

    for _ in range(2):
        refused(UnsupportedError, "another thread of this process runs one", Kernel()[1,])
