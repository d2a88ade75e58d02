"""A call that must be refused, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refused"]


def refused(
    error: type[BaseException], words: str, call: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """`call(*args, **options)` raises this error, and its text has these words."""
    with pytest.raises(error, match=words):
        call(*args, **options)
