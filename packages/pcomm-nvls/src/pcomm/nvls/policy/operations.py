"""The operations that are chosen for: what their messages are, and which kernels they have."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["ALGORITHMS", "OPERATIONS", "Algorithm", "Operation", "operation_named"]

Algorithm = Literal["lamport", "multimem", "p2p", "dist"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Operation:
    """An operation with the facts about its kernels that a choice depends on.

    Args:
        name: Name of the host function in `pcomm.nvls.collectives`.
        message: Noun phrase for what `Question.num_bytes` counts; the same number on all ranks.
        reduces: True if values are added, so that data type and order of the sum matter.
        is_segment: True if the message is one of `world_size` segments, False if it is the whole
            tensor.
        algorithms: Algorithms that have a kernel for it.
        dims: Dimensions along which a kernel joins or splits: 0, or 0 and the last one, -1.
    """

    name: str
    message: str
    reduces: bool
    is_segment: bool
    algorithms: tuple[Algorithm, ...] = ("lamport", "multimem", "p2p")
    dims: tuple[int, ...] = (0,)

    def slot_bytes(self, algorithm: Algorithm, num_bytes: int, world_size: int) -> int:
        """Bytes of a slot that an algorithm needs, on every rank.

        The slot holds the whole tensor.

        Args:
            algorithm: Algorithm that runs; `dist` needs no slot, and `lamport` has other memory.
            num_bytes: Size of the message in bytes, as `message` says.
            world_size: Number of ranks of the group.
        """
        if algorithm in ("dist", "lamport"):
            return 0
        return world_size * num_bytes if self.is_segment else num_bytes


_ALL = (
    Operation(
        "all_gather_into_tensor",
        "the input of one rank",
        reduces=False,
        is_segment=True,
        dims=(0, -1),
    ),
    Operation(
        "all_gather_coalesced",
        "the inputs of one rank, all tensors together",
        reduces=False,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    Operation(
        "all_gather_v",
        "the largest input that a rank may have",
        reduces=False,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    Operation(
        "gather_to_rank",
        "the input of one rank",
        reduces=False,
        is_segment=True,
        # Not `lamport`: it needs data of every rank on every rank.
        algorithms=("p2p",),
        dims=(0, -1),
    ),
    Operation(
        "reduce_scatter_tensor",
        "the output of one rank",
        reduces=True,
        is_segment=True,
        dims=(0, -1),
    ),
    Operation(
        "reduce_scatter_v",
        "the largest output that a rank may have",
        reduces=True,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    Operation("all_reduce", "the whole tensor", reduces=True, is_segment=False),
    Operation(
        "reduce_scatter_add_rmsnorm_all_gather",
        "the rows that one rank normalises",
        reduces=True,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    Operation(
        "all_reduce_add_rmsnorm",
        "the whole tensor",
        reduces=True,
        is_segment=False,
        algorithms=("multimem", "p2p"),
    ),
)
OPERATIONS = MappingProxyType({operation.name: operation for operation in _ALL})


def operation_named(name: str) -> Operation:
    """The operation of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in OPERATIONS:
        raise ConfigError(
            f"operation {name!r}",
            found="no operation of pcomm-nvls",
            why="The choice depends on what an operation moves and on the kernels that it has.",
            fix=near_misses(name, OPERATIONS),
        )
    return OPERATIONS[name]
