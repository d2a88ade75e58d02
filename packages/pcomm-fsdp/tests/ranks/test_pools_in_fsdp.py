"""Sharded training whose buffers lie in registered memory, on pools without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_support.trainings import (
    STRATEGIES,
    Block,
    SmallModel,
    model_of,
    roles_of,
    shard,
    step_of,
    throw,
    tokens,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.errors import ConfigError, DivergenceError, PcommError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.memory.pool_backends import FakeCommunicator, FakePools
from pcomm.core.memory.pools import PoolRegistry
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology
from pcomm.fsdp import registered_memory
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.registered_memory import ArenaPlan
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles, Scope
from pcomm.fsdp.sharded import Sharded

SPECS = [("dp", "gather"), ("dp", "reduce"), ("dp", "control")]
STEPS = 2


def open_two_and_control() -> Groups:
    return open_groups(Topology({"dp": 2}), SPECS)


def opened(groups: Groups) -> tuple[FakePools, PoolRegistry]:
    backend = FakePools()
    return backend, PoolRegistry(groups, groups["dp", "control"], backend, timeout_s=PATIENCE_S)


def segments_of(registry: PoolRegistry) -> list[tuple[str, int]]:
    return sorted((b.group, at) for b in registry.bindings for at in b.arena.pool.segments)


def train_in_pools(model: SmallModel, sharded: Sharded, rank: int) -> dict[str, Tensor]:
    """Some steps, with an evaluation after each; the whole model afterwards."""
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
    for step in range(STEPS):
        sharded.zero_grad()
        step_of(model, sharded, step, rank)
        optimizer.step()
        with torch.no_grad():
            model.loss(tokens(99, 0, rank))
    return sharded.full_state_dict()


class InPoolsOnly(SpyCollectives):
    """Refuses to start a gather or a reduce whose whole buffer is not in one of the arenas."""

    def __init__(self, inner: Collectives, registry: PoolRegistry) -> None:
        super().__init__(inner)
        self.registry = registry

    def start(self, call: Call) -> Pending:
        if call.operation == "all_gather":
            assert call.out is not None
            self._check(call.out)
        elif call.operation == "reduce_scatter":
            self._check(call.x)
        return super().start(call)

    def _check(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        places = [
            place
            for binding in self.registry.bindings
            for place in binding.arena.pool._places
            if place[0]() is storage
        ]
        assert len(places) == 1
        assert storage.nbytes() == places[0][2]


@pytest.mark.parametrize(
    ("strategy", "formats"),
    [
        ("zero3", "plain"),
        ("zero3, reduced once", "mixed"),
        ("kept for backward", "plain"),
        ("zero2", "mixed"),
        ("zero1", "plain"),
    ],
)
@ranks(2)
def test_training_is_the_same_and_stays_in_what_was_registered(
    rank: int, strategy: str, formats: str
) -> None:
    precision, comm = Precision(), CommPolicy()
    if formats == "mixed":
        precision = Precision(torch.bfloat16, torch.float32)
        comm = CommPolicy(prefetch=2, inflight_reduce=2)
    with open_two_and_control() as groups:
        options = {"reshard": STRATEGIES[strategy], "precision": precision, "comm": comm}
        model = model_of(torch.float32)
        expected = train_in_pools(model, shard(model, groups, **options), rank)
        backend, registry = opened(groups)
        model = model_of(torch.float32)
        sharded = shard(model, groups, pools=registry, **options)
        registered, log = list(backend.registered()), list(backend.log)
        roles = roles_of(groups)
        watch = [InPoolsOnly(g.collectives, registry) for g in (roles.gather, roles.reduce)]
        roles.gather.collectives, roles.reduce.collectives = watch
        found = train_in_pools(model, sharded, rank)
        for name, value in expected.items():
            assert_equal(found[name], value)
        assert [sorted(one.counts) for one in watch] == [["all_gather"], ["reduce_scatter"]]
        # No segment has come since, and nothing was registered again.
        assert segments_of(registry) == sorted(registered) == sorted(backend.registered())
        assert backend.log == log


@ranks(3)
def test_each_pair_is_registered_once_in_one_order_on_all_ranks(rank: int) -> None:
    """Frozen parameters have no gradients; sizes that share an arena are registered once."""
    groups = open_groups(Topology({"dp": 3}), SPECS)
    backend, registry = opened(groups)
    model = model_of(torch.float32)
    model.embedding.weight.requires_grad_(False)
    sharded = shard(model, groups, pools=registry)
    pairs = [(binding.arena.name, binding.group) for binding in registry.bindings]
    plans = {plan.name: plan for plan in sharded.plans}
    assert plans["(root)/frozen"].reduce_pool == ""
    for plan in plans.values():
        assert (plan.gather_pool, "dp[gather]") in pairs
        assert plan.name == "(root)/frozen" or (plan.reduce_pool, "dp[reduce]") in pairs
        assert plan.gather_pool != plan.reduce_pool
    assert len(set(pairs)) == len(pairs) == len(backend.log)
    assert sorted({group for _, group in pairs}) == ["dp[gather]", "dp[reduce]"]
    everywhere: list[object] = [None] * 3
    dist.all_gather_object(everywhere, (pairs, backend.log))
    assert everywhere == [(pairs, backend.log)] * 3
    before = list(backend.log)
    train_in_pools(model, sharded, rank)
    # Taken away while the communicators still work, last first.
    gather = groups["dp", "gather"]
    plain, sums = backend.communicators["dp[gather]"].deregister_mem_pool, []

    def deregister(pool: object) -> None:
        sums.append(gather.collectives.all_reduce(torch.ones(1)).item())
        plain(pool)  # type: ignore[arg-type]

    backend.communicators["dp[gather]"].deregister_mem_pool = deregister  # type: ignore[method-assign, assignment]
    groups.close()
    undone = [line.replace("register", "deregister") for line in reversed(before)]
    assert backend.log == before + undone
    assert sums == [3.0] * len([group for _, group in pairs if group == "dp[gather]"])
    assert list(backend.registered()) == []


@ranks(2)
def test_a_shared_communicator_has_the_memory_of_both_uses(rank: int) -> None:
    with open_two_and_control() as groups:
        backend, registry = opened(groups)
        model = model_of(torch.float32)
        sharded = shard(model, groups, pools=registry, comm=CommPolicy("never"))
        train_in_pools(model, sharded, rank)
        assert {group for group, _ in backend.registered()} == {"dp[gather]"}
        assert not {p.gather_pool for p in sharded.plans} & {p.reduce_pool for p in sharded.plans}
        root, block = (plan.gathered_bytes for plan in sharded.plans[:2])
        sizes = f"1 x {root} + 2 x {block} bytes"
        line = f"registered memory: gathered parameters with dp[gather], {sizes}; "
        line += f"gradients with dp[gather], {sizes}"
        assert str(sharded.report()).splitlines().count(line) == 1


@ranks(4)
def test_replicas_and_experts(rank: int) -> None:
    """Each scope's memory goes to the communicators of that scope, and training is the same."""
    topology = Topology({"rep": 2, "shard": 2}, order=("shard", "rep"))
    topology = topology.view("expert", {"edp": 2, "ep": 2})
    names = ["shard", ("shard", "reduce"), "rep", ("rep_shard", "control")]
    names += ["expert.edp", ("expert.edp", "reduce")]
    with open_groups(topology, names) as groups:
        scope = Scope(
            lambda name, _: name.endswith("down.weight"),
            Roles(groups["expert.edp"], groups["expert.edp", "reduce"]),
        )
        registry = PoolRegistry(groups, groups["rep_shard", "control"], FakePools())
        expected, found = (_trained(groups, rank, scope, pools) for pools in (None, registry))
        for name, value in expected.items():
            assert_equal(found[name], value)


def _trained(
    groups: Groups, rank: int, scope: Scope, registry: PoolRegistry | None
) -> dict[str, Tensor]:
    model = model_of(torch.float32)
    roles = Roles(groups["shard"], groups["shard", "reduce"], groups["rep"])
    sharded = fully_shard(model, roles, units=[Block], scopes={"expert": scope}, pools=registry)
    if registry is not None:
        pairs = {(b.arena.name, b.group, b.communicator.ranks) for b in registry.bindings}
        for plan in sharded.plans:
            assert (plan.gather_pool, plan.gather.key, plan.gather.ranks) in pairs
            assert (plan.reduce_pool, plan.reduce.key, plan.reduce.ranks) in pairs
        assert len({group for _, group, _ in pairs}) == 4
    else:
        assert "registered memory" not in str(sharded.report())
    return train_in_pools(model, sharded, rank)


@ranks(2)
def test_two_models_have_memory_of_their_own(rank: int) -> None:
    with open_two_and_control() as groups:
        _, registry = opened(groups)
        models = [model_of(torch.float32), model_of(torch.float32)]
        sharded = [shard(m, groups, pools=registry) for m in models]
        names = [{p.gather_pool for p in one.plans} for one in sharded]
        assert not names[0] & names[1]
        losses = [model.loss(tokens(0, 0, rank)) for model in models]
        for loss in losses:
            loss.backward()
        assert_equal(losses[0], losses[1])


def refuse(backend: FakePools) -> None:
    log = backend.log
    backend.communicators["dp[reduce]"] = FakeCommunicator(
        "dp[reduce]", log, refused=range(1, 1 << 60)
    )


def lack_memory(backend: FakePools) -> None:
    def full(pool: object, storage: object) -> int:
        raise RuntimeError("CUDA out of memory")

    backend.address = full  # type: ignore[method-assign]


@ranks(2)
def test_what_one_rank_cannot_do_is_undone_on_all(rank: int) -> None:
    with open_two_and_control() as groups:
        for spoil, own, words in (
            (refuse, UnsupportedError, "cannot register"),
            (lack_memory, RuntimeError, "out of memory"),
        ):
            backend, registry = opened(groups)
            model = model_of(torch.float32)
            if rank == 1:
                spoil(backend)
            before = dict(model.named_parameters())
            with pytest.raises(own if rank else PeerError, match=words):
                shard(model, groups, pools=registry)
            assert any(line.startswith("register") for line in backend.log) is (spoil is refuse)
            assert list(backend.registered()) == []
            assert registry.bindings == ()
            assert registry._arenas == {}
            # The model is as it was, and can be sharded without.
            assert all(p is before[name] for name, p in model.named_parameters())
            train_in_pools(model, shard(model, groups), rank)
        pools = opened(groups)[1] if rank else None
        with pytest.raises(DivergenceError, match="memory pools: True"):
            shard(model_of(torch.float32), groups, pools=pools)


@pytest.mark.parametrize("use", ["gather", "reduce"])
@ranks(2)
def test_a_reservation_that_is_too_small_is_an_error_and_not_slow(rank: int, use: str) -> None:
    """One place less, in the arena of the blocks: the step that needs it says so, on all ranks."""
    planned = registered_memory.plan_arenas

    def one_less(*arguments: object) -> list[ArenaPlan]:
        found = planned(*arguments)  # type: ignore[arg-type]
        return [
            replace(plan, num_slots=plan.num_slots - 1)
            if plan.use == use and plan.num_slots > 1
            else plan
            for plan in found
        ]

    registered_memory.plan_arenas = one_less  # type: ignore[assignment]
    try:
        with open_two_and_control() as groups:
            _, registry = opened(groups)
            model = model_of(torch.float32)
            sharded = shard(model, groups, pools=registry)
            with pytest.raises(
                ConfigError, match=f"fsdp {use}(.|\n)*in use(.|\n)*ReshardPolicy\\(keep"
            ):
                train_in_pools(model, sharded, rank)
    finally:
        registered_memory.plan_arenas = planned


# What pools hold depends on what is gathered at once.
@pytest.mark.parametrize(
    "recompute",
    [
        "blocks",
        pytest.param("reentrant", marks=pytest.mark.soak),
        pytest.param("inside", marks=pytest.mark.soak),
        "all blocks at once",
    ],
)
@ranks(2)
def test_recompute(rank: int, recompute: str) -> None:
    """Units that are computed again together are gathered together, and that is said."""
    with open_two_and_control() as groups:

        def trained(reshard: ReshardPolicy, pools: PoolRegistry | None) -> dict[str, Tensor]:
            model = model_of(torch.float32, recompute=recompute)
            sharded = shard(model, groups, reshard=reshard, pools=pools)
            return train_in_pools(model, sharded, rank)

        reshard = ReshardPolicy()
        if recompute == "all blocks at once":
            with pytest.raises(PcommError, match=r"fsdp gather dp\[gather\](.|\n)*are in use"):
                trained(reshard, opened(groups)[1])
            reshard = ReshardPolicy("backward", "step")
        expected = trained(reshard, None)
        for name, value in trained(reshard, opened(groups)[1]).items():
            assert_equal(value, expected[name])


@ranks(2)
def test_a_step_that_fails_leaves_no_memory_behind(rank: int) -> None:
    with open_two_and_control() as groups:
        backend, registry = opened(groups)
        model = SmallModel()
        sharded = shard(model, groups, pools=registry)
        segments = sorted(backend.registered())
        for step in range(4):
            sharded.zero_grad()
            if step % 2:
                handle = model.blocks[1].register_forward_hook(throw)
                with pytest.raises(ArithmeticError):
                    model.loss(tokens(step, 0, rank))
                handle.remove()
            else:
                model.loss(tokens(step, 0, rank)).backward()
        assert segments_of(registry) == segments


@ranks(2)
def test_a_gradient_is_copied_to_where_it_is_registered(rank: int) -> None:
    """A unit of one parameter could reduce autograd's own tensor, which is in ordinary memory."""
    with open_two_and_control() as groups:
        _, registry = opened(groups)
        roles = roles_of(groups)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        shard(model, groups, units=[nn.Linear], pools=registry)
        watch = roles.reduce.collectives = InPoolsOnly(roles.reduce.collectives, registry)
        model(torch.ones(2, 4)).sum().backward()
        assert watch.counts == {"reduce_scatter": 3}
