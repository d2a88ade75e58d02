"""Programs that know torch.distributed alone, over the backend of this package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvls_support.emulation import emulate
from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.core.testing import ranks
from pcomm.core.testing.on_ranks import default_group

# Names that torch 2.13 gave to these two; it warns at each call by the old ones.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def group_of(ranks: list[int] | None = None, **options: Any) -> Iterator[Any]:
    """A group of the backend under emulation, destroyed at the end."""
    emulate()
    from pcomm.nvls import register_backend

    register_backend(**{"max_bytes": 1 << 14, **options})
    group = dist.new_group(ranks, backend="nvls")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def assert_like_gloo(group: Any) -> None:
    """The three operations of a layer of vLLM's kind, in place and into given tensors."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(32.0).view(4, 8).add(rank).to(dtype)
        for call in (_reduced, _gathered, _scattered):
            assert torch.equal(call(x, n, group), call(x, n, default_group())), (call, dtype)


def _reduced(x, n, group):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def _gathered(x, n, group):
    out = x.new_empty(n * len(x), 8)
    GATHER(out, x, group=group)
    return out


def _scattered(x, n, group):
    out = x.new_empty(len(x) // n, 8)
    SCATTER(out, x, group=group)
    return out


def check_layers(rank: int) -> None:
    with group_of() as group:
        assert_like_gloo(group)
        assert_like_gloo(group)
        assert sum(group.taken.values()) == 12
        assert not group.passed


# Integers that bfloat16 has: sums are exact in any order.
@ranks(2)
def test_a_layer_that_calls_torch_distributed_takes_kernels(rank):
    check_layers(rank)


@ranks(4)
def test_a_layer_that_calls_torch_distributed_takes_kernels_of_four_ranks(rank):
    check_layers(rank)


@ranks(2, leaves="torch keeps the meshes of DTensors in a cache")
def test_a_dtensor_mlp_and_its_gradients_are_those_of_gloo(rank: int) -> None:
    # Two addends have one order, so sums of gloo and of kernels are equal bit for bit.
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    found: dict[str, list[Any]] = {}
    with group_of() as nvls:
        for name, group in (("gloo", default_group()), ("nvls", nvls)):
            # DTensor takes meshes of one name for the same, and the group of the first one.
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
            model = parallelize_module(mlp(), mesh, plan)
            with torch.no_grad():
                served = model(x)
            given = x.clone().requires_grad_()
            model(given).square().mean().backward()
            assert given.grad is not None
            grads = [p.grad.to_local() for p in model.parameters()]
            found[name] = [served, given.grad, *grads]
        # Forward twice, and the gradient of the input, which the first layer sums up.
        assert nvls.taken == {("all_reduce", "lamport"): 3}, nvls.explain()
        # Of the parameters, when the model is divided.
        assert {name for name, _ in nvls.passed} == {"scatter", "broadcast"}
    assert all(map(torch.equal, found["nvls"], found["gloo"]))


@ranks(2, leaves="a thread of tqdm, which the compiler starts")
def test_functional_collectives_and_compiled_ones_take_kernels(rank: int) -> None:
    x = torch.arange(16.0) + rank

    def step(x: Tensor, group: Any) -> Tensor:
        # One of the next operations is a kernel that reads what the one before wrote.
        y = functional.all_reduce(x, "sum", group)
        y = torch.ops._c10d_functional.all_gather_into_tensor(y, 2, group.group_name)
        y = torch.ops._c10d_functional.wait_tensor(y) * 2
        y = torch.ops._c10d_functional.reduce_scatter_tensor(y, "sum", 2, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(y) + 1

    with group_of() as group:
        expected = step(x, default_group())
        assert torch.equal(step(x, group), expected)
        compiled = torch.compile(lambda x: step(x, group), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        assert sum(group.taken.values()) == 6, group.explain()
        assert not group.passed
    torch._dynamo.reset()


@ranks(2)
def test_what_has_no_kernel_goes_to_gloo_and_says_why(rank: int) -> None:
    with group_of(max_bytes=1 << 8, lamport_bytes=0) as group:
        for x, why in (
            (torch.ones(8, dtype=torch.int64), "kernels do not add torch.int64"),
            (torch.ones(3), "no multiple of 16 bytes"),
            (torch.ones(1 << 10), "more than a slot of the workspace, 256 bytes"),
            (torch.ones(0), "without numbers"),
            (torch.ones(4).to_sparse(), "layout torch.sparse_coo"),
        ):
            group.passed.clear()
            dist.all_reduce(x, group=group)
            assert torch.equal(x.to_dense(), torch.full(x.shape, 2, dtype=x.dtype))
            assert [name for name, _ in group.passed] == ["all_reduce"]
            assert why in next(iter(group.passed))[1], group.passed
        group.passed.clear()
        largest = torch.tensor([rank, -rank, 1.0, 2.0])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        assert largest.tolist() == [1, 0, 1, 2]
        sent = torch.full((4,), float(rank))
        dist.broadcast(sent, 1, group=group)
        assert sent.tolist() == [1] * 4
        dist.barrier(group=group)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": 0}, {"rank": 1}]
        parts = [torch.empty(4), torch.empty(4)]
        dist.all_gather(parts, torch.full((4,), float(rank)), group=group)
        assert torch.stack(parts).tolist() == [[0] * 4, [1] * 4]
        assert {name for name, _ in group.passed} == {
            "all_reduce",
            "allgather",
            "barrier",
            "broadcast",
        }
        assert not group.taken
        assert "0 of 6 collectives took a kernel" in group.explain()
        assert "1 all_reduce: not, kernels add, and do nothing else" in group.explain()


@ranks(2)
def test_other_names_of_torch_for_what_has_no_kernel_are_counted(rank: int) -> None:
    with group_of() as group:
        # All-to-all before torch 2.13.
        x, out = torch.arange(2.0) + 10 * rank, torch.empty(2)
        group.alltoall_base(out, x, [], [], dist.AllToAllOptions()).wait()
        assert out.tolist() == [rank, 10 + rank]
        if rank:
            dist.send(x, 0, group=group)
        else:
            assert dist.recv(out, group=group) == 1
            assert out.tolist() == [10, 11]
        last = "send" if rank else "recv_anysource"
        assert [name for name, _ in group.passed] == ["alltoall_base", last]


@ranks(2)
def test_sizes_that_do_not_fit_are_refused_by_torch_on_all_ranks(rank: int) -> None:
    with group_of() as group:
        with pytest.raises((RuntimeError, ValueError)):
            GATHER(torch.empty(9), torch.ones(4), group=group)
        assert_like_gloo(group)


@ranks(2)
def test_works_can_be_waited_for_and_asked_for_a_future(rank: int) -> None:
    with group_of() as group:
        x = torch.ones(8)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(x, torch.full((8,), 2.0))
        (found,) = work.get_future().wait()
        assert found is x
        assert work.get_future().then(lambda done: done.value()[0].sum()).wait() == 16
        # An ordinary one has the handle that gloo gives.
        y = torch.ones(3)
        dist.all_reduce(y, group=group, async_op=True).wait()
        assert y.tolist() == [2] * 3
        assert sum(group.taken.values()) == sum(group.passed.values()) == 1


@ranks(2)
def test_collectives_that_are_issued_together_go_the_ordinary_way(rank: int) -> None:
    with group_of() as group:
        xs = [torch.ones(8), torch.ones(4)]
        with dist._coalescing_manager(group=group):
            for x in xs:
                dist.all_reduce(x, group=group)
        assert [x.tolist() for x in xs] == [[2] * 8, [2] * 4]
        assert not group.taken
        assert group.passed == {("allreduce_coalesced", "no kernel does this"): 1}
        group.passed.clear()
        outs = [torch.empty(16), torch.empty(8)]
        with dist._coalescing_manager(group=group):
            for out, x in zip(outs, xs, strict=True):
                GATHER(out, x, group=group)
        assert [out.tolist() for out in outs] == [[2] * 16, [2] * 8]
        assert group.passed == {("all_gather_coalesced", "several tensors in one call"): 1}


@ranks(2)
def test_layouts_and_gradients_of_one_rank_do_not_change_the_choice(rank: int) -> None:
    with group_of() as group:
        # Rank 0 has a dense tensor without a gradient, and rank 1 a part of one with a gradient.
        whole = torch.zeros(4, 16, requires_grad=bool(rank))
        x = whole.detach()[:, ::2] if rank else torch.zeros(4, 8)
        x += rank + 1
        dist.all_reduce(x, group=group)
        assert torch.equal(x, torch.full((4, 8), 3.0))
        leaf = torch.ones(8, requires_grad=bool(rank))
        with torch.inference_mode(mode=not rank):
            y = leaf * 1.0
            dist.all_reduce(y, group=group)
        assert torch.equal(y.detach(), torch.full((8,), 2.0))
        assert sum(group.taken.values()) == 2


@ranks(4)
def test_groups_side_by_side_and_of_some_ranks(rank: int) -> None:
    emulate()
    from pcomm.nvls import register_backend

    register_backend(max_bytes=1 << 12)
    halves = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("dp", "tp"),
        backend_override={"dp": "nvls", "tp": "nvls"},
    )
    with group_of() as world:
        groups = [halves.get_group("dp"), world, halves.get_group("tp")]
        for group in (*groups, *groups):
            x = torch.full((8,), float(rank))
            dist.all_reduce(x, group=group)
            members = dist.get_process_group_ranks(group)
            assert torch.equal(x, torch.full((8,), float(sum(members))))
        assert [sum(group.taken.values()) for group in groups] == [2, 2, 2]
    for name in ("dp", "tp"):
        dist.destroy_process_group(halves.get_group(name))


@ranks(2)
def test_groups_are_opened_and_destroyed_again_and_again(rank: int) -> None:
    before = set(distributed_c10d._world.pg_names.values())
    for _ in range(3):
        with group_of() as group:
            assert_like_gloo(group)
            assert type(group).__name__ == "NvlsProcessGroup"
            assert dist.get_backend(group) == "nvls"
        assert set(distributed_c10d._world.pg_names.values()) == before
    # One that made no collective has nothing to close.
    with group_of():
        pass


@ranks(3)
def test_a_group_may_be_closed_at_once_while_another_rank_is_slow(rank: int) -> None:
    """No rank has a group before the last one has connected: it may end its connections then."""
    emulate()
    from pcomm.nvls import torch_backend

    store, connect = distributed_c10d._get_default_store(), torch_backend._gloo

    def connect_slowly(common: Any) -> Any:
        backend = connect(common)
        # Gloo is through on the other ranks, too: one that waited for no more would go on now.
        time.sleep(0.3)
        store.set(f"{common.group_id} has connected", "")
        return backend

    for _ in range(2):
        with (
            mock.patch.object(torch_backend, "_gloo", connect_slowly)
            if rank == 1
            else nullcontext(),
            group_of() as group,
        ):
            assert store.check([f"{group.group_name} has connected"])


@ranks(2)
def test_options_that_differ_are_an_error_on_all_ranks_before_a_collective(rank: int) -> None:
    with group_of(max_bytes=1 << (12 + rank)) as group:
        x = torch.ones(8)
        with pytest.raises(DivergenceError, match="max_bytes"):
            dist.all_reduce(x, group=group)
        assert torch.equal(x, torch.ones(8))
        # What has no kernel needs no workspace.
        dist.broadcast(x, 0, group=group)


@ranks(2)
def test_a_rank_without_memory_sends_all_ranks_the_ordinary_way(rank: int) -> None:
    with group_of() as group:
        from pcomm.nvls.workspace import memory

        lack = mock.patch.object(memory, "_prepare", side_effect=MemoryError("none is left"))
        with lack if rank else nullcontext():
            assert_like_gloo(group)
        assert not group.taken
        assert sum(group.passed.values()) == 6
        assert "none is left" in group.explain()


@ranks(2)
def test_what_cannot_be_registered_is_refused_before_a_group_is_made(rank: int) -> None:
    emulate()
    from pcomm.nvls import register_backend

    register_backend()
    with pytest.raises(ConfigError, match="max_bytes=0"):
        register_backend(max_bytes=0)
    with pytest.raises(ConfigError, match="Did you mean 'deterministic'"):
        register_backend(determinstic=True)
    plugins = dist.Backend._plugins
    with (
        mock.patch.dict(plugins, NVLS=plugins["NVLS"]._replace(creator_fn=lambda *_: None)),
        pytest.raises(ConfigError, match="a backend of that name"),
    ):
        register_backend()


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nvls", "nvls"])
@ranks(2)
def test_the_default_group_of_a_program_is_of_this_backend(rank, backend, tmp_path) -> None:
    emulate()
    from pcomm.nvls import register_backend

    register_backend()
    dist.destroy_process_group()
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    x = torch.full((8,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 8
    world: Any = dist.group.WORLD
    assert dict(world.taken) == {("all_reduce", "lamport"): 1}
    dist.destroy_process_group()


@ranks(3)
def test_sums_of_a_deterministic_group_are_in_the_order_of_the_ranks(rank: int) -> None:
    """Below and above what its kernels take; in gloo's order some would be rounded otherwise."""
    with group_of(deterministic=True) as group:
        from pcomm.nvls.references import sum_in_rank_order

        for length in (64, 3 << 12, 3 * 5):
            generator = torch.Generator().manual_seed(0)
            parts = [torch.randn(length, generator=generator) * 32.0**r for r in range(3)]
            x, part, total = parts[rank].clone(), torch.empty(length // 3), sum_in_rank_order(parts)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, total), length
            if not length % 3:
                SCATTER(part, parts[rank], group=group)
                assert torch.equal(part, total.chunk(3)[rank]), length
        assert {name for name, _ in group.passed} >= {"all_reduce", "reduce_scatter_tensor"}
