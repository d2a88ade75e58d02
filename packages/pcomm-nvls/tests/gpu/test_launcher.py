"""Every kernel of a workspace through its own launcher, on one rank: each result is the input.

On a GPU whose memory of one rank has a multicast address each form of `multimem` runs so, without
and with fences for aliases. The other
half of each test runs anywhere: a driver that checks each argument stands for the device, so that
calls and launches are the same and no number is looked at.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core_support.fake_driver import fake_driver
from nvls_support.calls import calls
from nvls_support.fake_device import FakeStream
from pcomm.core.groups.group import Group
from pcomm.nvls._capability import Capability
from pcomm.nvls.collectives import fused_rmsnorm, reductions
from pcomm.nvls.collectives.fused_rmsnorm import (
    all_reduce_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
)
from pcomm.nvls.collectives.gathers import (
    all_gather_coalesced,
    all_gather_into_tensor,
    gather_to_rank,
)
from pcomm.nvls.collectives.ragged import all_gather_v, reduce_scatter_v
from pcomm.nvls.collectives.reductions import all_reduce, reduce_scatter_tensor
from pcomm.nvls.policy.choose import Chooser, GroupInfo
from pcomm.nvls.policy.table import OPERATIONS, Algorithm, Table
from pcomm.nvls.workspace import workspace as module
from pcomm.nvls.workspace.workspace import Workspace

CASES = [(name, algo) for name, one in OPERATIONS.items() for algo in one.algorithms]
ROWS, HIDDEN, MOST_BYTES = 48, 256, 1 << 20


@dataclass(frozen=True)
class OneRank:
    """A workspace of one rank, whose operations are kernels all the same."""

    workspace: Workspace
    is_real: bool
    launches: list[tuple[Any, ...]]
    has_fences: bool = False

    def has(self, algo: Algorithm) -> bool:
        memory = self.workspace.memory
        assert memory is not None
        if self.has_fences and algo != "multimem":
            return False
        return algo != "multimem" or not self.is_real or memory.multicast_ptr is not None


_ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(
    params=[
        pytest.param("a driver that checks launches"),
        pytest.param("a GPU", marks=_ON_A_GPU),
        pytest.param("a GPU, with fences for aliases", marks=_ON_A_GPU),
    ]
)
def one_rank(request, monkeypatch, tmp_path):
    is_real = "a GPU" in request.param
    architecture = "sm_90"
    monkeypatch.setattr(
        module, "capability", lambda *_, **__: Capability(True, True, architecture, 1)
    )
    launches: list[tuple[Any, ...]] = []
    with ExitStack() as stack:
        options: dict[str, Any] = {"device": torch.device("cpu"), "stream": FakeStream()}
        group = Group("tp", (0,), None)
        if is_real:
            options = {"device": torch.device("cuda", 0)}
            torch.cuda.set_device(options["device"])
            store = dist.FileStore(str(tmp_path / "store"), 1)
            dist.init_process_group("nccl", store=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
            # One rank, and still memory of torch's.
            group = Group("tp", (0,), dist.new_group([0], backend="nccl"))
        else:
            stack.enter_context(fake_driver(launches=launches))
        options["alias_fences"] = "fences" in request.param
        made = stack.enter_context(Workspace(group, MOST_BYTES, timeout_s=5.0, **options))
        assert made.memory is not None, made.capability
        # One rank alone moves nothing: here it is asked to as if there were another one.
        facts = GroupInfo(architecture, 2, True, True, MOST_BYTES, "", "", 1 << 16)
        made._chooser = Chooser(facts, Table())
        yield OneRank(made, is_real, launches, options["alias_fences"])


def numbers(dtype: torch.dtype, device: torch.device, rows: int = ROWS) -> Tensor:
    """None is -0.0, whose sign is lost where nothing but the data say that they have come."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    return torch.where(x == 0, 1, x).to(device)


def operation_of(name, workspace, x, algo):
    """A call that returns what has to be equal to `x`."""
    options: dict[str, Any] = {"workspace": workspace, "algo": algo}
    counts = torch.full((1,), ROWS, dtype=torch.int32, device=x.device)
    weight, zeros = torch.ones(HIDDEN, dtype=x.dtype, device=x.device), torch.zeros_like(x)
    shard = torch.empty_like(x)
    return {
        "all_gather_into_tensor": lambda: [all_gather_into_tensor(x=x, out=None, **options)],
        "all_gather_coalesced": lambda: [
            torch.cat(all_gather_coalesced(xs=[x[:16], x[16:]], outs=None, **options))
        ],
        "all_gather_v": lambda: [all_gather_v(x=x, counts=counts, out=None, **options)],
        "gather_to_rank": lambda: [gather_to_rank(x=x, out=None, **options)],
        "reduce_scatter_tensor": lambda: [reduce_scatter_tensor(x=x, out=None, **options)],
        "reduce_scatter_v": lambda: [reduce_scatter_v(x=x, counts=counts, out=shard, **options)],
        "all_reduce": lambda: [all_reduce(x=x, out=None, **options)],
        # The new residual: addends of one rank, and nothing.
        "reduce_scatter_add_rmsnorm_all_gather": lambda: [
            reduce_scatter_add_rmsnorm_all_gather(x, zeros, weight, 1e-6, **options).residual
        ],
        "all_reduce_add_rmsnorm": lambda: [
            all_reduce_add_rmsnorm(x, zeros, weight, 1e-6, **options).residual
        ],
    }[name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_returns_its_input_first_and_again_and_in_a_graph(one_rank, name):
    algos = [algo for case, algo in CASES if case == name and one_rank.has(algo)]
    workspace = one_rank.workspace
    if not one_rank.is_real:
        x = numbers(torch.bfloat16, workspace.device)
        run = operation_of(name, workspace, x, algos[-1])
        for result in [*run(), *run(), *run()]:
            assert result is not None
            assert (result.shape, result.dtype) == (x.shape, x.dtype)
        assert len(one_rank.launches) == workspace.num_launches == 3
        return
    if not algos:
        pytest.skip("no multicast address, or no kernel by multicast")
    for algo in algos:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = numbers(dtype, workspace.device)
            run = operation_of(name, workspace, x, algo)

            def check(results: list[Tensor | None], x: Tensor = x, algo: str = algo) -> None:
                torch.cuda.synchronize()
                workspace.check()
                for result in results:
                    assert result is not None
                    assert (result.dtype, result.data_ptr() != x.data_ptr()) == (x.dtype, True)
                    same = torch.equal(result.view(torch.uint8), x.view(torch.uint8))
                    assert same, (algo, x.dtype)

            workspace.streams.follow()
            for _ in range(4):  # two slots, and both again
                check(run())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                workspace.streams.follow()
                recorded = run() + run()
            for step in range(3):
                x.copy_(torch.where(x + step == 0, 1, x + step))
                graph.replay()
                check(recorded)


# Kernels and forms that the calls above do not take: of one rank a sum in two shots, addends that
# lie in the slot, and several vectors of each thread at a time.
FORMS = {
    "two shots": ("two_shot_all_reduce_kernel", False, 1),
    "two shots of addends in the slot": ("two_shot_all_reduce_kernel", True, 1),
    "two shots, several vectors": ("two_shot_all_reduce_kernel", False, 4),
    "two shots, several vectors in the slot": ("two_shot_all_reduce_kernel", True, 4),
    "one shot of addends in the slot": ("one_shot_all_reduce_kernel", True, 1),
    "one shot, several vectors": ("one_shot_all_reduce_kernel", False, 4),
    "a segment of addends in the slot": ("reduce_scatter_kernel", True, 1),
    "a segment, several vectors": ("reduce_scatter_kernel", False, 4),
    "a shard, several vectors": ("all_gather_kernel", None, 4),
    "a norm in two shots": ("all_reduce_add_rmsnorm_kernel", False, None),
}


_OPERATION_OF = {
    "two_shot_all_reduce_kernel": "all_reduce",
    "one_shot_all_reduce_kernel": "all_reduce",
    "reduce_scatter_kernel": "reduce_scatter_tensor",
    "all_gather_kernel": "all_gather_into_tensor",
    "all_reduce_add_rmsnorm_kernel": "all_reduce_add_rmsnorm",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_kernel_returns_its_input(one_rank, monkeypatch, form):
    if not one_rank.has("multimem"):
        pytest.skip("memory of one rank has no multicast address here")
    kernel, in_slot, vectors = FORMS[form]
    for part in (reductions, fused_rmsnorm):
        monkeypatch.setattr(part, "is_one_shot", lambda *_: "two" not in form)
    workspace, launches = one_rank.workspace, []
    run_launch = workspace.launcher.run
    monkeypatch.setattr(
        workspace.launcher, "run", lambda one: (launches.append(one), run_launch(one))
    )
    name = _OPERATION_OF[kernel]
    every = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in every if one_rank.is_real else every[:1]:
        row_bytes = HIDDEN * dtype.itemsize
        # Half of a slot, which a segment of two ranks may have.
        rows = MOST_BYTES // 2 // row_bytes if vectors == 4 else ROWS
        x = numbers(dtype, workspace.device, rows)
        for _ in range(4):  # two slots, and both again
            given = workspace.empty(x.shape, dtype).copy_(x) if in_slot else x
            for result in operation_of(name, workspace, given, "multimem")():
                assert result is not None
                assert (result.shape, result.dtype) == (x.shape, dtype)
                # Nothing has run elsewhere.
                same = torch.equal(result.view(torch.uint8), x.view(torch.uint8))
                assert same or not one_rank.is_real, dtype
        workspace.check()
    # Calls that are launched again do not come here: the first one of each slot does.
    assert len(launches) >= 2
    for launch in launches:
        assert launch.kernel.__name__ == kernel
        assert launch.arguments.get("IN_PLACE") == in_slot
        assert launch.arguments.get("TWO_SHOT", "two" in form) == ("two" in form)
        assert vectors is None or launch.arguments["BLOCK"] == 32 * launch.num_warps * vectors


def test_this_device_gives_memory_of_one_rank_a_multicast_address(one_rank: OneRank) -> None:
    if not one_rank.has("multimem"):
        pytest.skip("it does not: the tests beside this one run no multimem instruction")


def test_operations_in_any_order_keep_their_slots(one_rank: OneRank) -> None:
    """Their calls one after another, without a wait of the host, as a model makes them."""
    if not one_rank.is_real:
        for case in (("all_reduce", "p2p"), ("all_gather_v", "p2p"), ("all_reduce", "p2p")):
            calls(one_rank.workspace, rows=ROWS, hidden=HIDDEN)[case]()
        assert len(one_rank.launches) == 3
        return
    cases = [case for case in CASES if one_rank.has(case[1])]
    if not cases:
        pytest.skip("no multicast address")
    generator = torch.Generator().manual_seed(1)
    found: list[tuple[Tensor, Tensor | None]] = []
    for step in range(300):
        name, algo = cases[int(torch.randint(len(cases), (), generator=generator))]
        x = numbers(torch.bfloat16, one_rank.workspace.device) * (step % 7 + 1)
        found += [
            (x, None if result is None else result.clone())
            for result in operation_of(name, one_rank.workspace, x, algo)()
        ]
    torch.cuda.synchronize()
    one_rank.workspace.check()
    assert all(result is not None and torch.equal(x, result) for x, result in found)
