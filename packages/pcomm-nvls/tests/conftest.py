"""Settings of the test process itself."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def fresh_triton_cache(tmp_path_factory):
    """A cache of its own: kernels are compiled here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield
