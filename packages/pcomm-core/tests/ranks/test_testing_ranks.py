"""`@ranks`: fixtures and parameters arrive, and a failure is shown with the rank's own words.

A file of tests is run by pytest in a process of its own, and its report is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pcomm.core.testing.on_ranks import RankPool, ranks
from pcomm.core.testing.programs import Programs

TESTS = """
import os
import sys
import threading

import neighbour
import pytest
import torch
import torch.distributed as dist

from pcomm.core.testing.on_ranks import ranks


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("word", ["a", "b"])
@ranks(2)
def test_passes(rank, factor, tmp_path, word, number):
    assert rank == dist.get_rank()
    assert dist.get_world_size() == 2
    assert (factor in (2, 3)) and word in "ab" and number == 41
    (tmp_path / f"rank-{rank}").write_text(word)
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0", "rank-1"]


@pytest.fixture
def number():
    return 41


@ranks(2)
def test_fresh_memory_is_poisoned(rank):
    assert torch.empty(3).isnan().all()
    assert torch.get_num_threads() == 1
    # Every new rank would spend seconds on the compiler before its first test.
    assert "torch._inductor" not in sys.modules


@ranks(2)
def test_fails_on_rank_1(rank):
    total = torch.tensor([7.0, 8.0])
    assert rank == 0 or total.sum() == 16


@ranks(2)
def test_fails_with_words(rank):
    assert rank == 0, f"the total is {40 + rank}"


@ranks(2)
def test_raises_an_error_of_this_file(rank):
    class Odd(Exception):
        pass

    if rank == 1:
        raise Odd("odd things happen")
    dist.recv(torch.ones(1), src=1)


@ranks(2)
def test_dies(rank):
    if rank == 1:
        os._exit(3)


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setenv("PCOMM_RANKS_TIMEOUT_S", "1.5")


@ranks(2)
def test_hangs(rank, short_limit):
    def wait_here():
        dist.recv(torch.ones(1), src=1 - rank)
    wait_here()


@ranks(2)
def test_passes_after_failures(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == neighbour.NUMBER


KEPT = []


@ranks(2)
def test_leaves_a_communicator(rank):
    # Nothing ends it while somebody holds it: this stands for a hook, of which no collector knows.
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    KEPT.append(group)


@ranks(2)
def test_leaves_a_thread(rank):
    assert not KEPT, "the ranks are those of the test before"
    if rank == 1:
        threading.Thread(target=threading.Event().wait, name="for ever", daemon=True).start()


@ranks(2)
def test_leaves_what_goes_by_itself(rank):
    assert not KEPT
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    cycle = [group]
    cycle.append(cycle)
    threading.Timer(0.2, lambda: None).start()


@ranks(2)
def test_takes_what_pickles_only(rank, unpicklable):
    pass


@pytest.fixture
def unpicklable():
    return lambda: None
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """For each test its failure, or an empty text if it passed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_ranks.py").write_text(textwrap.dedent(TESTS))
    (folder / "neighbour.py").write_text("NUMBER = 2\n")
    # None of these tests uses what the server of ranks would import for seconds.
    preloaded = "import pcomm.core.testing.on_ranks\npcomm.core.testing.on_ranks._PRELOADED = ()\n"
    (folder / "conftest.py").write_text(preloaded)
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", "."]
    report = folder / "report.xml"
    with Programs() as programs:
        programs.run(
            *[sys.executable, "-m", "pytest", "-c", os.devnull, *options],
            *[f"--junitxml={report}", "."],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        found[case.attrib["name"]] = "" if failure is None else str(failure.text)
    return found


def test_fixtures_and_parameters_arrive_on_every_rank(outcomes: Mapping[str, str]) -> None:
    passed = {name for name, failure in outcomes.items() if not failure}
    assert passed == {
        "test_passes[a-2]",
        "test_passes[a-3]",
        "test_passes[b-2]",
        "test_passes[b-3]",
        "test_fresh_memory_is_poisoned",
        "test_passes_after_failures",
        "test_leaves_what_goes_by_itself",
    }


def test_a_failed_assertion_is_shown_first_and_with_values(outcomes: Mapping[str, str]) -> None:
    lines = outcomes["test_fails_on_rank_1"].splitlines()
    assert lines[:2] == ["rank 1 of 2 failed", "Traceback (most recent call last):"]
    text = "\n".join(lines)
    assert "assert rank == 0 or total.sum() == 16" in text
    assert "where test_fails_on_rank_1 has\n    rank = 1\n    total = tensor([7., 8.])" in text
    assert lines[-1] == "rank 0: finished"
    # Nothing of the process that runs pytest stands in the way.
    assert "on_all_ranks" not in text
    assert "AssertionError: the total is 41" in outcomes["test_fails_with_words"]


def test_errors_deaths_hangs_and_what_is_left_behind_are_shown(
    outcomes: Mapping[str, str],
) -> None:
    text = outcomes["test_raises_an_error_of_this_file"]
    assert text.startswith("rank 1 of 2 failed\n")
    assert "odd things happen" in text.partition("rank 0: then")[0]
    assert outcomes["test_dies"].startswith("rank 1 of 2 died: exit code 3")
    text = outcomes["test_hangs"]
    assert text.startswith("ranks [0, 1] of 2 did not finish in time")
    assert text.count("in wait_here") == 2
    words = "test_leaves_a_communicator leaves behind 3 threads of gloo communicators"
    assert words in outcomes["test_leaves_a_communicator"]
    text = outcomes["test_leaves_a_thread"]
    assert "test_leaves_a_thread leaves behind the thread 'for ever'" in text
    assert text.startswith("rank 1 of 2 failed")
    assert "pickle" in outcomes["test_takes_what_pickles_only"]


def test_the_plugin_does_not_import_torch() -> None:
    """It is loaded in every pytest run where pcomm-core is installed."""
    source = "import sys, pcomm.core.testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0


def test_the_pool_of_the_session_is_a_fixture(rank_pool: RankPool) -> None:
    world_size = "__import__('torch').distributed.get_world_size()"
    assert rank_pool.run(eval, 2, world_size) == [2, 2]
    pids = rank_pool.run(eval, 2, "__import__('os').getpid()")
    assert rank_pool.run(eval, 2, "__import__('os').getpid()") == pids


@ranks(3)
def test_the_first_parameter_gets_the_rank(place: int, tmp_path: Path) -> None:
    assert place in range(3)
    assert tmp_path.is_dir()
