"""What sequences bring along from before the pack, and what they leave for the pack after it.

A recurrence starts in a state and its convolution after a few inputs, the halo. Users have both for
the whole pack and all heads, the same on every rank. Here sequences are whole on the ranks, so each
takes the entries of its heads, and at the end they are put together again.
"""

# N sequences, F pieces of this rank, P = conv_width - 1, H heads, K key dim, V value dim,
# T tokens of the core, W channels of the convolution

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.layout.token_indices import TokenIndices
from pcomm.gdn_cp.specs import AttentionSpec, GdnSpec, Mamba2Spec, Spec
from pcomm.gdn_cp.strategies.head_share import HeadShare

__all__ = ["BoundaryStates"]


class BoundaryStates:
    """States and halos of sequences that are whole on this rank, or of all heads and tokens.

    Args:
        share: The mixer, and its heads on this rank.
        view: The pack and this rank's place; keeps the index tensors.
    """

    def __init__(self, share: HeadShare, view: TokenIndices) -> None:
        self.share, self.view = share, view
        self.spec: Spec = share.spec

    @property
    def num_pieces(self) -> int:
        """Sequences that the core sees."""
        return self.view.tokens.num_sequences

    @property
    def needs_summary(self) -> bool:
        """Whether `entry_states` needs to know what each piece does to a state."""
        return False

    def conv_halo(
        self, x_TW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor | None:
        """`[F, P, W of this rank]`: the inputs before what the core sees; None if there are none.

        Args:
            x_TW: The inputs of the convolution.
            collectives: Of the group.
            initial_NPW: Those before the pack, of all heads.
        """
        self.check_initial("Plan.conv_halo", initial_NPW, self.halo_shape)
        return None if initial_NPW is None else self.share.take(initial_NPW, self._conv, dim=2)

    def entry_states(
        self,
        summary: tuple[Tensor, Tensor] | None,
        collectives: Collectives,
        initial_NHKV: Tensor | None,
    ) -> Tensor | None:
        """`[F, H of this rank, K, V]`: the states before what the core sees; None if all are zero.

        Args:
            summary: What each piece does to a state; not looked at where all are whole.
            collectives: Of the group.
            initial_NHKV: The states before the pack, of all heads.
        """
        self.check_initial("Plan.entry_states", initial_NHKV, self.state_shape)
        return None if initial_NHKV is None else self.share.take(initial_NHKV, "output", dim=1)

    def final_states(
        self, final_FHKV: Tensor, collectives: Collectives, initial_NHKV: Tensor | None
    ) -> Tensor:
        """`[N, H, K, V]` of the whole pack and all heads, from what the core returned."""
        asked = "Plan.final_states"
        self.check_initial(asked, initial_NHKV, self.state_shape)
        _, *dims = self.state_shape(self.share.output.num_heads)
        self.check_final(asked, final_FHKV, (self.num_pieces, *dims))
        return self._states_of_all(final_FHKV, collectives, initial_NHKV)

    def final_halo(
        self, halo_FPW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor:
        """`[N, P, W]` of the whole pack and all heads, from what the convolution returned."""
        asked = "Plan.final_halo"
        self.check_initial(asked, initial_NPW, self.halo_shape)
        _, *dims = self.halo_shape(sum(share.width for share in self.share.sections[:3]))
        self.check_final(asked, halo_FPW, (self.num_pieces, *dims))
        return self._halos_of_all(halo_FPW, collectives, initial_NPW)

    def prepare(self, device: torch.device, is_continued: bool) -> None:
        """Make the index tensors on `device`."""
        if is_continued and self.share.size > 1 and self.spec.has_state:
            self.view.on(device, self._conv_columns)

    # -- putting together ----------------------------------------------------------------

    def _states_of_all(
        self, final_NHKV: Tensor, collectives: Collectives, initial_NHKV: Tensor | None
    ) -> Tensor:
        if self.share.size == 1:
            return final_NHKV
        return differentiable(collectives).all_gather(final_NHKV, dim=1)

    def _halos_of_all(
        self, halo_NPW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor:
        if self.share.size == 1:
            return halo_NPW
        gathered = differentiable(collectives).all_gather(halo_NPW, dim=2)
        return gathered.index_select(2, self.view.on(halo_NPW.device, self._conv_columns))

    def _conv_columns(self) -> Tensor:
        return torch.tensor(self.share.gathered_columns(self._conv))

    @property
    def _conv(self) -> list[str]:
        """Names of the sections that pass through the convolution."""
        return [section.name for section in self.spec.sections[:3]]

    # -- what fits -----------------------------------------------------------------------

    @property
    def mixer(self) -> GdnSpec | Mamba2Spec:
        """The specification, which has a state."""
        if isinstance(self.spec, AttentionSpec):
            raise ConfigError(
                f"Plan: states of {self.spec}",
                found="a mixer without a state",
                why="Softmax attention continues a sequence from its keys and values.",
                fix="Hand states and halos to Gated DeltaNet and Mamba-2 mixers only.",
            )
        return self.spec

    def state_shape(self, num_heads: int | None = None) -> tuple[int, ...]:
        """`[N, H, K, V]` of all heads, or of so many."""
        all_heads, *dims = self.mixer.state_shape
        return (self.view.tokens.num_sequences, num_heads or all_heads, *dims)

    def halo_shape(self, num_channels: int | None = None) -> tuple[int, ...]:
        """`[N, P, W]` of all channels, or of so many."""
        num_channels = num_channels or self.mixer.conv_channels
        return (self.view.tokens.num_sequences, self.mixer.conv_width - 1, num_channels)

    def check_initial(
        self, asked: str, initial: Tensor | None, shape: Callable[[], tuple[int, ...]]
    ) -> None:
        """Refuse what is not that of the whole pack, before anything is sent."""
        if initial is not None and tuple(initial.shape) != shape():
            raise LayoutError(
                f"{asked}: initial of {type(self.spec).__name__}",
                found=f"shape {tuple(initial.shape)}",
                why=f"It is that of all sequences of the pack and of all heads: {shape()}.",
                fix="Pass what final_states or final_halo of the pack before returned.",
            )

    def check_final(self, asked: str, final: Tensor, wanted: tuple[int, ...]) -> None:
        """Refuse what the core cannot have returned, before anything is sent."""
        if tuple(final.shape) != wanted:
            raise LayoutError(
                f"{asked}: {type(self.spec).__name__}",
                found=f"shape {tuple(final.shape)} on rank {self.view.rank}",
                why=f"The core of this rank sees {wanted[0]} sequences or pieces of them, and "
                f"returns shape {wanted}.",
                fix="Use Plan.cu_seqlens_of(spec) for the core, and pass what it returns.",
            )
