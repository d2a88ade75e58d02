"""The memory of one role: filled first, then frozen, and registered only after that."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.core.pools.backend import PoolBackend

__all__ = ["Arena"]


class Arena:
    """One pool, whose layout is final once it is frozen. Local; made by `PoolRegistry.arena`.

    Attributes:
        name: Part of errors and of the signature that ranks compare.
        role: Role of the communicators that its memory is for.
        pool: Torch's pool, or that of the fake.
    """

    def __init__(self, name: str, role: str, backend: PoolBackend) -> None:
        self.name, self.role = name, role
        self.pool: Any = backend.new_pool()
        self._backend = backend
        self._frozen: tuple[int, ...] | None = None

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
                found=f"it is frozen, with {sum(self._frozen)} bytes",
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
        sizes = self._backend.segment_sizes(self.pool)
        if not sizes:
            raise ConfigError(
                f"arena {self.name!r}: freeze",
                found="no memory in it",
                why="An empty pool registers nothing, without an error.",
                fix="Make tensors within `with arena.allocating():` first.",
            )
        self._frozen = sizes

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
        now = self._backend.segment_sizes(self.pool)
        if now != self._frozen:
            raise ConfigError(
                f"arena {self.name!r}: bind",
                found=f"segments of {now} bytes, frozen with {self._frozen}",
                why="What is registered has to be what the ranks have compared.",
                fix="Make and free no tensor of this pool after freeze.",
            )
        return [f"segment {i}: {num} bytes" for i, num in enumerate(self._frozen)]
