"""What `separate="auto"` decides: does a second communicator pay? Measured by trying both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pcomm.core.groups.group import Group
from pcomm.fsdp.plan.group_plan import GroupPlan, PlannedGroup

__all__ = ["Separation", "decide_separation", "measure_separation"]

_ROUNDS = 5
_LEAST_GAIN = 0.03
# Enough to be mostly bandwidth, so that a large model does not make the start slow.
_MOST_BYTES = 32 << 20


def decide_separation(
    planned: Sequence[PlannedGroup], device: torch.device
) -> tuple[list[PlannedGroup], list[Separation]]:
    """Measure each pair of groups once, and share where separation does not pay. Collective."""
    largest: dict[tuple[int, int], GroupPlan] = {}
    for plan, _ in planned:
        pair = id(plan.gather.process_group), id(plan.reduce.process_group)
        if plan.gather.size > 1 and plan.is_trainable and pair[0] != pair[1]:
            other = largest.setdefault(pair, plan)
            largest[pair] = max(plan, other, key=lambda p: p.layout.length)
    found = {
        pair: measure_separation(
            plan.gather,
            plan.reduce,
            num_elements=plan.layout.length,
            gather_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            device=device,
        )
        for pair, plan in largest.items()
    }
    decided = []
    for plan, members in planned:
        separation = found.get((id(plan.gather.process_group), id(plan.reduce.process_group)))
        shares = separation is not None and not separation.pays
        decided.append(PlannedGroup(replace(plan, reduce=plan.gather) if shares else plan, members))
    return decided, list(found.values())


@dataclass(frozen=True)
class Separation:
    """Measurements of one pair of groups, the same on all ranks.

    Args:
        gather: The gather group.
        reduce: The reduce group.
        gather_s: Seconds of a gather alone.
        reduce_s: Seconds of a reduce alone.
        shared_s: Seconds of both at once on the gather group's communicator.
        separate_s: Seconds of both at once, each on its own.
        extra_bytes: Device memory that the second communicator took; None where it cannot be seen,
            as on the CPU.
    """

    gather: str
    reduce: str
    gather_s: float
    reduce_s: float
    shared_s: float
    separate_s: float
    extra_bytes: int | None

    @property
    def gain(self) -> float:
        """Fraction of the shared time that separation saves; negative if it takes longer."""
        return 1 - self.separate_s / self.shared_s

    @property
    def pays(self) -> bool:
        """True if it saves at least 3 %."""
        return self.gain >= _LEAST_GAIN

    def describe(self) -> str:
        """One line for a report."""
        alone = f"gather {self.gather_s * 1e3:.2f} ms, reduce {self.reduce_s * 1e3:.2f} ms"
        both = f"both {self.shared_s * 1e3:.2f} ms shared, {self.separate_s * 1e3:.2f} ms separate"
        memory = "unknown" if self.extra_bytes is None else f"{self.extra_bytes / 2**20:.0f} MiB"
        choice = "separate" if self.pays else "shared"
        return (
            f"{self.gather} and {self.reduce}: {alone}; {both}: gain {self.gain:.1%}, "
            f"extra memory {memory}; {choice}"
        )


def measure_separation(
    gather: Group,
    reduce: Group,
    *,
    num_elements: int,
    gather_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    device: torch.device,
) -> Separation:
    """Time a gather and a reduce, alone and together, on one and on two communicators.

    Collective over both groups, which have the same ranks. Cases are interleaved, each is the
    median of five rounds, and of the ranks the slowest counts. A few milliseconds to a few hundred.

    Args:
        gather: The gather group.
        reduce: The reduce group.
        num_elements: Elements of an unsharded buffer; large ones are cut.
        gather_dtype: Dtype of gathered buffers.
        reduce_dtype: Dtype of reduced buffers.
        device: Device of the buffers.
    """
    size = gather.size
    most = _MOST_BYTES // max(gather_dtype.itemsize, reduce_dtype.itemsize)
    length = max(1, min(num_elements, most) // size)
    shard = torch.zeros(length, dtype=gather_dtype, device=device)
    whole = torch.zeros(length * size, dtype=gather_dtype, device=device)
    gradient = torch.zeros(length * size, dtype=reduce_dtype, device=device)

    def run(gathers: Group | None, reduces: Group | None) -> float:
        _synchronise(device)
        gather.collectives.all_reduce(torch.zeros(1, device=device))
        # On a GPU the ranks have only been asked to meet by then; if the clock ran already, every
        # case would carry the same wait, and separation would seem to save less than it does.
        _synchronise(device)
        start = time.perf_counter()
        pending = []
        if reduces is not None:
            pending.append(reduces.collectives.reduce_scatter_async(gradient))
        if gathers is not None:
            pending.append(gathers.collectives.all_gather_async(shard, out=whole))
        for one in pending:
            one.wait()
        _synchronise(device)
        return time.perf_counter() - start

    run(gather, gather)
    before = _free_bytes(device)
    run(gather, reduce)
    after = _free_bytes(device)
    cases = [(gather, None), (None, reduce), (gather, gather), (gather, reduce)]
    times = [[run(*case) for case in cases] for _ in range(_ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    slowest = torch.tensor(medians, dtype=torch.float64, device=device)
    gather.collectives.all_reduce(slowest, op="max", out=slowest)
    extra = None if before is None or after is None else max(0, before - after)
    gather_s, reduce_s, shared_s, separate_s = slowest.tolist()
    return Separation(gather.key, reduce.key, gather_s, reduce_s, shared_s, separate_s, extra)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
