"""How torch.distributed.checkpoint writes and reads state that is looked up at that time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from pcomm.core.checkpoint.planners import ShardLoadPlanner, ShardSavePlanner
from pcomm.core.checkpoint.shard_view import ShardView
from pcomm.core.errors import DivergenceError
from pcomm.core.tensor_parallel.param_layout import ParamLayout
from pcomm.fsdp.state.state_view import VALUE, StateView, decoded

__all__ = ["StateLoadPlanner", "StateSavePlanner"]


class _Told(NamedTuple):
    """What a rank tells beside its pieces.

    Attributes:
        same: Values that other ranks have to have as well, by name.
        own: Names of what no rank has a part of: buffers, and parameters that are not sharded.
    """

    same: dict[str, str]
    own: frozenset[str]


class StateSavePlanner(ShardSavePlanner):
    """Writes regions, and refuses what should be the same on all ranks and is not.

    What is not cut may differ between ranks, as running averages of BatchNorm do. It is all written
    by the first rank that has it: torch would take each tensor of whoever has the least to write,
    the mean of one rank and the variance of another.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Look state up."""
        self._same: dict[str, str] = {}
        resolved: dict[str, ShardView] = {}
        for name, region in state_dict.items():
            if isinstance(region, StateView):
                own, found = region.saved(name)
                resolved[own] = found
                if not region.must_agree:
                    continue
                if own != name:
                    self._same[name] = bytes(found.tensor.tolist()).decode()
                elif not region.is_spread and not found.tensor.dim():
                    self._same[name] = repr(found.tensor.item())
            else:
                resolved[name] = region
        self._own = frozenset(name for name, region in resolved.items() if region.part is None)
        super().set_up_planner(resolved, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """All pieces that this rank holds, and what the others have to know."""
        told = _Told(self._same, self._own)
        return replace(super().create_local_plan(), planner_data=told)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks' values, and leave what is not cut to the first rank that has it.

        Raises:
            DivergenceError: They differ, and only one of them would be saved.
        """
        known: dict[str, tuple[int, str]] = {}
        for rank, plan in enumerate(all_plans):
            for name, value in plan.planner_data.same.items():
                first, expected = known.setdefault(name, (rank, value))
                if value != expected:
                    raise DivergenceError(
                        f"save_checkpoint: {name}",
                        found=f"{expected[:80]} on rank {first}, {value[:80]} on rank {rank}",
                        why="It is not spread like its parameter, so one value is saved for all.",
                        fix="Use an optimizer whose counts and averages do not depend on the part, "
                        "or leave that key out by keys=.",
                    )
        return super().create_global_plan(_written_by_first(all_plans))


def _written_by_first(plans: list[SavePlan]) -> list[SavePlan]:
    taken: set[MetadataIndex] = set()
    kept: list[SavePlan] = []
    for plan in plans:
        own = plan.planner_data.own
        items = [i for i in plan.items if i.index.fqn not in own or i.index not in taken]
        taken.update(item.index for item in items)
        kept.append(replace(plan, items=items))
    return kept


class StateLoadPlanner(ShardLoadPlanner):
    """Reads into regions; into state that is not there yet as it was saved."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Find out for each region of state what was saved of it."""
        assert metadata is not None
        self._tensors: list[tuple[StateView, Tensor]] = []
        self._values: list[tuple[StateView, Tensor]] = []
        resolved: dict[str, ShardView] = {}
        for name, region in state_dict.items():
            own, found = self._resolve(name, region, metadata.state_dict_metadata)
            resolved[own] = found
        super().set_up_planner(resolved, metadata, is_coordinator)

    def put(self) -> None:
        """Put what was loaded in its places. Local."""
        for region, tensor in self._tensors:
            region.put(tensor)
        for region, data in self._values:
            region.put(decoded(data))

    def _resolve(
        self, name: str, region: ShardView, saved: Mapping[str, object]
    ) -> tuple[str, ShardView]:
        if not isinstance(region, StateView):
            return name, region
        text = saved.get(name + VALUE)
        if isinstance(text, TensorStorageMetadata):
            data = region.tensor.new_empty(text.size, dtype=text.properties.dtype, device="cpu")
            self._values.append((region, data))
            return name + VALUE, ShardView(data, ParamLayout(), 0)
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return name, region
        target = region.target(found.size, found.properties.dtype)
        self._tensors.append((region, target))
        return name, region.of(target)
