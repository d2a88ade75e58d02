"""What the layers of one model have in common, so that each is told its own sizes and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import nn

from pcomm.core import Collectives, IdentityCollectives, Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.gdn_cp.ops import Kernels, choose_kernels
from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.models.norm import RMSNorm
from pcomm.ntp import Units

__all__ = ["LayerBuilder"]


@dataclass(frozen=True)
class LayerBuilder:
    """Makes the parts of layers that read from the residual stream and write into it; local.

    Args:
        config: The shape of the model.
        collectives: Collectives of the tensor-parallel group.
        sequence_parallel: True to split the residual stream by tokens over that group.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        experts: Collectives of the expert-parallel group.
        state_dtype: Dtype of the states that recurrent layers keep of a request in inference; None
            for fp32, and for fp64 in a model of that.
        initialise: False allocates this rank's shards alone and leaves them as the memory was.
        form: Speed of each tensor-parallel rank, to which its share is proportional; empty for
            shares that are as equal as whole units can be.
    """

    config: ResolvedModel
    collectives: Collectives
    sequence_parallel: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    experts: Collectives = field(default_factory=IdentityCollectives)
    state_dtype: torch.dtype | None = None
    initialise: bool = True
    form: tuple[Fraction, ...] = ()

    def split(self, num_units: int, width: int = 1) -> Layout:
        """Whole units of `width` columns over the ranks, by their speeds.

        What belongs together is cut at the same units: query heads with the key head they read,
        for example. So the unit is the group, and its width is that of all its members.
        """
        if self.form:
            return Units.columns(num_units * width, block=width).layout(self.form)
        return Layout.cuts(num_units * width, self.collectives.size, unit=width)

    def own(self, layout: Layout) -> int:
        """How much of `layout` this rank has."""
        return layout.sizes[self.collectives.rank]

    def from_stream(self, layout: Layout, *, bias: bool = False) -> ColumnParallelLinear:
        """A projection from the residual stream."""
        return ColumnParallelLinear(
            self.config.width,
            layout,
            self.collectives,
            bias=bias,
            sequence_parallel=self.sequence_parallel,
            initialise=self.initialise,
            device=self.device,
            dtype=self.dtype,
        )

    def to_stream(self, layout: Layout) -> RowParallelLinear:
        """A projection back into it."""
        return RowParallelLinear(
            layout,
            self.config.width,
            self.collectives,
            sequence_parallel=self.sequence_parallel,
            initialise=self.initialise,
            device=self.device,
            dtype=self.dtype,
        )

    def stream_norm(self) -> RMSNorm:
        """A norm of the tokens of the residual stream that this rank has."""
        return self._norm(self.config.width, has_partial_gradient=self.sequence_parallel)

    def head_norm(self, width: int) -> RMSNorm:
        """A norm that all heads share, of which each rank has only some."""
        return self._norm(width, has_partial_gradient=True)

    def parameter(self, *shape: int, value: float = 0.0) -> nn.Parameter:
        """A parameter of this rank that starts with one value everywhere."""
        return nn.Parameter(torch.full(shape, value, device=self.device, dtype=self.dtype))

    def kernels(self) -> Kernels:
        """What runs the cores of recurrent layers, chosen by where the parameters are."""
        probe = torch.empty(0, device=self.device, dtype=self.dtype)
        return choose_kernels(probe.device, probe.dtype)

    def _norm(self, width: int, *, has_partial_gradient: bool) -> RMSNorm:
        return RMSNorm(
            width,
            self.config.norm_eps,
            is_zero_centred=self.config.norm_zero_centred,
            has_partial_gradient=has_partial_gradient and self.collectives.size > 1,
            device=self.device,
            dtype=self.dtype,
        )
