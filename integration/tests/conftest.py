"""Settings of the test process itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Ranks run beside this process, and threads that spin for a core they do not get make a test of
# one second last minutes (measured on two cores).
torch.set_num_threads(1)

# A busy machine makes an example, or its making, slow, which says nothing about the code.
settings.register_profile(
    "pcomm", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pcomm")


@pytest.fixture(scope="module", autouse=True)
def _imported_objects_are_not_walked() -> Iterator[None]:
    """Keep what was imported out of collections, and of looks for those who refer to something.

    There are a million objects, and every trainer looks for an optimizer that has its parameters.
    """
    gc.freeze()
    yield
    gc.unfreeze()
