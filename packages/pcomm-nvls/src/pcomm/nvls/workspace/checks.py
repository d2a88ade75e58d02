"""Checks of the numbers that a workspace is opened with."""

from __future__ import annotations

from pcomm.core.errors import ConfigError

__all__ = ["check_positive", "check_room", "check_whole"]

# Kernels get the wait in ns, in 64 bits.
_LONGEST_WAIT_S = 1e9


def check_whole(**values: object) -> None:
    """Refuse what is no integer, naming its argument. Local."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"Workspace: {name}={value!r}",
                found=f"a number of type {type(value).__name__}",
                why="Bytes and slots are counted.",
                fix=f"Pass {name} as an integer.",
            )


def check_positive(*, max_bytes: int, timeout_s: float) -> None:
    """Refuse a size or a time that is not above 0, and a time without end. Local."""
    for name, value in (("max_bytes", max_bytes), ("timeout_s", timeout_s)):
        if not value > 0:
            raise ConfigError(
                f"Workspace: {name}={value}",
                found="a number that is not positive",
                why="Memory and waits have a size.",
                fix=f"Pass {name} > 0.",
            )
    if timeout_s > _LONGEST_WAIT_S:
        raise ConfigError(
            f"Workspace: timeout_s={timeout_s}",
            found=f"more than {_LONGEST_WAIT_S:g} s",
            why="Kernels count the wait in ns, in 64 bits.",
            fix=f"Pass timeout_s <= {_LONGEST_WAIT_S:g}.",
        )


def check_room(lamport_bytes: int) -> None:
    """Refuse a negative size of the memory without barriers. Local."""
    if lamport_bytes < 0:
        raise ConfigError(
            f"Workspace: lamport_bytes={lamport_bytes}",
            found="a negative number",
            why="It is the size of memory.",
            fix="Pass 0 for a workspace without operations that have no barrier.",
        )
