"""Whether the replicas of a job hold the same numbers: a checksum of each range of units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.reshard.agreement import agree
from pcomm.ntp.reshard.holdings import Interval
from pcomm.ntp.reshard.spread_tensors import SpreadTensor, spread_tensors

__all__ = ["differing_units"]

# Elements that are widened to fp64 at a time.
_CHUNK = 1 << 20
# Sums of equal numbers in fp64 differ by less, in whatever order they were added.
_ROUNDING = 1e-9


def differing_units(
    plan: Plan,
    group: Group,
    *,
    rank: int,
    tensors: Mapping[str, Tensor],
    param_layouts: Mapping[str, ParamLayout],
    is_exact: bool,
    device: torch.device,
) -> str | None:
    """Units that ranks hold with other numbers, as text; None if there are none. Collective.

    The checksum is a sum with signs by position, which two ranks compute alike for a range of units
    that both hold. Reads all tensors once, and takes one all-reduce of three numbers a range.

    Args:
        plan: Plan under which the tensors lie.
        group: All used ranks of this rank's stage, with their global ranks.
        rank: Global rank of this process.
        tensors: Tensors by name, as `state_tensors` names them.
        param_layouts: Layouts of the parameters.
        is_exact: True for numbers that were set alike; False to allow for the rounding of many
            steps: elements at the end of a shard are not computed by the same instructions as
            others, so ranges of different shards come to differ in their last bits.
        device: Device of the tensors.

    Raises:
        ConfigError: A split tensor without units.
        LayoutError: A tensor that does not lie as the plan says.
        PeerError: Another rank has one of these errors.
        DivergenceError: Ranks have tensors of other names, data types or logical shapes.
    """
    spread: list[SpreadTensor] = []
    error: Exception | None = None
    try:
        spread = spread_tensors(plan, plan, rank, tensors, tensors, param_layouts, (rank,))
    except Exception as caught:
        error = caught
    lines = [one.agreed() for one in spread]
    agree(group.collectives, group.ranks, {"state of replicas": lines}, error, device)
    stage = plan.place(rank).stage
    slots: list[tuple[SpreadTensor, Interval]] = []
    for one in spread:
        found = plan.segments(one.parameter, stage) if one.units is not None else ()
        slots += [(one, (own.start, own.stop)) for own in found] or [(one, (0, 1))]
    sums, norms = _checksums(slots, device)
    told = torch.stack([sums, -sums, norms])
    told[told.isnan()] = -torch.inf
    told = group.collectives.all_reduce(told, op="max", out=told)
    allowed = [_ROUNDING if is_exact else _rounding_of(one) for one, _ in slots]
    limits = told[2] * torch.tensor(allowed, dtype=torch.float64, device=device)
    # Numbers that are not finite tell nothing.
    differs = torch.nonzero((told[0] + told[1] > limits) & told[2].isfinite()).flatten().tolist()
    if not differs:
        return None
    one, (start, stop) = slots[differs[0]]
    all_sums = group.collectives.all_gather(sums[differs[0]].view(1)).tolist()
    highest = max(own for own in all_sums if own == own)
    limit = float(limits[differs[0]])
    odd = [r for r, own in zip(group.ranks, all_sums, strict=True) if highest - own > limit]
    units = f"units {start} to {stop - 1} of " if one.units is not None else ""
    return f"{units}{one.name!r}: other numbers on ranks {odd} than on others that hold them"


def _checksums(
    slots: Iterable[tuple[SpreadTensor, Interval]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each range a sum with signs, and the 2-norm; NaN for ranges that this rank lacks."""
    found = []
    for one, (start, stop) in slots:
        side = one.any_side
        if side.held[0] <= start and stop <= side.held[1]:
            found.append(_checksum(one.boxes(side, (start, stop)), device))
        else:
            found.append(torch.full((2,), torch.nan, dtype=torch.float64, device=device))
    both = torch.stack(found) if found else torch.zeros(0, 2, dtype=torch.float64, device=device)
    return both[:, 0].contiguous(), both[:, 1].sqrt()


def _checksum(boxes: Iterable[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for turn, box in enumerate(boxes):
        flat = (torch.view_as_real(box) if box.is_complex() else box).reshape(-1)
        for first in range(0, flat.numel(), _CHUNK):
            x = flat[first : first + _CHUNK].double()
            place = torch.arange(first, first + len(x), device=device)
            # Without a pattern, so that neither a shift nor a swap of rows leaves the sum.
            signs = ((place * 2654435761 + turn * 40503) >> 15 & 1) * 2 - 1
            total += torch.stack([x.dot(signs.double()), x.dot(x)])
    return total


def _rounding_of(one: SpreadTensor) -> float:
    """Half the digits of the data type, relative to the norm of a range."""
    dtype = one.any_side.tensor.dtype
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return float(torch.finfo(dtype).eps) ** 0.5 if is_rounded else _ROUNDING
