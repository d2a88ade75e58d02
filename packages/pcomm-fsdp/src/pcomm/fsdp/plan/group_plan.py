"""Everything that is decided about one parameter group, once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core.groups.group import Group
from pcomm.fsdp.plan.flat_layout import FlatLayout
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy

__all__ = ["GroupPlan"]


@dataclass(frozen=True)
class GroupPlan:
    """The groups, formats and layout of the parameters of one unit, scope, dtype and kind.

    Made when the model is sharded and never changed. Buffers carry it, so no place where something
    is gathered or reduced chooses a group.

    Args:
        name: Unique in the model: the unit, and the scope and kind where there are several.
        unit: The unit that uses the parameters.
        scope: Name of the scope, empty for the model's own.
        names: Names of the parameters in the model.
        gather: Group that gathers parameters.
        reduce: Group that reduces gradients.
        replicate: Group over which gradients of shards are summed, if there are replicas.
        spread: Group with one rank for each set of other parameters of the scope.
        divisor: Number that summed gradients are divided by.
        param_dtype: Dtype of unsharded parameters.
        reduce_dtype: Dtype of unsharded gradients.
        main_dtype: Dtype of the shard.
        is_trainable: True if there are gradients at all.
        reshard: Time until which parameters and gradients stay unsharded.
        layout: Offset of each parameter in the flat buffer.
        gather_pool: Arena of the unsharded parameters, registered with `gather`; empty for
            ordinary memory.
        reduce_pool: Arena of unsharded gradients, registered with `reduce`; empty for ordinary
            memory.
    """

    name: str
    unit: str
    scope: str
    names: tuple[str, ...]
    gather: Group
    reduce: Group
    replicate: Group | None
    spread: Group | None
    divisor: float
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    main_dtype: torch.dtype
    is_trainable: bool
    reshard: ReshardPolicy
    layout: FlatLayout
    gather_pool: str = ""
    reduce_pool: str = ""

    @property
    def rank(self) -> int:
        """This rank's place among those that share the parameters."""
        return self.gather.rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold this shard."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def is_local(self) -> bool:
        """True if the parameters stay as they are: one rank, and nothing to convert."""
        return self.is_one_buffer and self.num_replicas == 1

    @property
    def is_one_buffer(self) -> bool:
        """True if the shard is the unsharded buffer: one rank, and nothing to convert."""
        return self.gather.size == 1 and self.param_dtype == self.main_dtype

    @property
    def cut_names(self) -> list[str]:
        """Parameters that are cut inside rows, and have shards of one dimension."""
        cut = self.layout.is_cut_inside_rows
        return [name for index, name in enumerate(self.names) if cut(index)]

    @property
    def takes_gradient_over(self) -> bool:
        """True if autograd's own tensor can be reduced: nothing has to be put beside it."""
        is_same = self.layout.is_one_parameter and self.param_dtype == self.reduce_dtype
        return is_same and not self.reduce_pool

    @property
    def predivisor(self) -> float:
        """By which gradients are divided before they are summed, a power of two.

        A sum of fp16 numbers over ranks may be too large where their mean is not. The smallest
        that is not below the root of the number of ranks, as in FSDP2: what is divided by more
        becomes too small instead. Other formats have room for the sum.
        """
        factor = 1
        while self.reduce_dtype == torch.float16 and factor * factor < self.reduce.size:
            factor *= 2
        return float(factor)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.layout.length * self.param_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return self.layout.length * self.reduce_dtype.itemsize

    @property
    def gather_bytes(self) -> int:
        """Least bytes that this rank sends in one gather."""
        return (self.gather.size - 1) * self.layout.shard_length * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Least bytes that this rank sends in one reduce."""
        return (self.reduce.size - 1) * self.layout.shard_length * self.reduce_dtype.itemsize

    def full_view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in an unsharded buffer of `layout.length` elements: a view."""
        start, shape = self.layout.offsets[index], self.layout.shapes[index]
        return flat[start : start + math.prod(shape)].view(shape)

    def shard_view(self, flat: Tensor, index: int) -> Tensor:
        """This rank's shard of parameter `index` in a flat shard: a view."""
        held = self.layout.shard_range(index, self.rank)
        shape = self.layout.local_shape(index, self.rank)
        return flat[held.offset : held.offset + held.length].view(shape)

    def lines(self) -> list[str]:
        """The plan as the ranks compare it: all but which rank this is."""
        kinds = f"{self.param_dtype} {self.reduce_dtype} {self.main_dtype}"
        what = f"{self.name}: {len(self.names)} parameters, {kinds}, divisor {self.divisor:g}"
        how = f"{self.reshard}, trainable {self.is_trainable}, replicas {self.num_replicas}"
        places = f"{self.layout.shapes} at {self.layout.offsets} of {self.layout.shard_length}"
        return [f"{what}, {how}, {', '.join(self.names)}", places]

    def describe(self) -> str:
        """Two lines for a report."""
        if self.is_local:
            return f"{self.name}: {len(self.names)} parameters left as they are, one rank"
        groups = f"gather {self.gather.key}, reduce {self.reduce.key}"
        if self.replicate is not None:
            groups += f", replicate {self.replicate.key}"
        kinds = f"{self.param_dtype}/{self.reduce_dtype}/{self.main_dtype}".replace("torch.", "")
        frozen = "" if self.is_trainable else ", frozen"
        head = f"{self.name}: {groups}, divisor {self.divisor:g}, {kinds}{frozen}"
        cut = f"\n    1-D for the optimizer: {', '.join(self.cut_names)}" if self.cut_names else ""
        return f"{head}\n    {self.layout.describe()}{cut}"
