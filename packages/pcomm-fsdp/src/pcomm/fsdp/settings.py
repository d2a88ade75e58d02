"""Choices of a caller of `fully_shard`: groups, scopes, resharding, communication, formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.groups.group import Group

__all__ = [
    "CommPolicy",
    "Keep",
    "Precision",
    "ReshardPolicy",
    "Roles",
    "Scope",
    "roles_from",
]


@dataclass(frozen=True)
class Roles:
    """The groups of one scope.

    Args:
        gather: Ranks that share each parameter, and the communicator that gathers them.
        reduce: The same ranks in the same order; its communicator reduces gradients. With one of
            its own, gathers and reduces do not queue behind each other.
        replicate: HSDP: ranks that hold the same shard, one of each `gather` group.
    """

    gather: Group
    reduce: Group
    replicate: Group | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.gather.size * (1 if self.replicate is None else self.replicate.size)


@dataclass(frozen=True)
class Scope:
    """Parameters with groups or number formats of their own, such as those of experts.

    Args:
        selects: Function of a parameter's name and the parameter; True if it is of this scope.
        roles: Groups that gather and reduce these parameters.
        divisor: Number that the summed gradient is divided by; None for that of the model. With
            expert parallelism that is right: an expert's gradient on one rank already holds the
            tokens of the whole expert-parallel group, so the sum over *its* replicas is that over
            all ranks.
        reshard: Time until which parameters and gradients stay unsharded; None for the model's.
        spread: Ranks that hold *other* parameters of this scope, such as the expert-parallel
            group; the norm of all gradients sums over them.
        precision: Number formats; None for those of the model. The inputs of units are cast, or
            not, as the model's say, since a unit may have parameters of several scopes.
    """

    selects: Callable[[str, nn.Parameter], bool]
    roles: Roles
    divisor: float | None = None
    reshard: ReshardPolicy | None = None
    spread: Group | None = None
    precision: Precision | None = None


def roles_from(given: Roles | DeviceMesh) -> Roles:
    """Roles as they are, or those that FSDP2 gives the dimensions of a mesh. Local.

    A mesh has one communicator a dimension, which then gathers and reduces. Of two dimensions the
    second one shards and the first one replicates.

    Raises:
        ConfigError: Something else, or a mesh of more dimensions.
    """
    if isinstance(given, Roles):
        return given
    if not isinstance(given, DeviceMesh):
        raise ConfigError(
            f"fully_shard: roles, {given!r:.80}",
            found=f"a {type(given).__name__}",
            why="Roles name the groups that gather parameters and reduce gradients.",
            fix='Pass Roles(gather=groups["dp", "gather"], reduce=groups["dp", "reduce"]), of '
            "groups that open_groups has opened, or a DeviceMesh.",
        )
    if given.ndim > 2:
        raise ConfigError(
            f"fully_shard: roles, {given}",
            found=f"a mesh of {given.ndim} dimensions",
            why="One dimension shards, and a second one replicates.",
            fix="Pass a part of the mesh, such as mesh['dp'], or Roles.",
        )
    names = given.mesh_dim_names or tuple(f"dim{number}" for number in range(given.ndim))
    *outer, inner = (
        Group.from_process_group(name, given.get_group(number)) for number, name in enumerate(names)
    )
    return Roles(inner, inner, *outer)


def group_from(asked: str, given: Group | dist.ProcessGroup | DeviceMesh) -> Group:
    """A group as it is, or that of torch's group or of a mesh of one dimension. Local.

    Raises:
        ConfigError: Something else, or a mesh of several dimensions.
    """
    if isinstance(given, Group):
        return given
    if isinstance(given, dist.ProcessGroup):
        return Group.from_process_group(asked, given)
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        return Group.from_process_group(asked, given.get_group())
    is_mesh = isinstance(given, DeviceMesh)
    raise ConfigError(
        f"{asked}: {given!r:.80}",
        found=f"a mesh of {given.ndim} dimensions" if is_mesh else f"a {type(given).__name__}",
        why="It is done by the ranks of one group.",
        fix="Pass a Group, a ProcessGroup such as dist.group.WORLD, or a DeviceMesh of one "
        "dimension, such as mesh['dp'].",
    )


Keep = Literal["use", "backward", "step", "always"]
Reduce = Literal["micro_batch", "step"]


@dataclass(frozen=True)
class ReshardPolicy:
    """The time until which a scope's parameters stay gathered, and when its gradients are reduced.

    Optimizer state and main weights are always shards. HSDP is none of these fields: it is a
    `replicate` group in `Roles`, and goes with each of them.

    Args:
        keep: The time that parameters stay gathered: `"use"` to the end of the unit's forward and
            of its backward, `"backward"` from its forward to the end of its backward, `"step"` to
            the last backward of the step, `"always"` until new values take the same memory.
        reduce: The time of the reduce, in each `"micro_batch"` or once a `"step"`; until then
            gradients add up unsharded, which is memory for communication.

    Raises:
        ConfigError: Another word.
    """

    keep: Keep = "use"
    reduce: Reduce = "micro_batch"

    def __post_init__(self) -> None:
        for name, value, words in (
            ("keep", self.keep, get_args(Keep)),
            ("reduce", self.reduce, get_args(Reduce)),
        ):
            if value not in words:
                raise ConfigError(
                    f"ReshardPolicy({name}={value!r})",
                    found=f"the value {value!r}",
                    why=f"{name} is one of {', '.join(words)}.",
                    fix=near_misses(str(value), words),
                )

    @classmethod
    def zero1(cls) -> ReshardPolicy:
        """Optimizer state sharded; parameters whole, gradients whole until the end of the step."""
        return cls("always", "step")

    @classmethod
    def zero2(cls) -> ReshardPolicy:
        """Gradients sharded too: reduced in each micro-batch; parameters gathered once a step."""
        return cls("step", "micro_batch")

    @classmethod
    def zero3(cls, *, reduce: Reduce = "micro_batch") -> ReshardPolicy:
        """Parameters sharded too: gathered for each use."""
        return cls("use", reduce)


@dataclass(frozen=True)
class CommPolicy:
    """The spread of gathers and reduces over time.

    Args:
        separate: `"always"` takes the gather and the reduce group as given; `"never"` sends both
            through the gather group; `"auto"` measures both ways when the model is sharded, and
            shares the gather group where separation gains less than 3 %.
        prefetch: Units that are gathered ahead of the one in use, forward and backward. The last
            `1 + prefetch` units of forward stay gathered for backward.
        prefetch_bytes: Most bytes of this rank's units gathered ahead; None for no limit. One unit
            may always be gathered ahead.
        inflight_reduce: Units with a reduce in flight while the next one computes. One keeps a link
            busy as long as units are of about the same size.
        max_padding: Largest fraction of a flat buffer that may be padding so that shards end at row
            boundaries; beyond it shards are cut inside rows.
        checks_first_step: True to have ranks compare their steps, through the store, before each
            gather that no schedule foresaw, such as those of the first step. With False, ranks
            with units in different orders find out where they depart from a schedule, at the end
            of that micro-batch, or by a time limit.
        prefetch_backward: Units that are gathered ahead in backward; None for `prefetch`. With 0 a
            gather is issued when the unit before it has ended, so that a unit's computation has
            one gathered unit less beside it. Each gather of backward is then waited for unless
            communication takes longer than computation anyway.
    """

    separate: Literal["auto", "always", "never"] = "always"
    prefetch: int = 1
    prefetch_bytes: int | None = None
    inflight_reduce: int = 1
    max_padding: float = 0.1
    checks_first_step: bool = True
    prefetch_backward: int | None = None

    @property
    def most_prefetch(self) -> int:
        """The larger depth of forward and backward."""
        return max(self.prefetch, self.prefetch_backward or 0)

    def __post_init__(self) -> None:
        depths = [(self.prefetch, 0), (self.inflight_reduce, 1)]
        if self.prefetch_backward is not None:
            depths.append((self.prefetch_backward, 0))
        if not all(_is_whole(value, least) for value, least in depths):
            raise ConfigError(
                f"CommPolicy(prefetch={self.prefetch}, inflight_reduce={self.inflight_reduce}, "
                f"prefetch_backward={self.prefetch_backward})",
                found="a depth that cannot be",
                why="Nothing can be gathered before step 0, and a reduce needs a buffer to be in.",
                fix="Use integers: prefetch >= 0, prefetch_backward >= 0 and inflight_reduce >= 1.",
            )
        if self.prefetch_bytes is not None and not _is_whole(self.prefetch_bytes, 0):
            raise ConfigError(
                f"CommPolicy(prefetch_bytes={self.prefetch_bytes!r})",
                found="no number of bytes",
                why="It is the most that units gathered ahead may take.",
                fix="Use an integer >= 0, or None for no limit.",
            )
        if not isinstance(self.max_padding, int | float) or not 0 <= self.max_padding < 1:
            raise ConfigError(
                f"CommPolicy(max_padding={self.max_padding!r})",
                found="no fraction",
                why="It is the part of a buffer that may be padding.",
                fix="Use a number from 0 up to, and without, 1, such as 0.1.",
            )
        if self.separate not in ("auto", "always", "never"):
            raise ConfigError(
                f"CommPolicy(separate={self.separate!r})",
                found="an unknown word",
                why="Gathers and reduces share a communicator, or they do not.",
                fix="Use 'auto', 'always' or 'never'.",
            )


@dataclass(frozen=True)
class Precision:
    """Number formats of one parameter's copies; None takes the next one named.

    Args:
        param_dtype: Dtype of unsharded parameters, of the computation and of gathers on the wire;
            None for that of the main weights.
        reduce_dtype: Dtype of unsharded gradients and of reduces on the wire; None for
            `param_dtype`.
        main_dtype: Dtype of shards and of their gradients, which the optimizer sees; None for the
            dtype that the parameter has when it is sharded.
        casts_inputs: True to cast floating-point inputs of a unit to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_dtype: torch.dtype | None = None
    casts_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "main_dtype"):
            value = getattr(self, name)
            is_one = isinstance(value, torch.dtype) and value.is_floating_point
            if value is not None and not (is_one and value.itemsize > 1):
                raise ConfigError(
                    f"Precision({name}={value!r})",
                    found="no floating-point format of 16, 32 or 64 bits",
                    why="Parameters and gradients are converted to it, gathered and summed in it.",
                    fix="Use torch.float32, torch.bfloat16, torch.float16 or torch.float64.",
                )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
