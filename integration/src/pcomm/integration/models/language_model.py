"""The whole model: embedding, blocks, norm, head, and the loss."""

# Shape suffixes: T tokens of this context-parallel rank, D width; v this rank's share of the
# vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from pcomm.core import Collectives, Group, IdentityCollectives
from pcomm.core.tensor_parallel import (
    VocabularyParallelEmbedding,
    param_layouts_of,
    vocabulary_parallel_cross_entropy,
)
from pcomm.gdn_cp import AttentionSpec, Plan, Spec, StrategyName, make_plan
from pcomm.integration.config import ModelConfig
from pcomm.integration.config_rules import expert_blocks, mixers
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.block import Block
from pcomm.integration.models.context import Cache, Context
from pcomm.integration.models.layer_builder import LayerBuilder
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.rotary import Rotation, rotation

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A decoder: GPT, Mamba, GDN and hybrids, with experts or without, as `config` says.

    Args:
        config: With every size filled in (see `config_rules.validate`).
        vocabulary: Number of token ids.
        collectives: Of the tensor-parallel group; on one rank no layer communicates.
        sequence_parallel: Whether the residual stream is split by tokens over that group.
        device: Where the parameters are.
        dtype: Of the parameters; the computation follows, or an autocast around the call.
        experts: Collectives of the expert-parallel group, which all its ranks enter in each layer
            with experts; by default this rank has all of them.

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

    def plan(
        self,
        cu_seqlens: Sequence[int],
        group: Group | tuple[int, int] = (0, 1),
        *,
        strategy: Literal["auto"] | StrategyName = "auto",
        verify: bool = False,
    ) -> Plan:
        """How the mixers share the sequences of one buffer with the ranks of `group`.

        Local; collective with `verify`, see `make_plan`. Each rank holds one stretch of the buffer
        between the layers, so that sequences need no padding.

        Args:
            cu_seqlens: Offsets of the sequences in the buffer of all ranks, on the host.
            group: The context-parallel group; without it one rank has everything.
            strategy: For all mixers, or `auto` for the one that costs least.
            verify: Have the ranks compare what they pass.

        Raises:
            PcommError: See `make_plan`.
        """
        return make_plan(
            cu_seqlens,
            group,
            self.specs,
            layout="contiguous",
            strategy=strategy,
            # Token shares of tensor-parallel ranks cannot be resharded, which excludes `docs`.
            hidden_dim=None if self.has_stream_shares else self.config.width,
            element_bytes=self._element_bytes(),
            verify=verify,
        )

    def forward(self, tokens_T: Tensor, plan: Plan, balance: Balance | None = None) -> Tensor:
        """Logits `[T, v]` of this rank's part of the vocabulary.

        Collective over the tensor-, the context- and the expert-parallel group.

        Args:
            tokens_T: int64, this context-parallel rank's; the same on its tensor-parallel group.
            plan: From `plan`, for the tokens of all context-parallel ranks.
            balance: In training with experts; backward then brings their balance losses, too.
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
            tokens_T: See `forward`.
            targets_T: int64, of the same tokens.
            plan: See `forward`.
            balance: See `forward`.
        """
        return vocabulary_parallel_cross_entropy(
            self(tokens_T, plan, balance), targets_T, self.vocabulary, self.collectives
        )

    def extend(self, tokens_T: Tensor, cache: Cache, *, num_logits: int | None = None) -> Tensor:
        """Logits `[T, v]` of the next tokens of one sequence, which `cache` then holds as well.

        On one context-parallel rank; collective over the tensor-parallel group.

        Args:
            tokens_T: int64; a prompt first, then one token at a time.
            cache: From `new_cache`.
            num_logits: Of how many of the last tokens logits are computed; None for all. Those of a
                long prompt are many times as large as all else, and to go on takes the last only.
        """
        first, config = cache.num_tokens, self.config
        positions_T = torch.arange(first, first + len(tokens_T), device=tokens_T.device)
        turn = rotation(positions_T, config.head_dim, config.rope_theta, self.norm.weight.dtype)
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
                return rotation(positions_T, config.head_dim, config.rope_theta, weight.dtype)
        return None

    def _element_bytes(self) -> int:
        device = self.norm.weight.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device).itemsize
        return self.norm.weight.dtype.itemsize
