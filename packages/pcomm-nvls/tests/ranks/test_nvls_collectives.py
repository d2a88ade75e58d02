"""Core's `Collectives` by kernels: what core's own tests ask of collectives, and what is used."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from core_support.mappings import shared_mappings
from nvls_support.emulation import emulate
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ClosedError, DivergenceError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing import assert_equal, ranks
from pcomm.core.testing.on_ranks import default_collectives, default_group, run_twin
from pcomm.core.testing.programs import wait_until
from pcomm.core.topology import Topology

CORE_TESTS = Path(__file__).parents[3] / "pcomm-core" / "tests" / "ranks"
# A test of core takes its collectives from `default_collectives`; here are its arguments.
OF_TWO: list[tuple[str, str, dict[str, Any]]] = [
    ("test_collectives", "test_sizes_that_do_not_fit_are_refused_before_anything_is_sent", {}),
    (
        "test_refused_calls",
        "test_what_does_not_fit_is_refused_before_anything_is_sent",
        {"what": "out"},
    ),
    ("test_refused_calls", "test_an_out_over_the_input_gets_what_another_one_gets", {"length": 16}),
    ("test_refused_calls", "test_a_transposed_input_over_its_out", {}),
    ("test_refused_calls", "test_an_out_that_requires_a_gradient_is_filled", {"length": 16}),
    (
        "test_refused_calls",
        "test_conjugated_and_negated_views_are_sent_as_what_they_mean",
        {"length": 16},
    ),
    *(
        (
            "test_collectives",
            "test_results_have_the_dtype_and_no_gradient_and_torch_nothing_to_warn_of",
            {"name": name},
        )
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    ),
]
OF_THREE: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (
            "test_collectives",
            "test_shards_are_gathered_and_sums_are_scattered",
            {"dim": dim, "dtype": torch.float32},
        )
        for dim in (0, 1, -1)
    ),
    *(
        ("test_collectives", "test_all_reduce_adds_and_finds_the_largest", {"dtype": dtype})
        for dtype in (torch.float32, torch.int64)
    ),
    (
        "test_collectives",
        "test_uneven_shards_are_gathered_and_scattered",
        {"sizes": (0, 5, 1), "dim": 0},
    ),
    ("test_collectives", "test_inputs_and_outputs_need_not_be_contiguous", {}),
    ("test_collectives", "test_gradients_are_those_of_the_sum_of_all_losses", {}),
]


def core_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pcomm_core_{name}", CORE_TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def opened(**options: Any) -> Iterator[Any]:
    """Collectives of the group of all ranks, under emulation."""
    emulate()
    group = Group.from_process_group("tp", default_group())
    made: Any = nvls.nvls_collectives(**{"max_bytes": 1 << 14, **options})(group)
    try:
        yield made
    finally:
        made.close()


def run_cores_tests(rank: int, cases: list[tuple[str, str, dict[str, Any]]]) -> int:
    """Run tests of core with our collectives; returns the number of kernels."""
    # Ranks are given their tests by path; what a test of core needs is loaded by that, too.
    sys.path.append(str(CORE_TESTS))
    with opened() as made:
        modules = {name: core_module(name) for name in {file for file, _, _ in cases}}
        for file, test, arguments in cases:
            with mock.patch.object(modules[file], "default_collectives", return_value=made):
                getattr(modules[file], test).on_each_rank(rank, **arguments)
        return int(made.workspace.num_launches)


pytestmark = pytest.mark.skipif(not CORE_TESTS.is_dir(), reason="the tests of core are not here")


@ranks(2)
def test_two_ranks_pass_the_tests_of_core(rank: int) -> None:
    assert run_cores_tests(rank, OF_TWO) > 50


@ranks(3)
def test_three_ranks_pass_the_tests_of_core(rank: int) -> None:
    assert run_cores_tests(rank, OF_THREE) > 5


def kernels_of(made: Any, method: str, *arguments: Any, **options: Any) -> int:
    """Number of kernels that a call takes, whose result is that of `inner`."""
    before, inner = made.workspace.num_launches, default_collectives()
    found = getattr(made, method)(*arguments, **options)
    expected = getattr(inner, method)(*arguments, **options)
    if method.endswith("_async"):
        found, expected = found.wait(), expected.wait()
    assert_equal(found, expected)
    return int(made.workspace.num_launches - before)


@ranks(2)
def test_kernels_run_where_they_can_and_all_else_is_passed_on(rank: int) -> None:
    with opened() as made:
        x = torch.arange(32.0).view(2, 4, 4) + rank
        assert isinstance(made, Collectives)
        for twin in ("", "_async"):
            for dim in (0, -1, 2, -3):
                assert kernels_of(made, f"all_gather{twin}", x, dim=dim) == 1
                y = x.repeat(1, 1, 2)
                assert kernels_of(made, f"reduce_scatter{twin}", y, dim=dim) == 1
            assert kernels_of(made, f"all_reduce{twin}", x) == 1
            # A middle dimension, a maximum, another type, 4 bytes, other operations.
            assert kernels_of(made, f"all_gather{twin}", x, dim=1) == 0
            assert kernels_of(made, f"reduce_scatter{twin}", x, dim=1) == 0
            assert kernels_of(made, f"all_reduce{twin}", x, op="max") == 0
            assert kernels_of(made, f"all_reduce{twin}", x.long()) == 0
            assert kernels_of(made, f"all_gather{twin}", x, sizes=[2, 2]) == 1
            # Uneven shards, whose kernels move rows; those of torch.distributed may overlap.
            for dim in (0, 1, 2):
                mine, sizes = x.narrow(dim, 0, rank + 1), [1, 2]
                num_kernels = kernels_of(made, f"all_gather{twin}", mine, dim=dim, sizes=sizes)
                assert num_kernels == (not twin)
            y = torch.cat([x, x[:1]])
            assert kernels_of(made, f"reduce_scatter{twin}", y, sizes=[2, 1]) == (not twin)
            assert kernels_of(made, f"all_reduce{twin}", x[0, 0, :1]) == 0
            assert kernels_of(made, f"all_to_all{twin}", x) == 0
            assert kernels_of(made, f"broadcast{twin}", x, source=1) == 0
            # More than a slot.
            assert kernels_of(made, f"all_reduce{twin}", torch.ones(1 << 13)) == 0
        # Such a one is started, and not waited for, where others may overlap it.
        inner = made.inner
        made.inner = spy = SpyCollectives(inner)
        made.all_reduce_async(torch.ones(1 << 13)).wait()
        assert [call.is_async for call in spy.calls] == [True]
        made.inner = inner
        # Several blocks, of which the first writes where the second has still to read.
        for first in (0, 512, 1024):
            buffer, mine = torch.zeros(2048), torch.arange(1024.0) + rank
            buffer[first : first + 1024] = mine
            made.all_gather(buffer[first : first + 1024], out=buffer)
            assert_equal(buffer, inner.all_gather(mine))


@ranks(3)
def test_sums_of_a_deterministic_workspace_are_rounded_once_whichever_way(rank: int) -> None:
    """Where bf16 is rounded after each addend, 256 + 1 + 1 is 256."""
    with opened(deterministic=True) as made:
        wide = [torch.tensor([256.0, 1, 1, 2] * 6).roll(r).view(3, 8) for r in range(3)]
        total, mine = torch.stack(wide).sum(0).bfloat16(), wide[rank].bfloat16()
        plain = default_collectives()
        assert not torch.equal(plain.all_reduce(mine), total)
        assert not torch.equal(plain.all_reduce(mine.view(6, 4)[0]), total.view(6, 4)[0])
        for is_async in (False, True):
            for sizes in ([1, 1, 1], [2, 0, 1]):
                found = run_twin(made, "reduce_scatter", is_async, mine, sizes=sizes)
                assert_equal(found, total.split(sizes)[rank])
            found = run_twin(made, "reduce_scatter", is_async, mine.view(1, 3, 8), dim=1)
            assert_equal(found, total[rank].view(1, 1, 8))
            assert_equal(run_twin(made, "all_reduce", is_async, mine), total)
            # Too short for a kernel.
            for part, expected in zip(mine.view(6, 4), total.view(6, 4), strict=True):
                assert_equal(run_twin(made, "all_reduce", is_async, part), expected)


@ranks(2)
def test_two_groups_at_once_and_many_one_after_the_other(rank: int) -> None:
    """The rank of a test that leaves a mapping, a file or a thread behind fails."""
    x = torch.arange(8.0) * (rank + 1)
    with opened() as one, opened(slots=1) as other:
        for _ in range(2):
            for made in (one, other, one):
                assert_equal(made.all_reduce(x), torch.arange(8.0) * 3)
        assert one.workspace.num_launches == 2 * other.workspace.num_launches == 4
    refused(ClosedError, "the workspace is closed", one.all_reduce, x)
    mapped, files = shared_mappings(), num_files()
    for _ in range(8):
        with opened(max_bytes=4096) as made:
            assert shared_mappings() - mapped
            assert_equal(made.all_gather(x[:4]).sum(), torch.tensor(18.0))
    assert not shared_mappings() - mapped
    # Connections of an earlier test may close meanwhile, so there can be fewer.
    wait_until(lambda: num_files() <= files, "the end of the files of the workspaces")


@ranks(2)
def test_groups_open_a_workspace_for_each_communicator_and_close_it(rank: int) -> None:
    emulate()
    from pcomm.nvls._nvls_collectives import NvlsCollectives

    mapped, x = shared_mappings(), torch.ones(4)
    topology, names = Topology({"tp": 2, "pp": 1}), ["tp", ("tp", "gather"), "pp"]
    with open_groups(topology, names, collectives=nvls.nvls_collectives(4096)) as groups:
        first, second = groups["tp"].collectives, groups["tp", "gather"].collectives
        assert isinstance(first, NvlsCollectives)
        assert isinstance(second, NvlsCollectives)
        assert not isinstance(groups["pp"].collectives, NvlsCollectives)
        for _ in range(3):
            assert_equal(groups["tp"].differentiable.all_reduce(x), 2 * x)
            assert_equal(second.all_gather(x), torch.ones(8))
        assert (first.workspace.num_launches, second.workspace.num_launches) == (3, 3)
        assert shared_mappings() - mapped
    assert not shared_mappings() - mapped
    with pytest.raises(ClosedError):
        first.all_reduce(x)
    # Ranks that ask for different ones get no groups, and leave nothing behind.
    with pytest.raises(DivergenceError, match="max_bytes"):
        open_groups(topology, ["tp"], collectives=nvls.nvls_collectives(4096 * (rank + 1)))
    assert not shared_mappings() - mapped


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@ranks(2)
def test_ranks_that_have_no_kernels_keep_what_they_have(rank: int) -> None:
    from pcomm.nvls._capability import RankFacts

    class Nothing:
        def facts(self, device: torch.device) -> RankFacts:
            return RankFacts(is_cuda=False, triton="", domain="host", triton_error="none")

    emulate()

    group = Group.from_process_group("tp", default_group())
    made = nvls.nvls_collectives(4096, probe=Nothing() if rank == 1 else None)(group)
    assert made is group.collectives
    alone = Group("tp", (0,), None)
    assert nvls.nvls_collectives()(alone) is alone.collectives
