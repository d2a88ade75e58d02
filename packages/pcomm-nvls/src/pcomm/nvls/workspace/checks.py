"""Checks of the numbers that a workspace is opened with."""

from __future__ import annotations

from pcomm.core.errors import ConfigError

__all__ = ["check_positive", "check_room"]


def check_positive(**values: float) -> None:
    """Refuse a size or a time that is not above 0, naming its argument. Local."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(
                f"Workspace: {name}={value}",
                found="a number that is not positive",
                why="Memory and waits have a size.",
                fix=f"Pass {name} > 0.",
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
