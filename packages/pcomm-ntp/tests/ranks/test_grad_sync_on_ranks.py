"""Sums over replicas of different degrees between processes, by gloo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntp_support.small_training import (
    assert_training,
    train,
    train_dense,
    training_specs,
    training_units,
)
from ntp_support.tagged_sums import TaggedModel, summed_gradients, tagged_units, tags
from pcomm.core import Group, Topology, open_groups
from pcomm.core.collectives import SpyCollectives
from pcomm.core.control import default_control
from pcomm.core.tensor_parallel import ParamLayout, take_shard
from pcomm.core.testing import ranks
from pcomm.ntp import Coord, Failures, GradSync, NtpPlan, Units, grad_groups, plan
from pcomm.ntp.sync.grad_groups import Strategy

# Far beyond what any of these tests may take: a rank that waits for it fails the test.
WAIT_S = 3600.0
# Of two groups of three ranks the second one has one rank left.
TOPOLOGY = Topology({"dp": 2, "tp": 3})
DOWN = Failures.at(Coord(dp=1, tp=1), Coord(dp=1, tp=2))
WEIGHTS = (0.5, 2.0)


def opened(made, specs, collectives=None):
    """Groups of the ranks that are left."""
    return open_groups(
        made.topology,
        specs,
        control=default_control(range(4)),
        timeout_s=WAIT_S,
        collectives=collectives,
    )


@ranks(4)
def test_two_at_once_whose_sums_are_in_flight_together(rank: int) -> None:
    made = plan(TOPOLOGY, DOWN, tagged_units())
    assert made.degrees == ((3,), (1,))
    expected = summed_gradients(dict(enumerate(WEIGHTS)))
    replica = made.place(rank).replica
    with (
        opened(made, list(grad_groups(made))) as one,
        opened(made, list(grad_groups(made, "gather-core"))) as other,
    ):
        models = [TaggedModel(made, rank) for _ in range(3)]
        syncs = [
            GradSync(made, models[0], one, rank=rank, bucket_bytes=500),
            GradSync(made, models[1], other, rank=rank, bucket_bytes=900, strategy="gather-core"),
            # Over the communicators of the first.
            GradSync(made, models[2], one, rank=rank, bucket_bytes=200),
        ]
        for _ in range(2):
            for model, sync in zip(models, syncs, strict=True):
                with sync.accumulate(weight=WEIGHTS[replica]):
                    model.loss(tags(replica)).backward()
            for model, sync in zip(models, syncs, strict=True):
                sync.finish()
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        assert parameter.grad is not None
                        assert torch.equal(parameter.grad, model.own(name, expected[name])), name
                sync.zero_grad()
        norms = []
        for model, sync in zip(models, syncs, strict=True):
            with sync.accumulate():
                model.loss(tags(replica)).backward()
            sync.finish()
            norms.append(sync.clip_grad_norm_(1.0))
        assert norms[0] == norms[1] == norms[2]
        gathered = one["ntp.all"].collectives.all_gather(norms[0].view(1))
        assert (gathered == norms[0]).all()


class Wide(nn.Module):
    """A column and a row whose shards are above every threshold of core's operations."""

    def __init__(self, made: NtpPlan, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        place = made.place(rank)
        layout = made.layout("*", place.replica)
        self.param_layouts = {"up": ParamLayout(layout), "down": ParamLayout(layout, 1)}
        self.shapes = {"up": (1000, 640), "down": (640, 1000)}
        for name, shape in self.shapes.items():
            own = self.own(name, torch.empty(shape, dtype=dtype), place.index)
            self.register_parameter(name, nn.Parameter(torch.zeros_like(own)))

    def own(self, name: str, whole: Tensor, index: int) -> Tensor:
        param_layout = self.param_layouts[name]
        assert param_layout.layout is not None
        return take_shard(whole, param_layout.layout, index, dim=param_layout.dim)


@pytest.mark.parametrize("strategy", ["interval", "gather-core"])
@ranks(4)
def test_shards_above_every_threshold(rank: int, strategy: Strategy) -> None:
    """Bytes: those of one all-reduce of a shard over two replicas, 2 P / N / 2 x 2 in all."""
    made = plan(TOPOLOGY, DOWN, {"*": Units.columns(1000)})
    place = made.place(rank)
    spies: dict[str, SpyCollectives] = {}

    def spied(group: Group) -> SpyCollectives:
        return spies.setdefault(group.name, SpyCollectives(group.collectives))

    with opened(made, list(grad_groups(made, strategy)), spied) as groups:
        model = Wide(made, rank, torch.bfloat16)
        sync = GradSync(made, model, groups, rank=rank, strategy=strategy, bucket_bytes=2**20)
        generator = torch.Generator().manual_seed(1)
        wholes = {
            name: torch.randint(-100, 100, (2, *shape), generator=generator).bfloat16()
            for name, shape in model.shapes.items()
        }
        with sync.accumulate(weight=WEIGHTS[place.replica]):
            terms = [
                (parameter * model.own(name, wholes[name][place.replica], place.index)).sum()
                for name, parameter in model.named_parameters()
            ]
            torch.stack(terms).sum().backward()
            started = sum(len(spy.calls) for spy in spies.values())
        assert started
        sync.finish()
        squares = 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            # Exact in fp32, and rounded once.
            total = sum(w * one.float() for w, one in zip(WEIGHTS, wholes[name], strict=True))
            assert isinstance(total, Tensor)
            expected = model.own(name, total.bfloat16(), place.index)
            assert torch.equal(parameter.grad, expected), name
            squares += float(total.bfloat16().double().square().sum())
        sent = {name: spy.sent_bytes for name, spy in spies.items()}
        # A norm of 16 bits would be off by 1e-3.
        assert float(sync.grad_norm()) == pytest.approx(squares**0.5, rel=1e-5)
        shard_bytes = 4 * sum(one.numel() for one in model.parameters())
        if strategy == "interval":
            assert {op for spy in spies.values() for op in spy.counts} == {"all_reduce"}
            assert sum(sent.values()) == shard_bytes
        elif place.replica == 0:
            assert any("all_to_all" in spy.counts for spy in spies.values())


@pytest.mark.parametrize("strategy", ["interval", "gather-core"])
@ranks(4)
def test_training_equals_that_of_the_whole_model(rank: int, strategy: Strategy) -> None:
    """Three replicas: whatever order a backend adds in, each of them gets the same bits."""
    # Ranks 0, 1 and 2 are the first ones of a replica; rank 3 is the second one of the first.
    topology = Topology({"tp": 2, "dp": 3})
    down = Failures.from_global_ranks([4, 5])
    made = plan(topology, down, training_units())
    assert made.degrees == ((2,), (1,), (1,))
    with opened(made, training_specs(made, strategy)) as groups:
        found = train(made, rank, groups, strategy=strategy)
        assert_training(made, rank, found, train_dense(), atol=1e-12)
        collectives = groups["ntp.all"].collectives
        last = found[-1].tensors
        first, second = made.layout("embedding.weight", 0).sizes
        sizes = [first, first + second, first + second, second]
        for mine in last["embedding.weight"]:
            one, two, three, rest = collectives.all_gather(mine, sizes=sizes).split(sizes)
            assert torch.equal(two, three)
            assert torch.equal(torch.cat([one, rest]), two)
        for mine in last["norm.weight"]:
            one, *others = collectives.all_gather(mine).chunk(4)
            assert all(torch.equal(one, other) for other in others)
