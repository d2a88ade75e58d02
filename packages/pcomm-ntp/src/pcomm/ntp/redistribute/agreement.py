"""Whether all ranks of a group say, and hold, the same: facts, errors, and checksums of ranges."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.collectives import Collectives
from pcomm.core.errors import DivergenceError, PcommError, PeerError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.redistribute.planned_moves import Interval, OwnedState, StateLostError
from pcomm.ntp.redistribute.spread_tensors import SpreadTensor, spread_tensors

__all__ = ["agree", "differing_units", "most"]


class _Told(NamedTuple):
    """An error of a rank as text: the name of its type, and its four parts."""

    kind: str
    parts: tuple[str, str, str, str]


def agree(
    collectives: Collectives,
    ranks: Sequence[int],
    facts: Mapping[str, Sequence[str]],
    error: Exception | None,
    device: torch.device,
) -> None:
    """Make sure that no rank has an error, and that ranks that tell the same facts agree.

    Collective over the group, by gathers. Unlike `agree_in_group` of pcomm-core, it compares by
    subject, and gives a `StateLostError` of any rank to all.

    Args:
        collectives: Collectives of the group.
        ranks: Global ranks of the group, for messages.
        facts: Lines by subject. Subjects that other ranks do not have are not compared.
        error: Error that this rank found before.
        device: Device of the tensors that are gathered.

    Raises:
        DivergenceError: Lines of one subject differ; on every rank, naming the first difference.
        StateLostError: That of any rank.
        Exception: This rank's own `error`.
        PeerError: Another rank has an error.
    """
    told = _told(error)
    digest = {subject: _digest(lines) for subject, lines in sorted(facts.items())}
    short = json.dumps([told is not None, digest]).encode()
    seen = [json.loads(text) for text in _gathered(collectives, short, device)]
    failed = any(has_error for has_error, _ in seen)
    known: dict[str, str] = {}
    differs = any(known.setdefault(s, d) != d for _, own in seen for s, d in own.items())
    if not failed and not differs:
        return
    full = json.dumps([told, dict(facts)]).encode()
    texts = [json.loads(text) for text in _gathered(collectives, full, device)]
    # A difference may be the cause of an error, such as state that only one rank takes for lost.
    _raise_difference(ranks, [text[1] for text in texts])
    _raise_first(error, ranks, [text[0] for text in texts])


def most(collectives: Collectives, value: int, device: torch.device) -> int:
    """The largest `value` of all ranks. Collective."""
    own = torch.tensor([value], dtype=torch.int64, device=device)
    return int(collectives.all_reduce(own, op="max").item())


def _gathered(collectives: Collectives, text: bytes, device: torch.device) -> list[bytes]:
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = [int(n) for n in collectives.all_gather(length).tolist()]
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    joined: Tensor = collectives.all_gather(own, sizes=sizes)
    data, start, found = bytes(joined.cpu().tolist()), 0, []
    for size in sizes:
        found.append(data[start : start + size])
        start += size
    return found


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _told(error: Exception | None) -> _Told | None:
    if error is None:
        return None
    kind = type(error).__name__
    if isinstance(error, PcommError):
        return _Told(kind, (error.asked, error.found, error.why, error.fix))
    return _Told(kind, ("redistribute", f"{kind}: {error}", "", ""))


def _raise_first(
    error: Exception | None, ranks: Sequence[int], told: Sequence[Sequence[object] | None]
) -> None:
    errors = [(rank, _Told(*one)) for rank, one in zip(ranks, told, strict=True) if one]  # type: ignore[arg-type]
    for _, one in errors:
        if one.kind == StateLostError.__name__:
            asked, found, why, fix = one.parts
            raise StateLostError(asked, found=found, why=why, fix=fix)
    if error is not None:
        raise error
    rank, one = errors[0]
    asked, found, why, fix = one.parts
    raise PeerError(f"{asked} (rank {rank})", found=f"{one.kind}: {found}", why=why, fix=fix)


def _raise_difference(ranks: Sequence[int], facts: Sequence[Mapping[str, list[str]]]) -> None:
    first: dict[str, tuple[int, list[str]]] = {}
    for rank, own in zip(ranks, facts, strict=True):
        for subject, lines in own.items():
            before, expected = first.setdefault(subject, (rank, lines))
            if lines != expected:
                a = next((x for x in expected if x not in lines), "nothing more")
                b = next((x for x in lines if x not in expected), "nothing more")
                raise DivergenceError(
                    f"redistribute: {subject}",
                    found=f"rank {before} has {a!r}, rank {rank} has {b!r}",
                    why="What is sent follows from these facts, so all ranks must share them.",
                    fix="Pass the same plans and holders, and tensors of the same names, data "
                    "types and logical shapes, on all ranks.",
                )


# Elements that are widened to fp64 at a time.
_CHUNK = 1 << 20
# Sums of equal numbers in fp64 differ by less, in whatever order they were added.
_ROUNDING = 1e-9


def differing_units(
    plan: NtpPlan,
    group: Group,
    *,
    rank: int,
    tensors: Mapping[str, Tensor],
    param_layouts: Mapping[str, ParamLayout],
    is_exact: bool,
    device: torch.device,
    owned: OwnedState | None = None,
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
        owned: Owners of the optimizer's state, the same before and after; None where each rank
            has that of all its units.

    Raises:
        ConfigError: A split tensor without units.
        LayoutError: A tensor that does not lie as the plan says.
        PeerError: Another rank has one of these errors.
        DivergenceError: Ranks have tensors of other names, data types or logical shapes.
    """
    spread: list[SpreadTensor] = []
    error: Exception | None = None
    try:
        spread = spread_tensors(plan, plan, rank, tensors, tensors, param_layouts, (rank,), owned)
    except Exception as caught:
        error = caught
    lines = [one.agreed() for one in spread]
    agree(group.collectives, group.ranks, {"state of replicas": lines}, error, device)
    stage = plan.place(rank).stage
    slots: list[tuple[SpreadTensor, Interval]] = []
    for one in spread:
        if owned is not None and owned.covers(one.parameter):
            ranges = owned.new.ranges[one.parameter]
            slots += [(one, (own.start, own.stop)) for own in ranges]
            continue
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
        if any(first <= start and stop <= last for first, last in side.held):
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
