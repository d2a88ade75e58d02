"""The one line of an error that other ranks and logs get."""

from __future__ import annotations

__all__ = ["headline"]


def headline(error: BaseException) -> str:
    """The first line of an error's text, or the name of its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
