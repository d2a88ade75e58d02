"""The whole model: embedding, blocks, norm, head, and the loss."""

# Shape suffixes: T tokens, D width; v this rank's share of the vocabulary.

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.placement import placements_of
from pcomm.core.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from pcomm.core.tensor_parallel.embedding import VocabularyParallelEmbedding
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear
from pcomm.integration.config import ModelConfig
from pcomm.integration.config_rules import mixers
from pcomm.integration.models.block import Block
from pcomm.integration.models.context import Context, LayerCache
from pcomm.integration.models.norm import RMSNorm
from pcomm.integration.models.rotary import rotation
from pcomm.integration.models.sequences import PackedSequences

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A decoder: GPT, Mamba, GDN and hybrids, by the pattern of `config`.

    Args:
        config: With every size filled in (see `config_rules.validate`).
        vocabulary: Number of token ids.
        collectives: Of the tensor-parallel group; on one rank no layer communicates.
        sequence_parallel: Whether the residual stream is split by tokens over that group.
        device: Where the parameters are.
        dtype: Of the parameters; the computation follows, or an autocast around the call.

    Parameters hold torch's default values until `initialisation.initialise` is called.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        collectives: Collectives | None = None,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.collectives = collectives or IdentityCollectives()
        self.vocabulary = Layout.even(vocabulary, self.collectives.size)
        self.embedding = VocabularyParallelEmbedding(
            self.vocabulary,
            config.width,
            self.collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.blocks = nn.ModuleList(
            Block(
                letter,
                config,
                self.collectives,
                sequence_parallel=sequence_parallel,
                index=index,
                device=device,
                dtype=dtype,
            )
            for index, letter in enumerate(mixers(config))
        )
        self.norm = RMSNorm(
            config.width,
            config.norm_eps,
            has_partial_gradient=sequence_parallel and self.collectives.size > 1,
            device=device,
            dtype=dtype,
        )
        self.head = ColumnParallelLinear(
            config.width,
            self.vocabulary,
            self.collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        sequences: PackedSequences,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> Tensor:
        """Logits `[T, v]` of this rank's part of the vocabulary; collective over its group.

        Args:
            tokens_T: int64, the same on all ranks of the group.
            positions_T: int64, each token's place in its sequence.
            sequences: Which tokens belong together.
            cache: To generate: one for each block, of one sequence, filled as a side effect.
        """
        turn = rotation(
            positions_T, self.config.head_dim, self.config.rope_theta, self.norm.weight.dtype
        )
        context = Context(sequences, turn, cache)
        x = self.embedding(tokens_T)
        for block in self.blocks:
            x = block(x, context)
        logits_Tv: Tensor = self.head(self.norm(x))
        return logits_Tv

    def token_losses(
        self,
        tokens_T: Tensor,
        targets_T: Tensor,
        positions_T: Tensor,
        sequences: PackedSequences,
    ) -> Tensor:
        """Nats of each target `[T]`, 0 where it is ignored; the same on all ranks of the group."""
        logits_Tv = self(tokens_T, positions_T, sequences)
        return vocabulary_parallel_cross_entropy(
            logits_Tv, targets_T, self.vocabulary, self.collectives
        )

    def new_cache(self, max_tokens: int) -> tuple[LayerCache, ...]:
        """What `forward` needs to write text token by token, for one sequence; local."""
        return tuple(b.mixer.new_cache(max_tokens) for b in self.blocks if isinstance(b, Block))

    def num_parameters(self) -> int:
        """Parameters of the whole model, over all ranks of the tensor-parallel group; local."""
        placements = placements_of(self)
        return sum(
            placements[name].logical_shape(parameter.shape).numel()
            for name, parameter in self.named_parameters()
        )
