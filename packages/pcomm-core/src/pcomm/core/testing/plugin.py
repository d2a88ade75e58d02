"""The pytest plugin that comes with pcomm-core: the pool of ranks behind `@ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pcomm.core.testing.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Warm local ranks that live as long as the test session."""
    # Imported here, so that tests of somebody else's project do not import torch.
    from pcomm.core.testing.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
