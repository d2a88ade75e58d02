"""Whether the kernels are right on the machine at hand: sums against exact ones, bits against bits.

What a switch does with the order and the rounding of a sum is documented nowhere, so a claim about
it holds for the machine on which it was tried.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pcomm.core.control.agreement import vote
from pcomm.core.doctor.report import Finding, MachineReport
from pcomm.core.errors import UnsupportedError
from pcomm.nvls._capability import reasons_by_rank
from pcomm.nvls.collectives.gathers import all_gather_into_tensor
from pcomm.nvls.collectives.reductions import all_reduce
from pcomm.nvls.policy.table import ALGORITHMS, Algorithm
from pcomm.nvls.references import sum_in_rank_order
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["self_test"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LENGTH = 512
# Exponents so far apart that small addends are lost where a sum is not in fp32, and so near that
# the sum of 72 numbers of 24 bits is exact in fp64.
_EXPONENTS = (-8, 9)
_FIX = "Use algo='dist', or another algorithm; tell the authors with this report and the driver."


def self_test(workspace: Workspace, *, repetitions: int = 4) -> MachineReport:
    """Try each algorithm of a workspace on this machine. Collective; some dozens of calls.

    Sums of numbers that cancel are compared with exact ones, repeated calls and the ranks with each
    other, and what is added in rank order with that sum, bit for bit. Gathers are compared bit for
    bit. For the switch it is told how many sums of fp32 are rounded right, as sums are that do not
    depend on the order.

    Args:
        workspace: Workspace of the group, of at least 2048 bytes for each rank.
        repetitions: Number of calls of each sum.

    Returns:
        The same report on all ranks: a finding for each operation, dtype and algorithm, "broken"
        where any rank found it wrong, "missing" where it cannot run here.

    Raises:
        PeerTimeoutError: A rank did not come.
    """
    found = [*_sums(workspace, repetitions), *_gathers(workspace)]
    told = json.dumps([(finding.status, finding.reason, digest) for finding, digest in found])
    num_broken = sum(finding.status == "broken" for finding, _ in found)
    votes = vote(workspace.group, "nvls: self-test", -num_broken, told)
    ranks = [json.loads(text) for text in votes.reasons]
    together = (
        _together(finding, workspace.group.ranks, [rank[place] for rank in ranks])
        for place, (finding, _) in enumerate(found)
    )
    return MachineReport(tuple(together))


def _together(
    finding: Finding, names: tuple[int, ...], told: list[tuple[str, str, str]]
) -> Finding:
    """What all ranks have found of one thing: broken if any of them found that."""
    broken = [place for place, (status, _, _) in enumerate(told) if status == "broken"]
    if broken:
        reasons = reasons_by_rank([names[i] for i in broken], [told[i][1] for i in broken])
    elif len({digest for _, _, digest in told}) > 1:
        reasons = "the bits are not the same on all ranks"
    else:
        return finding
    return replace(finding, status="broken", value="wrong", reason=reasons, fix=_FIX)


def _sums(workspace: Workspace, repetitions: int) -> Iterator[tuple[Finding, str]]:
    """Findings of this rank, each with a digest of what should be the same on all ranks."""
    for name, dtype in _DTYPES.items():
        mine = _adversarial(workspace.group.rank, dtype).to(workspace.device)
        parts = workspace.group.collectives.all_gather(mine.unsqueeze(0)).unbind()
        for algorithm in ALGORITHMS:
            if algorithm == "dist":
                continue
            title = f"nvls.all_reduce.{name}.{algorithm}"
            try:
                found = [_all_reduce(mine, workspace, algorithm) for _ in range(repetitions)]
            except UnsupportedError as error:
                yield Finding(title, "missing", "cannot run here", error.found), ""
                continue
            yield _judged_sum(title, found, parts, algorithm), _digest(found[0])


def _all_reduce(x: Tensor, workspace: Workspace, algorithm: Algorithm) -> Tensor:
    return all_reduce(x, workspace=workspace, algo=algorithm)


def _judged_sum(
    title: str, found: list[Tensor], parts: tuple[Tensor, ...], algorithm: Algorithm
) -> Finding:
    first, wide = found[0], torch.stack(parts).double()
    exact, dtype = wide.sum(0), first.dtype
    # Each addition in fp32 is off by half a unit of its last place, at most, and by a whole one
    # where the switch cuts off; then comes the type of the result.
    added = (len(parts) - 1) * torch.finfo(torch.float32).eps * wide.abs().sum(0)
    bound = added + torch.finfo(dtype).eps * (exact.abs() + added) + torch.finfo(dtype).tiny
    error = (first.double() - exact).abs()
    problem = ""
    if not bool((error <= bound).all()):
        worst = int((error - bound).argmax())
        problem = f"element {worst} is {first[worst].item():g}, not {exact[worst].item():g}"
    elif not all(torch.equal(other, first) for other in found):
        problem = "repeated calls returned other bits"
    elif algorithm != "multimem" and not torch.equal(first, sum_in_rank_order(parts)):
        problem = "the bits are not those of the sum in rank order"
    if problem:
        return Finding(title, "broken", "wrong", problem, _FIX)
    rounded = float((first == exact.to(dtype)).double().mean())
    value = "as exact as fp32 sums are, the same bits on all ranks and in each call"
    if algorithm == "multimem":
        return Finding(title, "ok", f"{value}; {rounded:.1%} rounded right")
    return Finding(title, "ok", f"{value}, in rank order")


def _gathers(workspace: Workspace) -> Iterator[tuple[Finding, str]]:
    rank, collectives = workspace.group.rank, workspace.group.collectives
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randint(-(1 << 31), 1 << 31, (_LENGTH,), generator=generator)
    mine = mine.to(torch.int32).to(workspace.device)
    expected = collectives.all_gather(mine)
    for algorithm in ALGORITHMS:
        if algorithm == "dist":
            continue
        title = f"nvls.all_gather.{algorithm}"
        try:
            found = all_gather_into_tensor(mine, workspace=workspace, algo=algorithm)
        except UnsupportedError as error:
            yield Finding(title, "missing", "cannot run here", error.found), ""
            continue
        if torch.equal(found, expected):
            yield Finding(title, "ok", "bit for bit what the ranks sent"), ""
        else:
            place = int((found != expected).nonzero()[0])
            reason = f"word {place} came from rank {place // _LENGTH} as another one"
            yield Finding(title, "broken", "wrong", reason, _FIX), ""


def _adversarial(rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all magnitudes and signs, of which those of neighbouring ranks nearly cancel."""
    generator = torch.Generator().manual_seed(rank // 2)
    exponents = torch.randint(*_EXPONENTS, (_LENGTH,), generator=generator)
    large = (torch.rand(_LENGTH, generator=generator) + 1) * torch.exp2(exponents)
    if rank % 2:
        own = torch.Generator().manual_seed(1000 + rank)
        return (torch.rand(_LENGTH, generator=own) / 8 - large).to(dtype)
    return large.to(dtype)


def _digest(x: Tensor) -> str:
    # An operation without a barrier may lose the sign of a zero.
    content = (x + 0.0).cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
