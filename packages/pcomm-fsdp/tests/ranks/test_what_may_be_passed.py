"""Units, roles and parameters of every kind: taken, or refused for the right reason."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardedOn
from torch.distributed.tensor import distribute_tensor

from fsdp_support.trainings import (
    Block,
    SmallModel,
    check_gradients,
    open_two,
    roles_of,
    shard,
    tokens,
)
from pcomm.core.errors import ConfigError
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy
from pcomm.fsdp.sharded import Sharded

# -- units, roles and parameters of every kind: taken, or refused for the right reason ----------


def built(kind: type[nn.Module] = nn.Sequential) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    return (kind(*layers) if kind is nn.Sequential else kind()).double()


class Again(nn.Module):
    """One module three times, under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)] * 3)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.last(x)
        return y


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def check(sharded: Sharded, reference: nn.Module, rank: int) -> None:
    for step in range(3):
        sharded.model(batch(step, rank)).square().mean().backward()
        for r in (0, 1):
            (reference(batch(step, r)).square().mean() / 2).backward()
        check_gradients(sharded, reference)


@ranks(2)
def test_a_module_of_several_names(rank: int) -> None:
    with open_two() as groups:
        for units in ([nn.Linear], []):
            model, reference = built(Again), built(Again)
            sharded = shard(model, groups, units=units)
            names = [name for name, _ in sharded.named_parameters()]
            assert names == [name for name, _ in reference.named_parameters()]
            check(sharded, reference, rank)
            state = sharded.full_state_dict()
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(state[name], value)


@ranks(2)
def test_units_and_roles_as_others_pass_them(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    nameless, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rep", "dp"))
    for given in (mesh, nameless, square, replicas):
        model, reference = built(), built()
        sharded = fully_shard(model, given, units=nn.Linear)
        check(sharded, reference, rank)
        assert len(sharded.plans) == 3
        sharded.close()


class Doubled(Tensor):
    """A weight that counts twice: what a quantised one does, in short."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * found if func is nn.functional.linear else found


class Named(Tensor):
    """A tensor of its own class, with which torch computes as with any other."""


@ranks(2)
def test_tensors_whose_class_computes_differently(rank: int) -> None:
    with open_two() as groups:
        model = built()
        model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(Doubled))  # type: ignore[index]
        with pytest.raises(ConfigError, match=r"'1\.weight'(.|\n)*a Doubled(.|\n)*a plain Param"):
            shard(model, groups, units=[nn.Linear])
        model, reference = built(), built()
        model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(Named))  # type: ignore[index]
        check(shard(model, groups, units=[nn.Linear]), reference, rank)


@ranks(2)
def test_what_is_refused(rank: int) -> None:
    cube = init_device_mesh("cpu", (1, 1, 2))
    mesh = init_device_mesh("cpu", (2,))
    wrong: Any
    with open_two() as groups:
        roles = roles_of(groups)
        for wrong, message in (
            (None, "a NoneType"),
            (groups, "a Groups"),
            (groups["dp", "gather"], "a Group"),
            (cube, "a mesh of 3 dimensions"),
        ):
            with pytest.raises(ConfigError, match=rf"roles(.|\n)*{message}"):
                fully_shard(built(), wrong, units=[nn.Linear])
        for wrong, message in (
            (["Linear"], "a str"),
            ([int], "a type"),
            (nn.Linear(2, 2), "a Linear"),
        ):
            with pytest.raises(ConfigError, match=rf"units(.|\n)*{message}(.|\n)*Pass a list"):
                fully_shard(built(), roles, units=wrong)
        model = built()
        weight = model[0].weight.detach()  # type: ignore[index]
        model[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [ShardedOn(0)]))  # type: ignore[index]
        with pytest.raises(ConfigError, match=r"'0\.weight'(.|\n)*a DTensor with placements"):
            fully_shard(model, roles, units=[nn.Linear])


@pytest.mark.parametrize("max_padding", [0.0, 0.6])
@ranks(2)
def test_weight_decay_groups_by_dimensions(rank: int, max_padding: float) -> None:
    """Only what is cut inside rows loses dimensions, and that is said."""
    listener = BufferingHandler(9)
    log = logging.getLogger("pcomm.fsdp")
    log.addHandler(listener)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(7, 3, bias=False))
    model.append(nn.Linear(2, 4))
    expected = {name for name, p in model.named_parameters() if p.dim() >= 2}
    with open_two() as groups:
        comm = CommPolicy(max_padding=max_padding)
        sharded = shard(model, groups, units=[], comm=comm)
        found = {name for name, p in sharded.named_parameters() if p.dim() >= 2}
        text = str(sharded.report())
    log.removeHandler(listener)
    lines = [record.getMessage() for record in listener.buffer]
    if max_padding:
        assert found == expected
        assert lines == []
        assert "1-D for the optimizer" not in text
    else:
        assert found == expected - {"1.weight"}
        assert [line.split(". ")[0] for line in lines] == [
            "cut inside rows, and 1-D for the optimizer: 1.weight"
        ]
        assert "1-D for the optimizer: 1.weight" in text


# -- a model on the meta device is initialised module by module, tied parameters once -----------


def _initialise(module: nn.Module) -> None:
    if isinstance(module, SmallModel):
        module.scale.fill_(0.7)
    else:
        module.reset_parameters()


@ranks(2)
def test_a_model_on_the_meta_device(rank: int) -> None:
    with torch.device("meta"):
        model = SmallModel()
    expected = SmallModel()
    torch.manual_seed(3)
    for module in expected.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with open_two() as groups:
        with pytest.raises(ConfigError, match=r"embedding\.weight' on meta"):
            shard(model, groups)
        torch.manual_seed(3)
        sharded = shard(
            model, groups, units=[Block], device=torch.device("cpu"), initialise=_initialise
        )
        state = sharded.full_state_dict()
        for name, value in expected.named_parameters():
            assert_equal(state[name], value.detach())
        model.loss(tokens(0, 0, rank)).backward()


@ranks(2)
def test_tied_parameters_are_one_while_they_are_initialised(rank: int) -> None:
    """A module may use what another one has drawn, and add to it."""
    with torch.device("meta"):
        tied = SmallModel(is_tied=True)

    def add(module: nn.Module) -> None:
        if module is tied.head:
            module.weight.data.add_(3.0)
        elif module is tied:
            tied.scale.fill_(0.7)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data.fill_(2.0)

    with open_two() as groups:
        cpu = torch.device("cpu")
        sharded = shard(tied, groups, units=[Block], device=cpu, initialise=add)
        state = sharded.full_state_dict()
        assert_equal(state["head.weight"], torch.full((7, 5), 5.0))
        assert_equal(state["embedding.weight"], state["head.weight"])
        assert tied.head.weight is tied.embedding.weight
        tied.loss(tokens(0, 0, rank)).backward()
