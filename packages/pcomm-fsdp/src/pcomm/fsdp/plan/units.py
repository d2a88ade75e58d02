"""Units: the module that gathers each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from pcomm.core.errors import ConfigError

__all__ = ["ROOT", "Member", "Owner", "UnitModules", "Units", "find_units"]

ROOT = "(root)"
"""Name of the unit that holds what no other unit does."""

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


@dataclass
class Member:
    """One parameter of a unit.

    Args:
        name: First name of the parameter in the model.
        parameter: The parameter as it was before sharding.
        owners: Every module that holds it, with the name it has there.
        aliases: All its names in the model.
    """

    name: str
    parameter: nn.Parameter
    owners: list[Owner] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)


@dataclass
class UnitModules:
    """A module that gathers its parameters together.

    Args:
        name: Name of the module in the model.
        module: The module.
        members: Parameters of the module, without those of units inside it.
    """

    name: str
    module: nn.Module
    members: list[Member] = field(default_factory=list)


Units = Sequence[type[nn.Module] | nn.Module] | type[nn.Module]
"""Units as a caller passes them: classes and modules, or a single class."""


def find_units(model: nn.Module, units: Units) -> list[UnitModules]:
    """The units of a model, the root first, then in the order of `named_modules`. Local.

    Each parameter belongs to the innermost unit around the module that holds it.

    Args:
        model: The whole model.
        units: Classes, with every instance as a unit, and single modules; or one class.

    Raises:
        ConfigError: Something that is no unit of this model, or a parameter that belongs to two.
    """
    if isinstance(units, type):
        units = [units]
    if not isinstance(units, Iterable):
        raise _no_unit(units)
    for unit in units:
        is_class = isinstance(unit, type) and issubclass(unit, nn.Module)
        if not is_class and not isinstance(unit, nn.Module):
            raise _no_unit(unit)
    found: dict[nn.Module, UnitModules] = {model: UnitModules(ROOT, model)}
    matched: set[int] = set()
    for name, module in model.named_modules():
        for place, unit in enumerate(units):
            if isinstance(module, unit) if isinstance(unit, type) else module is unit:
                matched.add(place)
                if module is not model:
                    found[module] = UnitModules(name, module)
    for place, unit in enumerate(units):
        if place not in matched:
            kinds = sorted({type(module).__name__ for module in model.modules()})
            name = unit.__name__ if isinstance(unit, type) else type(unit).__name__
            raise ConfigError(
                f"fully_shard: unit {name}",
                found=f"a model of {', '.join(kinds)}",
                why="A unit is a part of the model, and nothing in this model is that part.",
                fix="Name classes of modules in the model, or modules of the model itself.",
            )
    members: dict[nn.Parameter, tuple[UnitModules, Member]] = {}
    _collect(model, "", found[model], found, members, set())
    return list(found.values())


def _collect(
    module: nn.Module,
    prefix: str,
    unit: UnitModules,
    found: dict[nn.Module, UnitModules],
    members: dict[nn.Parameter, tuple[UnitModules, Member]],
    seen: set[tuple[nn.Module, str]],
) -> None:
    unit = found.get(module, unit)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        full_name = f"{prefix}{name}"
        known = members.get(parameter)
        if known is None:
            member = Member(full_name, parameter)
            unit.members.append(member)
            members[parameter] = unit, member
        elif known[0] is not unit:
            raise ConfigError(
                f"fully_shard: parameter {known[1].name!r}",
                found=f"it is also {full_name!r}; the units are {known[0].name!r} and "
                f"{unit.name!r}",
                why="A unit gathers and releases its parameters alone, and reduces their gradients "
                "once.",
                fix="Make one unit of both, or neither a unit: tied weights may lie in the root.",
            )
        else:
            member = known[1]
        member.aliases.append(full_name)
        if (module, name) not in seen:
            # A module that is used under two names holds its parameters once.
            seen.add((module, name))
            member.owners.append((module, name))
    # Not `named_children`, which leaves out what it has seen: a module may have several names.
    for name, child in module._modules.items():
        if child is None:
            continue
        _collect(child, f"{prefix}{name}.", unit, found, members, seen)


def _no_unit(unit: object) -> ConfigError:
    return ConfigError(
        f"fully_shard: units, {unit!r:.80}",
        found=f"a {type(unit).__name__}",
        why="Units are classes of modules, which stand for all their instances, or modules.",
        fix="Pass a list, such as units=[Block] or units=list(model.layers), or one class.",
    )
