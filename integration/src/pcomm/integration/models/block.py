"""One block: norm + mixer + norm + MLP, each added to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.integration.config import ModelConfig
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.context import Context
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.mamba2 import Mamba2
from pcomm.integration.models.mlp import SwiGLU
from pcomm.integration.models.norm import RMSNorm

__all__ = ["Block"]

_MIXERS: dict[str, type[Attention | GatedDeltaNet | Mamba2]] = {
    "A": Attention,
    "G": GatedDeltaNet,
    "M": Mamba2,
}


class Block(nn.Module):
    """A residual block whose mixer is chosen by a letter of the model's pattern.

    Args:
        letter: `"A"` for attention, `"M"` for Mamba-2, `"G"` for Gated DeltaNet.
        config: With every size filled in.
        collectives: Of the tensor-parallel group.
        sequence_parallel: Whether the residual stream is this rank's share of the tokens.
        index: Place in the model, from 0.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        letter: str,
        config: ModelConfig,
        collectives: Collectives,
        *,
        sequence_parallel: bool,
        index: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = (
            RMSNorm(
                config.width,
                config.norm_eps,
                has_partial_gradient=sequence_parallel and collectives.size > 1,
                device=device,
                dtype=dtype,
            )
            for _ in range(2)
        )
        self.mixer: Attention | GatedDeltaNet | Mamba2 = _MIXERS[letter](
            config,
            collectives,
            sequence_parallel=sequence_parallel,
            index=index,
            device=device,
            dtype=dtype,
        )
        self.mlp = SwiGLU(
            config, collectives, sequence_parallel=sequence_parallel, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        x = x + self.mixer(self.mixer_norm(x), context)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed
