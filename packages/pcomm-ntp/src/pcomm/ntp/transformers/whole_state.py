"""The state of a split model as that of the whole one, and back: names and shapes of the files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError, near_misses
from pcomm.core.tensor_parallel import ParamLayout, join_shards, param_layouts_of, take_shard

__all__ = ["load_whole_state_dict", "whole_state_dict"]


def whole_state_dict(model: nn.Module, collectives: Collectives) -> dict[str, Tensor]:
    """`model.state_dict()` with whole tensors, as the model had before `nonuniform`. Collective.

    `model.save_pretrained(directory, state_dict=...)` of it, on rank 0, writes a directory that
    `from_pretrained` reads.

    Args:
        model: Model of layers that declare `param_layouts`, as `nonuniform` makes them.
        collectives: Collectives of the tensor-parallel group, all ranks of which call this.

    Returns:
        Whole tensors by name on every rank, without gradients; those that no rank shares out are
        the model's own.
    """
    layouts = _layouts(model)
    found = {}
    for name, own in model.state_dict().items():
        found[name] = _joined(own, layouts.get(name, ParamLayout()), collectives)
    return found


def load_whole_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], collectives: Collectives
) -> None:
    """Copy this rank's shards of a whole state into a split model. Local.

    Args:
        model: Model of layers that declare `param_layouts`, as `nonuniform` makes them.
        state: Tensors of the whole model by name, such as `whole_state_dict` returns or a
            directory's safetensors hold; dtypes may differ from the model's.
        collectives: Collectives of the tensor-parallel group.

    Raises:
        ConfigError: A name is missing, or is not the model's; nothing was copied.
        LayoutError: A tensor has another shape than the whole one; nothing was copied.
    """
    layouts, own = _layouts(model), model.state_dict()
    odd = [*sorted(own.keys() - state.keys()), *sorted(state.keys() - own.keys())]
    if odd:
        is_missing = odd[0] in own
        raise ConfigError(
            f"load_whole_state_dict: {odd[0]!r}",
            found="a state without it" if is_missing else "a model without it",
            why=f"Names of both are equal; {len(odd)} are not.",
            fix=near_misses(odd[0], state if is_missing else own),
        )
    for name, shard in own.items():
        shape = layouts.get(name, ParamLayout()).logical_shape(shard.shape)
        if state[name].shape != shape:
            raise LayoutError(
                f"load_whole_state_dict: {name!r} of shape {tuple(state[name].shape)}",
                found=f"a model in which it is {tuple(shape)}, of which a rank has a part",
                why="Each rank takes its part of the whole tensor.",
                fix="Give the state of a whole model of this configuration.",
            )
    with torch.no_grad():
        for name, shard in own.items():
            split = layouts.get(name, ParamLayout())
            whole = state[name]
            if split.layout is not None:
                whole = take_shard(whole, split.layout, collectives.rank, dim=split.dim)
            shard.copy_(whole)


def _layouts(model: nn.Module) -> dict[str, ParamLayout]:
    """By every name: a parameter with two has one layout."""
    by_first = param_layouts_of(model)
    first = {id(own): name for name, own in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: by_first[first[id(own)]] for name, own in every}


def _joined(shard: Tensor, split: ParamLayout, collectives: Collectives) -> Tensor:
    layout = split.layout
    if layout is None or not split.is_split:
        return shard
    dim = split.dim % shard.dim()
    together = collectives.all_gather(shard.contiguous(), dim=dim, sizes=layout.sizes)
    return join_shards(together.split(list(layout.sizes), dim), layout, dim=dim)
