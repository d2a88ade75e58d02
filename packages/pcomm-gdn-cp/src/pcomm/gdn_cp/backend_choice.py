"""Torch or faster code for some devices: what was asked for, or what can run."""

from __future__ import annotations

from collections.abc import Callable

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses

__all__ = ["reason_for_torch"]


def reason_for_torch(
    asked: str, wanted: str, name: str, obstacle: Callable[[], str], *, why: str, fix: str
) -> str:
    """Reason why torch runs and not the code called `name`; empty if that code runs. Local.

    Args:
        asked: Name of the call, for errors.
        wanted: `auto` for the code called `name` where it can run, or `torch` or `name`.
        name: Name of the faster code.
        obstacle: Finds the reason why the faster code cannot run; empty if it can.
        why: Sentence on what the faster code needs, for the error.
        fix: Way to meet these needs, for the error.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `name` is wanted and cannot run.
    """
    names = ("auto", "torch", name)
    if wanted not in names:
        raise ConfigError(
            f"{asked}: wanted={wanted!r}",
            found="no such backend",
            why=f"Torch runs everywhere, {name} where it can.",
            fix=near_misses(wanted, names),
        )
    found = "asked for" if wanted == "torch" else obstacle()
    if found and wanted == name:
        raise UnsupportedError(
            f"{asked}: wanted={name!r}",
            found=found,
            why=why,
            fix=f"{fix}, or use wanted='auto'.",
        )
    return found
