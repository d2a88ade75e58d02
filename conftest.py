"""What tests may import beside the packages, and the order in which files of tests begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test support (`NAME_support`) and benchmarks (`NAME_bench`) are no part of the wheels. Ranks take
# this path over, and programs that a test starts get it by their environment.
_ROOT = Path(__file__).parent
_BESIDE = [
    str(folder)
    for kind in ("tests", "benchmarks")
    for folder in [*sorted(_ROOT.glob(f"packages/*/{kind}")), _ROOT / "integration" / kind]
]
sys.path += [folder for folder in _BESIDE if folder not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *_BESIDE]))

# No test writes into the user's home, nor depends on what is there.
os.environ["PCOMM_CACHE"] = "none"

# From files that take up to a minute to those of milliseconds: a long one that begins last would
# keep one process busy while the others have nothing left.
_KINDS = ("e2e", "ranks", "tests", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the folder of a test; the order within a folder stays."""
    place = {kind: number for number, kind in enumerate(_KINDS)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(place)))


@pytest.fixture(scope="session", autouse=True)
def _kernels_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have Triton compile each form of a kernel once for all tests of a run, and find none."""
    base = tmp_path_factory.getbasetemp()
    # Processes of xdist have their own folders beside each other.
    shared = base.parent if base.name.startswith("popen-") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(shared / "triton"))
        yield
