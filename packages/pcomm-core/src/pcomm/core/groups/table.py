"""The table of `Groups.explain`: one line a group, with the options asked for and in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from pcomm.core.groups.group import Group

__all__ = ["table_of_groups"]

_HEAD = ("group", "role", "rank", "ranks", "communicator", "asked", "granted", "refused")


def table_of_groups(groups: Sequence[Group]) -> str:
    """A table of `groups`: ranks, communicator, options asked, granted and refused. Local."""
    rows: list[tuple[str, ...]] = [_HEAD]
    first_with: dict[dist.ProcessGroup, str] = {}
    for group in groups:
        communicator = "none (identity)"
        if group.process_group is not None:
            first = first_with.setdefault(group.process_group, group.key)
            backend = dist.get_backend(group.process_group)
            communicator = backend if first == group.key else f"that of {first}"
        rows.append(
            (
                group.name,
                group.role or "-",
                f"{group.rank} of {group.size}",
                _shorten(group.ranks),
                communicator,
                _join(group.asked),
                _join(group.granted),
                _join(group.refused),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def _shorten(ranks: Sequence[int]) -> str:
    text = ",".join(str(rank) for rank in ranks[:8])
    return text if len(ranks) <= 8 else f"{text},... ({len(ranks)})"


def _join(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "-"
