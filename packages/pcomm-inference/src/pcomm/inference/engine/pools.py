"""The tensors of all layers, which of their blocks and slots are free, and the block tables."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.engine.limits import EngineSettings
from pcomm.inference.model import KVMemory, KVSpec, LayerMemory, LayerSpec, StateMemory, StateSpec
from pcomm.inference.roofline.step_bytes import KeptBytes
from pcomm.inference.upload import packed_int32, unpacked_int32

__all__ = ["BlockManager", "BlockTables", "Pools", "StateSlots"]


class Pools:
    """Allocates what each layer keeps, and zeroes and copies states.

    The two kinds of memory have page sizes of their own: a block holds `block_size` tokens of all
    attention layers, a slot the states of all recurrent layers.

    Args:
        specs: Declarations of the model, one for each layer; `settings.check` has passed.
        settings: Numbers of blocks and slots, beside one of each that belongs to no request.
        device: Device of the model.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], settings: EngineSettings, device: torch.device
    ) -> None:
        self.has_blocks = any(isinstance(spec, KVSpec) for spec in specs)
        self.has_states = any(isinstance(spec, StateSpec) for spec in specs)
        # Layers with the same tensors share one `[layers, slots, ...]`, so that a slot of all of
        # them is zeroed or copied by one operation. Each layer's slice of it is contiguous.
        kinds: dict[tuple[str, tuple[int, ...], torch.dtype], list[int]] = defaultdict(list)
        memories: list[LayerMemory | None] = []
        for number, spec in enumerate(specs):
            memory: LayerMemory | None = None
            if isinstance(spec, KVSpec):
                places = settings.num_blocks + 1, settings.block_size
                # Zeros: attention may multiply what lies behind the last token by 0.
                keys, values = (
                    torch.zeros((*places, spec.heads, width), dtype=spec.dtype, device=device)
                    for width in (spec.head_dim, spec.width_of_values)
                )
                memory = KVMemory(keys, values, window=spec.window)
            elif isinstance(spec, StateSpec):
                memory = StateMemory({})
                for name, shape in spec.shapes.items():
                    kinds[name, tuple(shape), spec.dtypes[name]].append(number)
            memories.append(memory)
        self._states: list[Tensor] = []
        for (name, shape, dtype), layers in kinds.items():
            size = (len(layers), settings.num_state_slots + 1, *shape)
            stack = torch.zeros(size, dtype=dtype, device=device)
            self._states.append(stack)
            for place, number in enumerate(layers):
                memory = memories[number]
                assert isinstance(memory, StateMemory)
                memory.pools[name] = stack[place]
        self.memories: Sequence[LayerMemory | None] = memories
        kept = KeptBytes.of(specs)
        self.bytes_per_block = settings.block_size * kept.per_token
        self.bytes_per_slot = kept.per_request

    def zero(self, slot: int) -> None:
        """Make a slot the state of a request that begins."""
        for stack in self._states:
            stack[:, slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""
        for stack in self._states:
            stack[:, target].copy_(stack[:, source])

    def free(self) -> None:
        """Drop all memory; nothing may be read or written after that."""
        self.memories = ()
        self._states.clear()


_FREE, _RESERVED, _TAKEN = 0, 1, 2
# As the search for free blocks sees them when reservations are ignored: a table of all bytes.
_WITHOUT_RESERVATIONS = bytes([_FREE, _FREE, _TAKEN, _TAKEN, *range(4, 256)])


class BlockManager:
    """Ids and reference counts of the blocks 1 to `size`; block 0 belongs to no request.

    A block is used while a request refers to it. After that it is free, or cached if the prefix
    cache has published it; the cache says by `unpublish` when it gives one up.

    Keys and values of a request whose blocks are neighbours in ascending order are one slice of
    memory, see `StepBatch.first_blocks`. So a request gets neighbours where there are some, and
    reserves as many behind them as it may grow into; others take reserved blocks last.

    Args:
        size: Number of blocks that requests can have.
    """

    def __init__(self, size: int) -> None:
        self.size = self.num_free = size
        self.num_cached = 0
        # One byte a block, so that neighbours are found by a search for zeros.
        self._states = bytearray(size + 1)
        self._states[0] = _TAKEN
        self._references = [0] * (size + 1)
        self._published = bytearray(size + 1)

    @property
    def num_used(self) -> int:
        """Number of blocks that requests refer to."""
        return self.size - self.num_free - self.num_cached

    def allocate(
        self, count: int, *, after: int = 0, reservation: tuple[int, int] = (0, 0)
    ) -> list[int]:
        """Take free blocks, each with one reference.

        Args:
            count: Number of blocks, at most `num_free`.
            after: The last block of the request, whose neighbours come first; 0 for none.
            reservation: The reservation of the request.

        Returns:
            Ids of the blocks, in the order in which the request uses them.
        """
        found = self._run_from(after + 1, count, reservation) if after else []
        if not found and (first := self._states.find(_RESERVED, *reservation)) > 0:
            found = self._run_from(first, count, reservation)
        for block in found:
            self._take(block)
        while len(found) < count:
            start, length = self._longest_run(count - len(found))
            for block in range(start, start + length):
                self._take(block)
                found.append(block)
        return found

    def reserve(self, count: int) -> tuple[int, int]:
        """Keep `count` neighbours for one request, as long as others find free ones elsewhere.

        Returns:
            First and end of the reservation; `(0, 0)` if there are not as many free neighbours.
        """
        start = self._states.find(bytes(count)) if count else -1
        if start < 0:
            return (0, 0)
        for block in range(start, start + count):
            self._states[block] |= _RESERVED
        return (start, start + count)

    def unreserve(self, reservation: tuple[int, int]) -> None:
        """End a reservation; blocks that were taken of it stay taken."""
        for block in range(*reservation):
            self._states[block] &= _TAKEN

    def retain(self, block: int) -> None:
        """Add a reference to a block that is used or cached."""
        if not self._references[block]:
            self.num_cached -= 1
        self._references[block] += 1

    def release(self, block: int) -> bool:
        """Take one reference away.

        Returns:
            True if the block has become cached by that, so that the prefix cache may give it up.
        """
        self._references[block] -= 1
        if self._references[block]:
            return False
        if self._published[block]:
            self.num_cached += 1
            return True
        self._free(block)
        return False

    def is_cached(self, block: int) -> bool:
        """True for a published block that no request refers to."""
        return bool(self._published[block]) and not self._references[block]

    def publish(self, block: int) -> None:
        """Note that the prefix cache knows a used block."""
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Note that the prefix cache has given a block up; a cached one becomes free."""
        self._published[block] = 0
        if not self._references[block]:
            self.num_cached -= 1
            self._free(block)

    def _run_from(self, first: int, count: int, reservation: tuple[int, int]) -> list[int]:
        """Find up to `count` neighbours from `first` on, free ones that no other reserved."""
        found: list[int] = []
        for block in range(first, min(first + count, self.size + 1)):
            state = self._states[block]
            is_mine = reservation[0] <= block < reservation[1]
            if state & _TAKEN or (state & _RESERVED and not is_mine):
                break
            found.append(block)
        return found

    def _take(self, block: int) -> None:
        self._states[block] |= _TAKEN
        self._references[block] = 1
        self.num_free -= 1

    def _free(self, block: int) -> None:
        self._states[block] &= _RESERVED
        self.num_free += 1

    def _longest_run(self, count: int) -> tuple[int, int]:
        """Start and length of `count` free neighbours, or of fewer where there are not as many."""
        if (start := self._states.find(bytes(count))) >= 0:
            return start, count
        free = self._states.translate(_WITHOUT_RESERVATIONS)
        length = count
        while (start := free.find(bytes(length))) < 0:
            length = (length + 1) // 2
        return start, length


class StateSlots:
    """Ids of the slots 1 to `size`; slot 0 belongs to no request.

    Args:
        size: Number of slots for requests and snapshots together.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_cached = 0
        # The lowest is taken first, so few requests touch few pages of the pool.
        self._free = list(range(size, 0, -1))

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of slots that requests have."""
        return self.size - len(self._free) - self.num_cached

    def take(self) -> int:
        """A free slot, which is used from now on; there has to be one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Make a used slot free."""
        self._free.append(slot)

    def to_cache(self) -> None:
        """Note that a used slot holds a snapshot now, and belongs to the prefix cache."""
        self.num_cached += 1

    def from_cache(self, slot: int) -> None:
        """Make the slot of a snapshot free."""
        self.num_cached -= 1
        self._free.append(slot)


class BlockTables:
    """A row of blocks for each running request, on the device; row 0 stays zero, for padding.

    A step of decoding adds a block to one request in `block_size`, so rows are kept and entries
    are appended. On a CPU the tensor lies on the memory that is written; to another device the
    entries that have changed go with what a step tells it.

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
        """The first `width` entries of some rows, int32 `[N, width]`, as `apply` left them."""
        return self._tensor[:, :width].index_select(0, rows_N)

    def changes(self) -> Sequence[Tensor]:
        """Entries that the device does not have yet, for `apply`: int64 on the host; often none."""
        if not self._changed:
            return ()
        values = packed_int32(list(self._changed.values()))
        return (
            torch.tensor(list(self._changed), dtype=torch.int64),
            torch.frombuffer(values, dtype=torch.int64),
        )

    def apply(self, changes: Sequence[Tensor]) -> None:
        """Enter what `changes` gave, which lies on the device now; nothing else was written since.

        Until it is called, `changes` gives the same entries again.
        """
        if not changes:
            return
        places, values = changes
        self._tensor.view(-1).index_copy_(0, places, unpacked_int32(values, len(places)))
        self._changed.clear()
