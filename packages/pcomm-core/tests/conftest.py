"""Settings of the test process itself."""

from __future__ import annotations

import gc

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


def pytest_collection_finish() -> None:
    """Let collections of cycles leave out what was imported, as in ranks: 0.3 s each otherwise."""
    gc.collect()
    gc.freeze()
