"""What a choice depends on: facts about a group and its workspace, and a question about a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.operations import Algorithm

if TYPE_CHECKING:
    import torch

    from pcomm.nvls.policy.table import Table

__all__ = ["Facts", "Question"]


@dataclass(frozen=True)
class Facts:
    """Facts about a group and its workspace, the same on all ranks.

    Args:
        architecture: Architecture of every device, such as `sm_90`; `emulated` for the Triton
            interpreter.
        world_size: Number of ranks of the group.
        multicast: True if every rank has a multicast address.
        peers: True if every rank has pointers to the memory of all others.
        slot_bytes: Size of one slot of the workspace, in bytes.
        multicast_reason: Reason that the vote gave if there is no multicast address.
        peers_reason: Reason that the vote gave if there are no pointers.
        lamport_bytes: Room for what one rank sends to another without a barrier, in bytes.

    Raises:
        ConfigError: A group without ranks, or a slot of negative size.
    """

    architecture: str
    world_size: int
    multicast: bool
    peers: bool
    slot_bytes: int
    multicast_reason: str = ""
    peers_reason: str = ""
    lamport_bytes: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.slot_bytes < 0:
            raise ConfigError(
                "Facts",
                found=f"world_size={self.world_size}, slot_bytes={self.slot_bytes}",
                why="A group has at least one rank, and a slot no negative size.",
                fix="Give the size of the group and of one slot of its workspace.",
            )

    def agreed_lines(self, table: Table) -> list[str]:
        """Lines of text that are equal on all ranks if they choose alike; for `Control.agree`.

        The rows that count for these facts come before the digest of the whole table, so a
        difference in them is named by itself. Reasons are left out: no choice depends on them.

        Args:
            table: Table that this rank chooses from.
        """
        return [
            f"architecture {self.architecture}",
            f"world size {self.world_size}",
            f"multicast {self.multicast}",
            f"peers {self.peers}",
            f"slot bytes {self.slot_bytes}",
            f"lamport bytes {self.lamport_bytes}",
            *table.lines(self.architecture, self.world_size),
            f"table {table.digest}",
        ]


class Question(NamedTuple):
    """A call that an algorithm is chosen for, equal on all ranks. Also the key of cached choices.

    Attributes:
        operation: Name of an operation, one of `OPERATIONS`.
        num_bytes: Size of the message in bytes, as the operation defines it; 0 is allowed.
        dtype: Data type of the tensors.
        dim: Dimension along which tensors are joined or split: 0, or -1 for the last one.
        row_bytes: Size of the shortest range that stays contiguous, in bytes, such as a row of an
            input that is gathered along the last dimension, of a normalisation or of a variable
            count; None for the whole message.
        deterministic: True for sums in fp32 and in the order of the ranks.
        algorithm: Algorithm that the caller names, or `auto`.
    """

    operation: str
    num_bytes: int
    dtype: torch.dtype
    dim: int = 0
    row_bytes: int | None = None
    deterministic: bool = False
    algorithm: Algorithm | Literal["auto"] = "auto"
