"""What the ranks of a group can do together, found by one vote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations

import torch

from pcomm.core.control.control import Control
from pcomm.core.groups.agreement import vote
from pcomm.core.groups.group import Group
from pcomm.nvls.hardware.rank_facts import MULTICAST, NOTHING, PEERS, Probe
from pcomm.nvls.hardware.this_rank import ThisRank

__all__ = ["MAX_RANKS", "Capability", "capability", "default_device", "reasons_by_rank"]

MAX_RANKS = 72
"""Largest group: the ranks of one NVLink domain."""


@dataclass(frozen=True)
class Capability:
    """What all ranks of a group can do; the same on each of them, but for the words of reasons.

    Args:
        multicast: True if a multicast address reaches all of them. Before a workspace is open:
            True if all of them report that they have it.
        peers: True if each can access the memory of each.
        architecture: Name of the device: "sm_90"; "emulated" under Triton's interpreter; "cpu";
            "mixed" where ranks differ.
        world_size: Number of ranks.
        multicast_reason: Reason why there is no multicast, with the ranks that miss it.
        peers_reason: Reason why there is no access, with the ranks that miss it.
    """

    multicast: bool
    peers: bool
    architecture: str
    world_size: int
    multicast_reason: str = ""
    peers_reason: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether there is another way than torch.distributed."""
        return self.multicast or self.peers

    def without_multicast(self, reason: str) -> Capability:
        """The same ranks, of which one got no multicast address."""
        return replace(self, multicast=False, multicast_reason=reason)

    def without_memory(self, reason: str) -> Capability:
        """The same ranks, of which one could not get its memory."""
        return replace(
            self, multicast=False, peers=False, multicast_reason=reason, peers_reason=reason
        )


def capability(
    group: Group,
    *,
    device: torch.device | str | None = None,
    control: Control | None = None,
    probe: Probe | None = None,
) -> Capability:
    """What the ranks of a group can do together. Collective: one vote; raises for no lack.

    A rank whose own look at its device fails counts as one that can do nothing, with that error as
    the reason. Memory is not allocated; a workspace may find less when it is opened.

    Args:
        group: Ranks that take part.
        device: Device of the tensors, or its name; by default the current CUDA device, or the CPU
            without one.
        control: Control by which the ranks vote; by default that of `group`.
        probe: Source of the facts about this rank; by default this process and its device.

    Raises:
        PeerTimeoutError: A rank did not come to the vote.
        FencedError: A newer generation than that of the control has begun.
    """
    if group.size == 1:
        alone = "one rank moves nothing"
        return Capability(False, False, "cpu", 1, alone, alone)
    level, told = NOTHING, _Told()
    try:
        where = default_device() if device is None else torch.device(device)
        facts = (ThisRank() if probe is None else probe).facts(where)
        level, reason = facts.level()
        told = _Told(
            facts.architecture,
            reason,
            facts.domain,
            facts.device,
            facts.unreachable,
            facts.shares_device,
        )
    except Exception as error:  # any: the vote is what the other ranks wait for
        first_line = str(error).partition("\n")[0]
        told = _Told(reason=f"{type(error).__name__}: {first_line}")
    found = vote(group, "nvls: capability", level, json.dumps(asdict(told)), control=control)
    ranks = [_Told(**json.loads(text)) for text in found.reasons]
    return _together(group.ranks, found.values, ranks)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others beside its level; see `RankFacts`."""

    architecture: str = "cpu"
    reason: str = ""
    domain: str = ""
    device: str = ""
    unreachable: Sequence[str] = ()
    shares_device: bool = False


def _together(names: Sequence[int], levels: Sequence[int], told: Sequence[_Told]) -> Capability:
    """What ranks of these names can do that have told these things. Pure."""
    architectures = {one.architecture for one in told}
    architecture = told[0].architecture if len(architectures) == 1 else "mixed"
    reasons = [one.reason for one in told]
    lost = (
        _lacking(names, levels, reasons, PEERS)
        or _too_many(len(names))
        or _different(names, [one.architecture for one in told], "devices of one architecture")
        or _different(names, [one.domain for one in told], "one host or one NVLink domain")
        or _pairs(names, told)
    )
    if lost:
        return Capability(False, False, architecture, len(names), lost, lost)
    lost = _lacking(names, levels, reasons, MULTICAST)
    if not lost and any(one.shares_device for one in told):
        lost = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set, which takes multicast away"
    return Capability(not lost, True, architecture, len(names), lost)


def _lacking(
    names: Sequence[int], levels: Sequence[int], reasons: Sequence[str], wanted: int
) -> str:
    below = [i for i, level in enumerate(levels) if level < wanted]
    return reasons_by_rank([names[i] for i in below], [reasons[i] for i in below])


def _too_many(size: int) -> str:
    return f"{size} ranks, and at most {MAX_RANKS} reach each other" if size > MAX_RANKS else ""


def _different(names: Sequence[int], values: Sequence[str], wanted: str) -> str:
    if len(set(values)) == 1:
        return ""
    return f"the ranks are not on {wanted}: {reasons_by_rank(names, values)}"


def _pairs(names: Sequence[int], told: Sequence[_Told]) -> str:
    for i, j in permutations(range(len(told)), 2):
        mine, theirs = told[i], told[j]
        if not mine.device:
            continue
        if mine.device == theirs.device and not (mine.shares_device and theirs.shares_device):
            return f"rank {names[i]} and rank {names[j]} are on one device"
        if theirs.device in mine.unreachable:
            return f"the device of rank {names[i]} cannot access that of rank {names[j]}"
    return ""


def reasons_by_rank(names: Iterable[int], reasons: Iterable[str]) -> str:
    """One line with each reason once, after the ranks that have it. Pure.

    Args:
        names: Global ranks.
        reasons: Reason of each of them.
    """
    ranks_of: dict[str, list[int]] = {}
    for name, reason in zip(names, reasons, strict=True):
        ranks_of.setdefault(reason, []).append(name)
    return "; ".join(f"{_ranks(found)}: {reason}" for reason, found in ranks_of.items())


def _ranks(found: Sequence[int]) -> str:
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 4 and found[-1] - found[0] == len(found) - 1:
        return f"ranks {found[0]} to {found[-1]}"
    return f"ranks {', '.join(map(str, found))}"


def default_device() -> torch.device:
    """The current CUDA device, or the CPU without one. Local."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
