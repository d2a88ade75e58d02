"""Models of transformers in uneven parts beside the whole model, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

from core_support.tiny_transformers import tiny_config, tiny_model
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.tensor_parallel import param_layouts_of, take_shard
from pcomm.core.topology import Topology
from pcomm.ntp import Failures, GradSync, NtpPlan, grad_groups, nonuniform, plan, units_of
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners
from pcomm.ntp.sync.grad_groups import group_names, tensor_groups
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

__all__ = ["assert_trains_like_one_process", "causal_families", "foreign_model", "plan_for"]

_SEQUENCES, _LENGTH, _STEPS = 4, 7, 2


def causal_families() -> dict[str, str]:
    """The class of the causal language model of each kind of configuration."""
    return dict(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def foreign_model(kind: str, *, key_heads: int | None = None) -> nn.Module:
    """A tiny causal language model of `kind` in fp64, equal in each call.

    Args:
        kind: Type of the model's configuration.
        key_heads: Number of key heads where the configuration has one.
    """
    cls = getattr(transformers, causal_families()[kind])
    config = tiny_config(kind, decoder=True)
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        for name in (
            "num_key_value_heads",
            "swa_num_key_value_heads",
            "num_global_key_value_heads",
        ):
            if key_heads is not None and isinstance(vars(part).get(name), int):
                setattr(part, name, key_heads)
    # Grouped products have no fp64.
    config._experts_implementation = "eager"
    model: nn.Module = tiny_model(cls, config).double()
    with torch.no_grad():
        # Larger than initialised, so that every layer shows in the logits.
        generator = torch.Generator().manual_seed(1)
        for own in model.parameters():
            noise = torch.randn(own.shape, generator=generator, dtype=torch.float64)
            own.add_(noise, alpha=0.05)
    return model


def plan_for(degrees: tuple[int, ...], model: nn.Module) -> NtpPlan:
    """A plan of replicas with these degrees."""
    full = max(degrees)
    gone = [dp * full + tp for dp, own in enumerate(degrees) for tp in range(full - own)]
    topology = Topology({"dp": len(degrees), "tp": full})
    made = plan(topology, Failures.from_global_ranks(gone), units_of(model))
    assert made.degrees == tuple((own,) for own in degrees)
    return made


class _AllInFp64(TorchFunctionMode):
    """fp64 wherever a model computes in fp32 on its own account: norms, softmax, rotary angles."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        found = {key: _wide(one) for key, one in (kwargs or {}).items()}
        result = func(*map(_wide, args), **found)
        return result.double() if func is Tensor.type_as else result


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)


def _wide(one: Any) -> Any:
    return torch.float64 if one is torch.float32 else one


def assert_trains_like_one_process(
    whole: nn.Module,
    degrees: tuple[int, ...],
    *,
    atol: float = 1e-11,
    copies: int | None = None,
) -> None:
    """Logits, loss, gradients and parameters of two steps are those of the whole model.

    Every number is relative to the largest of its tensor, or to 1.
    """
    made = plan_for(degrees, whole)
    models = {rank: copy.deepcopy(whole) for rank in made.topology.ranks}
    dense = _train(whole, lambda ids: [slice(None)], None, None)
    names = group_names(made, "interval")
    tensors = [
        GroupSpec.of_ranks(one.ranks, f"tensor{number}")
        for number, one in enumerate(tensor_groups(made, 0))
    ]

    def task(rank: int, groups: Groups) -> None:
        place, own = made.place(rank), models[rank]
        group = next(g for g in groups.values() if g.name.startswith("tensor"))
        nonuniform(own, made, group.collectives, rank=rank)
        shares = made.token_shares(_SEQUENCES)
        first = sum(shares[: place.replica])
        rows = slice(first, first + shares[place.replica])
        sync = GradSync(made, own, groups, rank=rank)

        def owners(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
            if copies is None:
                return optimizer.step  # type: ignore[return-value]
            layouts = param_layouts_of(own)
            sizes = unit_sizes(made, own, optimizer, layouts)
            dealt = Owners.deal(made, rank, sizes, Hosts.of(made.topology, copies))
            owned = OwnedParams(made, rank, own, optimizer, layouts, dealt)

            def step() -> None:
                owned.step()
                owned.gather_weights(lambda ranks: groups[names[ranks]])

            return step

        found = _train(own, lambda ids: [rows], sync, owners)
        layouts = param_layouts_of(own)
        assert found[0].keys() == dense[0].keys()
        for step, (mine, full) in enumerate(zip(found, dense, strict=True)):
            for name, one in mine.items():
                expected = full[name]
                if name == "logits":
                    expected = expected[rows]
                elif (split := layouts[name.removeprefix("gradient of ")]).layout is not None:
                    expected = take_shard(expected, split.layout, place.index, dim=split.dim)
                assert one.shape == expected.shape, (step, name, one.shape, expected.shape)
                off = float((one - expected).abs().max()) if one.numel() else 0.0
                limit = atol * max(1.0, float(full[name].abs().max()))
                assert off <= limit, f"step {step}, {name}: {off} > {limit}"
        sync.close()

    run_on_virtual_groups(made.topology, [*tensors, *grad_groups(made)], task)


def _train(
    model: nn.Module,
    parts: Callable[[Tensor], list[slice]],
    sync: GradSync | None,
    owners: Callable[[torch.optim.Optimizer], Callable[[], None]] | None,
) -> list[dict[str, Tensor]]:
    """What each step has: logits of these rows, and all gradients and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    apply = optimizer.step if owners is None else owners(optimizer)
    vocabulary, found = _vocabulary(model), []
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(4, min(100, vocabulary), (_SEQUENCES, _LENGTH + 1), generator=generator)
        (rows,) = parts(ids)
        told = ids[rows]
        with _AllInFp64():
            logits = model(input_ids=told[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), told[:, 1:].flatten(), reduction="sum")
        loss = loss / (_SEQUENCES * _LENGTH)
        if sync is None:
            loss.backward()
        else:
            with sync.accumulate():
                loss.backward()
            sync.finish()
        state = {"logits": logits.detach()}
        for name, own in model.named_parameters():
            gradient = own.grad if own.grad is not None else torch.zeros_like(own)
            if own.requires_grad:
                state[f"gradient of {name}"] = gradient.clone()
        apply()
        state |= {name: own.detach().clone() for name, own in model.named_parameters()}
        if sync is None:
            optimizer.zero_grad()
        else:
            sync.zero_grad()
        found.append(state)
    return found
