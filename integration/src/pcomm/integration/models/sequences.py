"""Which tokens of a packed buffer belong together, decided once and used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.core.errors import LayoutError

__all__ = ["PackedSequences"]


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that lie one after another in a buffer of tokens.

    Args:
        cu_seqlens: Borders on the host: sequence s is `cu_seqlens[s]:cu_seqlens[s + 1]`.

    Raises:
        LayoutError: The borders do not start at 0 or do not ascend.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        borders = self.cu_seqlens
        if (
            len(borders) < 2
            or borders[0] != 0
            or any(a >= b for a, b in itertools.pairwise(borders))
        ):
            raise LayoutError(
                "PackedSequences",
                found=f"cu_seqlens {_shorten(borders)}",
                why="Borders start at 0 and ascend, so that every sequence has a token.",
                fix="Leave out empty sequences and put 0 first.",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the buffer."""
        return self.cu_seqlens[-1]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """`(how many, of which length)` for neighbours of equal length, in order.

        Neighbours of equal length are computed as one batch; in packed rows most are whole rows.
        """
        lengths = [b - a for a, b in itertools.pairwise(self.cu_seqlens)]
        return [(len(list(same)), length) for length, same in itertools.groupby(lengths)]


def _shorten(borders: Sequence[int]) -> str:
    text = ", ".join(str(border) for border in borders[:8])
    return f"[{text}{', ...' if len(borders) > 8 else ''}]"
