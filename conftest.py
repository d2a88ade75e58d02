"""What tests may import beside the packages, and the order in which files of tests begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
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


def pytest_configure(config: pytest.Config) -> None:
    """Let each process of xdist begin to collect elsewhere: they share what pytest compiles."""
    given = getattr(config, "workerinput", None)
    if given is not None:
        number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
        first = number * len(config.args) // count
        config.args[:] = config.args[first:] + config.args[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the folder of a test, and by files; the order within a file stays."""
    place = {kind: number for number, kind in enumerate(_KINDS)}
    items.sort(key=lambda item: (place.get(item.path.parent.name, len(place)), str(item.path)))


# What ranks of many tests import. The first ranks that a process starts start the server that forks
# all others, and what it has not imported, each rank imports anew.
_OF_RANKS = (
    *("hypothesis", "pytest", "torch._dynamo", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor"),
)
# Only where tests were collected that import it.
_OF_SOME_RANKS = {"transformers": "transformers.modeling_utils"}


@pytest.fixture(scope="session", autouse=True)
def _server_of_ranks(request: pytest.FixtureRequest, _kernels_of_the_run: None) -> None:
    """Start it beside the first tests, for those that need it."""
    if not any(item.path.parent.name == "ranks" for item in request.session.items):
        return
    from pcomm.core.process.launch import fork_server, starting

    more = [name for top, name in _OF_SOME_RANKS.items() if top in sys.modules]
    fork_server([*_OF_RANKS, *more])
    with starting(imports_main=False):
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def _kernels_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have Triton compile each form of a kernel once for all tests of a run, and find none."""
    base = tmp_path_factory.getbasetemp()
    # Processes of xdist have their own folders beside each other.
    shared = base.parent if base.name.startswith("popen-") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(shared / "triton"))
        yield
