"""Index tensors of a pack that are made once for each device, and which tokens a rank works on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcomm.gdn_cp.layout.token_layout import TokenLayout

__all__ = ["IndexTensors", "LocalTokenIndices", "TokenIndices"]


class IndexTensors:
    """Index tensors of one rank of a pack, kept for each device.

    Args:
        tokens: The pack and its layout.
        rank: This rank's place in the group.
    """

    def __init__(self, tokens: TokenLayout, rank: int) -> None:
        self.tokens, self.rank = tokens, rank
        self._known: dict[tuple[str, tuple[int, ...], torch.device], Tensor] = {}

    def on(self, device: torch.device, make: Callable[..., Tensor], *arguments: int) -> Tensor:
        """The tensor that the method `make` computes, on `device`; kept by the name of `make`."""
        key = (make.__name__, arguments, device)
        if key not in self._known:
            # A tensor made in inference mode could not be used in training, and these are kept.
            with torch.inference_mode(False):
                self._known[key] = make(*arguments).to(device)
        return self._known[key]


class TokenIndices(IndexTensors):
    """Some tokens of a pack in some order; here all of them in the order of the pack."""

    def core_tokens(self) -> Tensor:
        """`[T]`: the tokens by their places in the pack; int64 on the CPU."""
        return torch.arange(self.tokens.num_tokens)

    def core_positions(self) -> Tensor:
        """`[T]`: the place of each of these tokens in its sequence; int64 on the CPU."""
        return self.tokens.derived(_positions)[self.core_tokens()]


class LocalTokenIndices(TokenIndices):
    """The tokens that a rank holds between layers."""

    def core_tokens(self) -> Tensor:
        """This rank's tokens, in the order of its tensor."""
        return self.tokens.of_rank(self.rank)


def _positions(tokens: TokenLayout) -> Tensor:
    """The place of every token of the pack in its sequence."""
    offsets = torch.tensor(tokens.cu_seqlens)
    first = offsets[:-1].repeat_interleave(offsets.diff(), output_size=tokens.num_tokens)
    return torch.arange(tokens.num_tokens) - first
