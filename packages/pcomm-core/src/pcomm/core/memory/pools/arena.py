"""The memory pool of one role: filled first, then frozen, and registered only after that."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.memory.pools.backend import PoolBackend

__all__ = ["Arena"]


class Arena:
    """One pool, whose layout is final once it is frozen. Local; made by `PoolRegistry.arena`.

    Attributes:
        name: Name in errors and in the signature that ranks compare.
        role: Role of the communicators that its memory is for.
        pool: Torch's pool, or that of the fake.
    """

    def __init__(self, name: str, role: str, backend: PoolBackend) -> None:
        self.name, self.role = name, role
        self.pool: Any = backend.new_pool()
        self._backend = backend
        self._frozen: tuple[tuple[int, int], ...] | None = None
        self._num_slots, self._slot_bytes = 0, 0
        self._filled: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def is_frozen(self) -> bool:
        """Whether the layout is final."""
        return self._frozen is not None

    def allocating(self) -> AbstractContextManager[Any]:
        """A `with` block in which tensors are made in this arena.

        Raises:
            ConfigError: It is frozen.
        """
        if self._frozen is not None:
            raise ConfigError(
                f"arena {self.name!r}: allocating",
                found=f"it is frozen, with {sum(size for _, size in self._frozen)} bytes",
                why="Memory that is added later would be registered on some ranks and not others.",
                fix="Allocate everything before freeze, or use an arena of another name.",
            )
        return self._backend.allocating(self.pool)

    def freeze(self) -> None:
        """Take the layout for final; a second time changes nothing.

        Raises:
            ConfigError: Nothing is allocated in it.
        """
        if self._frozen is not None:
            return
        segments = self._backend.segments(self.pool)
        if not segments:
            raise ConfigError(
                f"arena {self.name!r}: freeze",
                found="no memory in it",
                why="An empty pool registers nothing, without an error.",
                fix="Make tensors within `with arena.allocating():` first.",
            )
        self._frozen = segments

    def reserve(self, count: int, num_bytes: int, device: torch.device) -> None:
        """Make room for `count` buffers of `num_bytes` at the same time, and freeze. Local.

        All buffers of the arena have one size from then on. That is why there is always room:
        whatever an allocator rounds, splits and merges, blocks of one size stand in a row in each
        segment, and the place that one leaves fits the next.

        Args:
            count: Number of buffers that live at once.
            num_bytes: Size of each buffer, in bytes.
            device: Device of the buffers.

        Raises:
            ConfigError: It is frozen.
        """
        self._num_slots, self._slot_bytes = count, num_bytes
        slots = [torch.UntypedStorage(0, device=device) for _ in range(count)]
        for slot in slots:
            with self.allocating():
                slot.resize_(num_bytes)
            self._backend.address(self.pool, slot)
        self.freeze()

    def fill(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give memory that `reserve` made to a storage that has none. Local.

        The storage gets as much as every buffer of this arena; `resize_(0)` gives it back.

        Args:
            storage: Storage without memory.
            num_bytes: Size that it needs, in bytes; at most that of `reserve`.

        Raises:
            ConfigError: More buffers live at once than were reserved; nothing was allocated.
            UnsupportedError: The allocator did not take memory that is there.
        """
        assert self._frozen is not None
        assert num_bytes <= self._slot_bytes
        self._filled = [known for known in self._filled if _has_memory(known())]
        if len(self._filled) == self._num_slots:
            raise ConfigError(
                f"arena {self.name!r}: a buffer of {num_bytes} bytes",
                found=f"all {self._num_slots} that were reserved are in use",
                why="New memory would not be registered, and communication slower without a word.",
                fix="Reserve for more buffers, or have fewer of them at once.",
            )
        with self._backend.allocating(self.pool):
            storage.resize_(self._slot_bytes)
        self._filled.append(weakref.ref(storage))
        address = self._backend.address(self.pool, storage)
        if not any(start <= address < start + size for start, size in self._frozen):
            raise UnsupportedError(
                f"arena {self.name!r}: a buffer of {num_bytes} bytes",
                found=f"memory at {address:#x}, in none of the {len(self._frozen)} segments",
                why="The allocator took memory that is not registered, although there is room.",
                fix="Use ordinary memory with this allocator; a captured graph has one of its own.",
            )

    def signature(self) -> list[str]:
        """Every segment as a line, for ranks to compare.

        Raises:
            ConfigError: It is not frozen, or its memory has changed since.
        """
        if self._frozen is None:
            raise ConfigError(
                f"arena {self.name!r}: bind",
                found="it is not frozen",
                why="Ranks compare layouts before they register, so a layout has to be final.",
                fix="Call freeze when everything is allocated.",
            )
        now = self._backend.segments(self.pool)
        sizes, frozen = (tuple(size for _, size in found) for found in (now, self._frozen))
        if now != self._frozen:
            raise ConfigError(
                f"arena {self.name!r}: bind",
                found=f"segments of {sizes} bytes, frozen with {frozen}",
                why="What is registered has to be what the ranks have compared.",
                fix="Make and free no tensor of this pool after freeze.",
            )
        return [f"segment {i}: {num} bytes" for i, num in enumerate(frozen)]


def _has_memory(storage: torch.UntypedStorage | None) -> bool:
    return storage is not None and storage.nbytes() > 0
