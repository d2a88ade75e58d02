"""The pytest plugin that comes with pcomm-core: ranks behind `@ranks`, and programs that end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pcomm.core.testing.on_ranks import RankPool
    from pcomm.core.testing.programs import Programs


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Warm local ranks that live as long as the test session."""
    # Imported here, so that tests of another project do not import torch.
    from pcomm.core.testing.on_ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def programs() -> Iterator[Programs]:
    """Starts programs that end with the test, with everything that they have started."""
    from pcomm.core.testing.programs import Programs

    with Programs() as started:
        yield started
