"""The blocks of all running requests as one tensor that only grows at its ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BlockTables"]


class BlockTables:
    """A row of blocks for each running request, on the device; row 0 stays zero, for padding.

    A step of decoding adds a block to one request in `block_size`, so rows are kept and entries
    are appended. On a CPU the tensor lies on the memory that is written; on another device the
    entries that have changed are sent before a step.

    Args:
        num_rows: Number of requests that can run at once.
        width: Most blocks of a request.
        device: Device of the model.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.width = width
        self._free = list(range(num_rows, 0, -1))
        self._host = array("i", bytes(4 * (num_rows + 1) * width))
        if width:
            host = torch.frombuffer(self._host, dtype=torch.int32).view(num_rows + 1, width)
        else:
            host = torch.empty((num_rows + 1, 0), dtype=torch.int32)
        self._on_host = device.type == "cpu"
        self._tensor = host if self._on_host else torch.zeros_like(host, device=device)
        self._changed: dict[int, int] = {}

    def take_row(self) -> int:
        """A free row of zeros; there has to be one."""
        return self._free.pop()

    def give_row_back(self, row: int, count: int) -> None:
        """Clear a row, of which `count` entries were written."""
        self.write(row, 0, [0] * count)
        self._free.append(row)

    def write(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Set the entries of a row from `start` on."""
        first = row * self.width + start
        self._host[first : first + len(blocks)] = array("i", blocks)
        if not self._on_host:
            self._changed.update(zip(range(first, first + len(blocks)), blocks, strict=True))

    def select(self, rows_N: Tensor, width: int) -> Tensor:
        """The first `width` entries of some rows, int32 `[N, width]`, as `send` left them."""
        return self._tensor[:, :width].index_select(0, rows_N)

    def send(self) -> None:
        """Bring the entries that have changed to the device."""
        if not self._changed:
            return
        device = self._tensor.device
        places = torch.tensor(list(self._changed), dtype=torch.int64).to(device)
        values = torch.tensor(list(self._changed.values()), dtype=torch.int32).to(device)
        self._tensor.view(-1).index_copy_(0, places, values)
        self._changed.clear()
