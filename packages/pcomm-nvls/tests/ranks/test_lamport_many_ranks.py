"""The barrier-free kernels between more ranks than there are processes for.

One rank runs under emulation. What it gets from the others lies in its buffer before it begins, as
if they had been faster.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nvls_support.emulation import emulate
from pcomm.core.testing import ranks

REGION, ROOM = 256, 1024
# Up to 8 shards are read at a time, and 4 inputs added. A block moves 32 vectors at a time.
SIZES = [1, 4, 5, 8, 9, 17]


class Ranks:
    """The buffers of all ranks in one process, and the workspace of one of them."""

    def __init__(self, size: int, rank: int) -> None:
        from pcomm.nvls.workspace.memory import LamportState

        self.size, self.rank = size, rank
        state = LamportState(REGION, size, ROOM, device=torch.device("cpu"))
        self.buffers = torch.zeros(size, REGION + state.num_bytes, dtype=torch.uint8)
        for buffer in self.buffers:
            state.clear(buffer)
        self.failure = torch.zeros(1, dtype=torch.int32)
        arguments = {
            **state.arguments(),
            "buffers": torch.tensor([buffer.data_ptr() for buffer in self.buffers]),
            "multicast": 0,
            "epochs": torch.zeros(8, dtype=torch.int32),
            "failure": self.failure.data_ptr(),
            "limit_ns": 10**8,
            "rank": rank,
            "WORLD": size,
            "WAY": "peers",
        }
        self.workspace: Any = SimpleNamespace(
            group=SimpleNamespace(size=size),
            device=torch.device("cpu"),
            lamport_arguments=lambda: arguments,
            turn=lambda: None,
            is_in_slot=lambda x, turn: False,
        )

    def segment(self, owner: int, sender: int, like: Tensor) -> Tensor:
        """Where `sender` stores on `owner` in operation 0, as a tensor like this one."""
        place = REGION + sender * like.nbytes
        return self.buffers[owner][place : place + like.nbytes].view(like.dtype).view(like.shape)

    def check_stored(self, sent: list[Tensor]) -> None:
        """This rank stored `sent[owner]` on each owner, and nothing else."""
        for owner, expected in enumerate(sent):
            assert torch.equal(self.segment(owner, self.rank, expected), expected)
            if owner != self.rank:
                empty = self.buffers[owner][REGION:].view(torch.int32).eq(-(1 << 31))
                assert empty.logical_not().sum() * 4 == expected.nbytes
        assert self.failure.item() == 0


@ranks(1)
def test_every_number_of_ranks_is_read_and_added(rank: int) -> None:
    emulate()
    from pcomm.nvls.collectives.gathers import all_gather_launch
    from pcomm.nvls.collectives.reductions import all_reduce_launch, reduce_scatter_launch
    from pcomm.nvls.policy.choose import Choice

    choice = Choice("lamport", 2, 1, "test")
    for size in SIZES:
        here = size // 2
        # Shards of 2 rows of 20 vectors: two blocks, the second one in part.
        all_x = torch.randint(1, 99, (size, 2, 80)).float()
        others = [peer for peer in range(size) if peer != here]

        world = Ranks(size, here)
        for peer in others:
            world.segment(here, peer, all_x[peer]).copy_(all_x[peer])
        out = torch.empty(2, size * 80)
        all_gather_launch(world.workspace, choice, out, all_x[here], -1).run()
        assert torch.equal(out, torch.cat(list(all_x), -1))
        world.check_stored([all_x[here]] * size)

        world = Ranks(size, here)
        for peer in others:
            world.segment(here, peer, all_x[peer]).copy_(all_x[peer])
        out = torch.empty(2, 80)
        all_reduce_launch(world.workspace, choice, out, all_x[here]).run()
        assert torch.equal(out, all_x.sum(0))
        world.check_stored([all_x[here]] * size)

        world = Ranks(size, here)
        all_x = torch.randint(1, 99, (size, 2, size * 80)).float()
        segments = [list(x.chunk(size, -1)) for x in all_x]
        for peer in others:
            world.segment(here, peer, segments[peer][here]).copy_(segments[peer][here])
        reduce_scatter_launch(world.workspace, choice, out, all_x[here], -1).run()
        assert torch.equal(out, all_x.sum(0).chunk(size, -1)[here])
        world.check_stored(segments[here])
