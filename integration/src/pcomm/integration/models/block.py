"""One block: norm + mixer, then norm + MLP or experts if it has any, added to the stream."""

from __future__ import annotations

from torch import Tensor, nn

from pcomm.inference import LayerMemory
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.context import Context
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.layer_builder import LayerBuilder
from pcomm.integration.models.mamba2 import Mamba2
from pcomm.integration.models.mlp import SwiGLU
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.moe.mixture import MixtureOfExperts
from pcomm.integration.models.norm import RMSNorm
from pcomm.integration.models.step_context import StepContext

__all__ = ["Block", "Mixer"]

Mixer = Attention | GatedDeltaNet | Mamba2

_MIXERS: dict[str, type[Mixer]] = {"A": Attention, "G": GatedDeltaNet, "M": Mamba2}


class Block(nn.Module):
    """A residual block whose mixer is chosen by a letter of the model's pattern.

    Args:
        letter: `"A"` for attention, `"M"` for Mamba-2, `"G"` for Gated DeltaNet.
        build: Sizes, and the groups of ranks.
        has_experts: True for a mixture of experts in place of the MLP.
    """

    def __init__(self, letter: str, build: LayerBuilder, *, has_experts: bool = False) -> None:
        super().__init__()
        self.mixer_norm = build.stream_norm()
        self.mixer: Mixer = _MIXERS[letter](build)
        self.mlp_norm: RMSNorm | None = None
        self.mlp: SwiGLU | MixtureOfExperts | None = None
        if has_experts or build.config.mlp_width != "none":
            self.mlp_norm = build.stream_norm()
            self.mlp = MixtureOfExperts(build) if has_experts else SwiGLU(build)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        x = x + self.mixer(self.mixer_norm(x), context)
        return self._feed_forward(x, context.balance)

    def step(self, x: Tensor, context: StepContext, memory: LayerMemory) -> Tensor:
        """The same for the new tokens of many requests, of which the mixer has kept `memory`."""
        # A call of a module costs as much as a small operation, so `forward` is called directly.
        # The engine allocates what the mixer asks for in `memory_spec`.
        x = x + self.mixer.step(self.mixer_norm.forward(x), context, memory)  # type: ignore[arg-type]
        mlp, norm = self.mlp, self.mlp_norm
        return x if mlp is None or norm is None else x + mlp.forward(norm.forward(x))

    def _feed_forward(self, x: Tensor, balance: Balance | None) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        normed = self.mlp_norm(x)
        with_experts = isinstance(self.mlp, MixtureOfExperts)
        y: Tensor = self.mlp(normed, balance) if with_experts else self.mlp(normed)
        return x + y
