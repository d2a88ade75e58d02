"""What a model's tensor-parallel plan splits, and into which units.

transformers' configurations name modules and styles: `"layers.*.mlp.up_proj": "colwise"`. A plan
for equal ranks needs no more. Uneven ranks need to know what stays together, which the modules
tell: query heads stay with the key head that they read, and everything else is cut by columns.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from pcomm.core.errors import UnsupportedError
from pcomm.ntp.planning.units import Units

__all__ = ["PlannedPart", "Split", "parts_of", "units_of"]


# Styles whose inputs and outputs are whole on all ranks, and those that hand on a part.
_GATHERED = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
_PARTIAL = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_AROUND = (
    "all_reduce",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
)
# A table of rows that every rank holds computes the same as a split one, and may be tied.
_WHOLE = ("embedding_colwise", "embedding_rowwise", "local_params", "replicate")
_HEADS = ("head_dim", "head_size", "num_heads", "num_attention_heads", "num_key_value_groups")


@dataclass(frozen=True)
class Split:
    """How one parameter is split.

    Args:
        dim: Dimension that is split.
        units: Units of that dimension.
    """

    dim: int
    units: Units


@dataclass(frozen=True)
class PlannedPart:
    """A module, or a parameter of its own, that the plan names.

    Args:
        name: Name of the module, or of the parameter.
        style: The plan's style for it.
        splits: Split of each parameter that it holds, by the name in the model.
    """

    name: str
    style: str
    splits: Mapping[str, Split]


def units_of(model: nn.Module) -> dict[str, Units]:
    """The units of a transformers model by its own tensor-parallel plan, for `plan`. Local.

    In attention a unit is a key head with the query heads that read it; elsewhere it is a column.
    `work` is the number of elements. Whatever the plan does not name is whole on every rank, and
    so are embeddings, and a head that shares its weight with one.

    Args:
        model: Model with a `tp_plan`, the head included; of any dtype and device, `meta`, too.

    Returns:
        Units by name of the parameter, with `*` for the number of a layer where layers are alike.

    Raises:
        UnsupportedError: The model has no plan, or this cannot be cut unevenly: an unknown style,
            something else than an `nn.Linear`, heads that do not divide what is split, or experts
            of which only a part is named. It names the module and its style.
    """
    splits = {name: one for part in parts_of(model) for name, one in part.splits.items()}
    sizes = {name: own.numel() for name, own in model.named_parameters()}
    alike = defaultdict(list)
    for name in splits:
        alike[re.sub(r"\b\d+\b", "*", name)].append(name)
    found = {}
    for pattern, names in alike.items():
        units = {splits[name].units for name in names}
        matched = {name for name in sizes if fnmatchcase(name, pattern)}
        if len(units) == 1 and matched == set(names):
            found[pattern] = _with_work(units.pop(), sum(sizes[name] for name in names))
        else:
            found |= {name: _with_work(splits[name].units, sizes[name]) for name in names}
    return found


def _with_work(units: Units, work: int) -> Units:
    return Units(units.kind, units.count, units.sections, work)


def parts_of(model: nn.Module) -> list[PlannedPart]:
    """What the model's plan names and ranks compute in part, in the model's order. Local.

    Raises:
        UnsupportedError: See `units_of`.
    """
    named = _named_parts(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses: dict[int, int] = defaultdict(int)
    for one in parameters.values():
        uses[id(one)] += 1
    lengths: dict[str, dict[str, _Length]] = {}
    for name, style in list(named.items()):
        if style not in (*_GATHERED, *_PARTIAL):
            lengths[name] = {}
            continue
        own = _parameters_of(model, name, style)
        if any(uses[id(one)] > 1 for one in own.values()):
            if style not in _GATHERED:
                raise _refused(name, style, "a weight that another module has, too")
            # Both are whole before and after it: the weight stays so.
            del named[name]
            continue
        lengths[name] = _lengths(own, style)
    counts = _counts(model, named, lengths)
    return [
        PlannedPart(
            name,
            style,
            {
                key: Split(one.dim, _units(name, style, one, counts[name]))
                for key, one in lengths[name].items()
            },
        )
        for name, style in named.items()
    ]


@dataclass(frozen=True)
class _Length:
    """A dimension that is split: its length, and the sections side by side of which it consists."""

    dim: int
    length: int
    sections: int


def _named_parts(model: nn.Module) -> dict[str, str]:
    """The styles by full name, without those that leave a module whole."""
    told = getattr(model, "tp_plan", None)
    if not isinstance(told, Mapping) or not told:
        raise UnsupportedError(
            f"units_of: a model of {type(model).__name__}",
            found="no tp_plan",
            why="Which layers are split, and how, is read from the plan of its configuration.",
            fix="Give a model of transformers whose configuration has a base_model_tp_plan, or "
            "write its units and layers by hand.",
        )
    for name, module in model.named_modules():
        if getattr(module, "param_layouts", None):
            raise UnsupportedError(
                f"units_of: a model of {type(model).__name__}",
                found=f"{name!r}, a {type(module).__name__} that is split already",
                why="A model is split once, from its whole weights.",
                fix="Give a new model of the same configuration.",
            )
    names = [name for name, _ in model.named_modules() if name]
    found = {}
    for name in (*names, *(name for name, _ in model.named_parameters(remove_duplicate=False))):
        style = told.get(name) or told.get(re.sub(r"\b\d+\b", "*", name))
        if style is None or style in _WHOLE:
            continue
        if style not in (*_GATHERED, *_PARTIAL, *_AROUND):
            raise _refused(name, style, "a style that has no uneven form here")
        found[name] = str(style)
    if not found:
        raise UnsupportedError(
            f"units_of: a model of {type(model).__name__}",
            found=f"a plan of {', '.join(list(told)[:3])}, none of which is to be split here",
            why="A rank that computes all of the model gains nothing from the others.",
            fix="Look at model.tp_plan, and name the model's own modules in it.",
        )
    return found


def _parameters_of(model: nn.Module, name: str, style: str) -> dict[str, nn.Parameter]:
    """The parameters that a part splits, by their names in the model."""
    prefix, _, own = name.rpartition(".")
    holder = model.get_submodule(prefix)
    if own in holder._parameters:
        whole = holder._parameters[own]
        assert whole is not None
        if style in _GATHERED or whole.dim() > 3:
            raise _refused(name, style, f"a parameter of shape {tuple(whole.shape)}")
        return {name: whole}
    module = model.get_submodule(name)
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not is_plain or style == "packed_rowwise":
        raise _refused(name, style, f"a {type(module).__name__}")
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        module.__dict__.get("parametrizations"),
    )
    if any(hooks) or "forward" in module.__dict__ or "weight" not in module._parameters:
        raise _refused(name, style, "a layer with hooks or another forward, which would be lost")
    assert isinstance(module, nn.Linear)
    found = {f"{name}.weight": module.get_parameter("weight")}
    if module.bias is not None and style.endswith(("colwise", "gather_output", "colwise_rep")):
        found[f"{name}.bias"] = module.get_parameter("bias")
    return found


def _lengths(own: Mapping[str, nn.Parameter], style: str) -> dict[str, _Length]:
    found = {}
    for key, whole in own.items():
        is_row = style.startswith(("rowwise", "packed_rowwise"))
        dim = whole.dim() - 1 if is_row else max(0, whole.dim() - 2)
        sections = 2 if style.startswith("packed") else 1
        found[key] = _Length(dim, whole.shape[dim], sections)
    return found


def _counts(
    model: nn.Module, named: Mapping[str, str], lengths: Mapping[str, Mapping[str, _Length]]
) -> dict[str, int]:
    """The number of units of each part: equal for those that hand their parts to each other."""
    counts = {}
    blocks: dict[str, list[str]] = defaultdict(list)
    for name, style in named.items():
        if style in _PARTIAL:
            blocks[name.rpartition(".")[0]].append(name)
        elif style in _GATHERED:
            counts[name] = math.gcd(*(one.length for one in lengths[name].values()))
        else:
            counts[name] = 0
    for block, names in blocks.items():
        _check_all_named(model, block, names, named)
    for block, names in _closed_blocks(blocks, named).items():
        columns = [one.length // one.sections for name in names for one in lengths[name].values()]
        heads = _key_heads(model, block, names)
        if not heads and len(set(columns)) > 1:
            found = " and ".join(map(str, sorted(set(columns))))
            raise _refused(names[-1], named[names[-1]], f"{found} columns beside it, and no heads")
        counts |= dict.fromkeys(names, heads or min(columns))
    return counts


def _check_all_named(
    model: nn.Module, block: str, names: Iterable[str], named: Mapping[str, str]
) -> None:
    """Refuse a parameter that works on parts, and gets a part of its gradient on each rank."""
    own = {name.rpartition(".")[2] for name in names}
    if "kv_b_proj" in own:
        # Projections to a latent vector, and what chooses tokens by it, come before the split.
        return
    for key, _ in model.get_submodule(block).named_parameters():
        name = f"{block}.{key}"
        if name not in named and name.rpartition(".")[0] not in named:
            first = next(iter(names))
            raise _refused(first, named[first], f"{name!r} beside it, which the plan leaves out")


def _closed_blocks(
    blocks: Mapping[str, list[str]], named: Mapping[str, str]
) -> dict[str, list[str]]:
    """Blocks with the parts that they hand on and those that take them, by their common module."""
    found: dict[str, list[str]] = defaultdict(list)
    for block, names in blocks.items():
        is_closed = {"row" in named[name] for name in names} == {True, False}
        # A linear layer may have a module of its own around it.
        is_inner = not is_closed and named.get(block) != "moe_tp_experts" and block not in found
        found[block.rpartition(".")[0] if is_inner and len(names) == 1 else block] += names
    for names in found.values():
        if {"row" in named[name] for name in names} != {True, False}:
            raise _refused(
                names[0], named[names[0]], "no layer beside it that takes or gives parts"
            )
    return found


def _key_heads(model: nn.Module, block: str, names: Iterable[str]) -> int:
    """Number of key heads of an attention module; 0 of another one."""
    module = model.get_submodule(block)
    own = {name.rpartition(".")[2]: name for name in names}
    if not any(hasattr(module, one) for one in _HEADS):
        return 0
    config = getattr(module, "config", None)

    def told(*attributes: str) -> int:
        for holder in (module, config):
            for attribute in attributes:
                number = getattr(holder, attribute, None)
                if isinstance(number, int):
                    return number
        return 0

    queries = ("num_heads", "num_attention_heads")
    if "kv_b_proj" in own:
        # Each head has keys and values of its own, from a common latent vector.
        return told(*queries)
    dim = getattr(module, "head_dim", None)
    if "k_proj" in own and isinstance(dim, int):
        width: int = model.get_submodule(own["k_proj"]).out_features  # type: ignore[assignment]
        if width % dim == 0:
            return width // dim
    return told("num_key_value_heads", "num_kv_heads", *queries)


def _units(name: str, style: str, one: _Length, count: int) -> Units:
    positions = one.length // one.sections
    if one.length % one.sections or positions % count:
        told = f"{positions} columns, which {count} heads do not divide"
        raise _refused(name, style, told)
    block = positions // count
    return Units("gated" if one.sections == 2 else "columns", count, (block,) * one.sections)


def _refused(name: str, style: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"units_of: {name!r}, which the model's plan calls {style!r}",
        found=found,
        why="Ranks with unequal shares need whole heads or columns of plain linear layers and "
        "parameters, and have to hand them to each other.",
        fix="Change model.tp_plan: give what works on parts a style, such as "
        '"replicated_with_grad_allreduce" for a norm of heads; or drop the styles of all layers '
        "that exchange parts, which are whole then.",
    )
