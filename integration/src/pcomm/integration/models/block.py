"""One block: norm + mixer + norm + MLP, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from pcomm.integration.models.attention import Attention
from pcomm.integration.models.context import Context, LayerCache
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.layer_builder import LayerBuilder
from pcomm.integration.models.mamba2 import Mamba2
from pcomm.integration.models.mlp import SwiGLU
from pcomm.integration.models.rotary import Rotation

__all__ = ["Block", "Mixer"]

Mixer = Attention | GatedDeltaNet | Mamba2

_MIXERS: dict[str, type[Mixer]] = {"A": Attention, "G": GatedDeltaNet, "M": Mamba2}


class Block(nn.Module):
    """A residual block whose mixer is chosen by a letter of the model's pattern.

    Args:
        letter: `"A"` for attention, `"M"` for Mamba-2, `"G"` for Gated DeltaNet.
        build: Sizes, and the tensor-parallel group.
    """

    def __init__(self, letter: str, build: LayerBuilder) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = build.stream_norm(), build.stream_norm()
        self.mixer: Mixer = _MIXERS[letter](build)
        self.mlp = SwiGLU(build)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        x = x + self.mixer(self.mixer_norm(x), context)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed

    def extend(self, x: Tensor, rotation: Rotation, cache: LayerCache) -> Tensor:
        """The same for the next tokens of the sequence that `cache` holds."""
        # Each mixer makes the cache that it is given here.
        x = x + self.mixer.extend(self.mixer_norm(x), rotation, cache)  # type: ignore[arg-type]
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed
