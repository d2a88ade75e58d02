"""The whole model: embedding, blocks, norm, head, and the loss."""

# Shape suffixes: T tokens of this context-parallel rank, D width; v this rank's share of the
# vocabulary.

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pcomm.core import Collectives, IdentityCollectives
from pcomm.core.tensor_parallel import (
    VocabularyParallelEmbedding,
    param_layouts_of,
    vocabulary_parallel_cross_entropy,
)
from pcomm.gdn_cp import AttentionSpec, Plan, Spec
from pcomm.integration.config import ResolvedModel
from pcomm.integration.config_rules import expert_blocks, mixers
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.block import Block
from pcomm.integration.models.context import Cache, Context
from pcomm.integration.models.layer_builder import LayerBuilder
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.rotary import Rotation, frequencies, rotation

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A decoder: GPT, Mamba, GDN and hybrids, with experts or without, as `config` says.

    Args:
        config: The shape of the model, from `config_rules.validate`.
        vocabulary: Number of token ids.
        collectives: Collectives of the tensor-parallel group; None for one rank, on which no layer
            communicates.
        sequence_parallel: True to split the residual stream by tokens over that group.
        device: Device of the parameters.
        dtype: Dtype of the parameters; the computation follows, or an autocast around the call.
        experts: Collectives of the expert-parallel group, which all its ranks enter in each layer
            with experts; None where this rank has all of them.

    Parameters hold torch's default values until `initialisation.initialise` is called.
    """

    def __init__(
        self,
        config: ResolvedModel,
        vocabulary: int,
        collectives: Collectives | None = None,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        experts: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.collectives = collectives or IdentityCollectives()
        build = LayerBuilder(
            config,
            self.collectives,
            sequence_parallel,
            device,
            dtype,
            experts or IdentityCollectives(),
        )
        self.vocabulary = build.split(vocabulary)
        self.has_stream_shares = sequence_parallel and self.collectives.size > 1
        self.embedding = VocabularyParallelEmbedding(
            self.vocabulary,
            config.width,
            self.collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.blocks = nn.ModuleList(
            Block(letter, build, has_experts=has_experts)
            for letter, has_experts in zip(mixers(config), expert_blocks(config), strict=True)
        )
        self.norm = build.stream_norm()
        self.head = build.from_stream(self.vocabulary)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The kinds of mixers that are there, each once."""
        return tuple(dict.fromkeys(block.mixer.spec for block in self._blocks))

    @property
    def device(self) -> torch.device:
        """Device of the parameters and of the computation."""
        return self.norm.weight.device

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the hidden states, under the autocast of now."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type).itemsize
        return self.norm.weight.dtype.itemsize

    def forward(self, tokens_T: Tensor, plan: Plan, balance: Balance | None = None) -> Tensor:
        """Logits `[T, v]` of this rank's part of the vocabulary.

        Collective over the tensor-, the context- and the expert-parallel group.

        Args:
            tokens_T: `[T]`, int64, tokens of this context-parallel rank; the same on its
                tensor-parallel group.
            plan: The plan of the batch, from `parallelize.plan_sequences`.
            balance: Counts for the balance losses of experts, which backward then brings, too; None
                outside of training and without such a loss.
        """
        context = Context(plan, self._rotation(plan), self.has_stream_shares, balance)
        x = self.embedding(tokens_T)
        for block in self.blocks:
            x = block(x, context)
        logits_Tv: Tensor = self.head(self.norm(x))
        return logits_Tv

    def token_losses(
        self, tokens_T: Tensor, targets_T: Tensor, plan: Plan, balance: Balance | None = None
    ) -> Tensor:
        """Nats of each target `[T]`, 0 where it is ignored; the same on the tensor-parallel group.

        Args:
            tokens_T: Tokens as for `forward`.
            targets_T: `[T]`, int64, the token after each; -100 is ignored.
            plan: Plan as for `forward`.
            balance: Counts as for `forward`.
        """
        return vocabulary_parallel_cross_entropy(
            self(tokens_T, plan, balance), targets_T, self.vocabulary, self.collectives
        )

    def extend(self, tokens_T: Tensor, cache: Cache, *, num_logits: int | None = None) -> Tensor:
        """Logits `[T, v]` of the next tokens of one sequence, which `cache` then holds as well.

        On one context-parallel rank; collective over the tensor-parallel group.

        Args:
            tokens_T: int64; a prompt first, then one token at a time.
            cache: The cache of the sequence, from `new_cache`.
            num_logits: Number of last tokens whose logits are computed; None for all. Those of a
                long prompt are many times as large as all else, and to go on takes the last only.
        """
        first, config = cache.num_tokens, self.config
        positions_T = torch.arange(first, first + len(tokens_T), device=tokens_T.device)
        dtype = self.norm.weight.dtype
        turn = rotation(positions_T, frequencies(config, dtype, tokens_T.device), dtype)
        x = self.embedding(tokens_T)
        for block, layer in zip(self._blocks, cache.layers, strict=True):
            x = block.extend(x, turn, layer)
        cache.num_tokens += len(tokens_T)
        wanted = x if num_logits is None else x[len(x) - num_logits :]
        logits_Tv: Tensor = self.head(self.norm(wanted))
        return logits_Tv

    def new_cache(self, max_tokens: int) -> Cache:
        """What `extend` needs to write text token by token, for one sequence; local."""
        return Cache(tuple(block.mixer.new_cache(max_tokens) for block in self._blocks))

    def num_parameters(self) -> int:
        """Parameters of the whole model, whatever part of them this rank has; local."""
        placements = param_layouts_of(self)
        return sum(
            placements[name].logical_shape(parameter.shape).numel()
            for name, parameter in self.named_parameters()
        )

    def describe(self) -> str:
        """The blocks, and which kernels run those that are recurrent; one line each, local."""
        lines = [f"{self.num_parameters():,} parameters in blocks {mixers(self.config)}"]
        if self.config.experts:
            lines.append(self._describe_experts())
        kernels = [b.mixer.kernels for b in self._blocks if not isinstance(b.mixer, Attention)]
        return "\n".join([*lines, *dict.fromkeys(one.describe() for one in kernels)])

    def _describe_experts(self) -> str:
        config, layers = self.config, sum(expert_blocks(self.config))
        # Three matrices of an expert, of which a token meets only some.
        idle = config.experts - config.experts_per_token
        unused = layers * idle * 3 * config.width * config.expert_width
        return (
            f"{config.experts} experts in {layers} blocks, {config.experts_per_token} a token, "
            f"which meets {self.num_parameters() - unused:,} parameters"
        )

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _rotation(self, plan: Plan) -> Rotation | None:
        """Of the tokens that attention sees, where there is attention."""
        config, weight = self.config, self.norm.weight
        for spec in self.specs:
            if isinstance(spec, AttentionSpec):
                positions_T = plan.positions_of(spec, weight.device)
                turns_R = frequencies(config, weight.dtype, weight.device)
                return rotation(positions_T, turns_R, weight.dtype)
        return None
