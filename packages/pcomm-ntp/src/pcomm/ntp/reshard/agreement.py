"""Agreement over a group's collectives alone: an error or a difference is raised on every rank.

No store is asked: what makes the collectives of a group leave when a peer fails reaches these
waits, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core.collectives import Collectives
from pcomm.core.errors import DivergenceError, PcommError, PeerError
from pcomm.ntp.reshard.planned_moves import StateLostError

__all__ = ["agree", "most"]


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

    Collective over the group: a gather of a few numbers, and one of texts if something is wrong.

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
    return _Told(kind, ("reshard", f"{kind}: {error}", "", ""))


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
                    f"reshard: {subject}",
                    found=f"rank {before} has {a!r}, rank {rank} has {b!r}",
                    why="What is sent follows from these facts, so all ranks must share them.",
                    fix="Pass the same plans and holders, and tensors of the same names, data "
                    "types and logical shapes, on all ranks.",
                )
