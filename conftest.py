"""The order in which files of tests begin, where several processes take one after another."""

from __future__ import annotations

import pytest

# From files that take up to a minute to those of milliseconds: a long one that begins last would
# keep one process busy while the others have nothing left.
_KINDS = ("e2e", "ranks", "tests", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the folder of a test; the order within a folder stays."""
    place = {kind: number for number, kind in enumerate(_KINDS)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(place)))
