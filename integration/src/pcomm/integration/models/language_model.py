"""The language model: embedding, blocks, norm, head and loss."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pcomm.core import Collectives, IdentityCollectives
from pcomm.core.errors import UnsupportedError
from pcomm.core.tensor_parallel import (
    VocabularyParallelEmbedding,
    param_layouts_of,
    vocabulary_parallel_cross_entropy,
)
from pcomm.gdn_cp import AttentionSpec, Plan, Spec
from pcomm.inference import LayerMemory, LayerSpec, StepBatch
from pcomm.inference.layers import ResidualStream
from pcomm.inference.roofline import StepWeights
from pcomm.integration.config.model_rules import expert_blocks, mixer_units, mixers
from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.forward_context import Context, StepContext
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.layers import (
    LayerBuilder,
    RMSNorm,
    Rotation,
    SwiGLU,
    frequencies,
    rotation,
)
from pcomm.integration.models.mamba2 import Mamba2
from pcomm.integration.models.moe import Balance, MixtureOfExperts

__all__ = ["Block", "LanguageModel", "Mixer"]

Mixer = Attention | GatedDeltaNet | Mamba2
_MIXERS: dict[str, type[Mixer]] = {"A": Attention, "G": GatedDeltaNet, "M": Mamba2}

# Shape suffixes: T tokens of this context-parallel rank, D width; v this rank's share of the
# vocabulary.


class LanguageModel(nn.Module):
    """A decoder: GPT, Mamba, GDN and hybrids, with experts or without, as `config` says.

    `forward` and `token_losses` are for training on packed sequences. `memory_specs` and `step` are
    the `pcomm.inference.Model` that an `Engine` runs, through the same layers.

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
        state_dtype: Dtype of the states that recurrent layers keep of a request in inference; None
            for fp32, and for fp64 in a model of that.
        initialise: False allocates this rank's shards of split weights alone and leaves them as the
            memory was, for weights that are loaded; otherwise each is allocated whole first.
        recompute: True to compute each block again in backward instead of keeping what it needs.
        form: Speed of each tensor-parallel rank, to which its share of the layers is proportional;
            empty for equal shares, or those that are closest to them.
        narrow_residual: True to have the residual stream of `forward` in the dtype of autocast and
            not in that of the parameters.

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
        state_dtype: torch.dtype | None = None,
        initialise: bool = True,
        recompute: bool = False,
        form: tuple[Fraction, ...] = (),
        narrow_residual: bool = False,
    ) -> None:
        super().__init__()
        self.config, self._recomputes = config, recompute
        self._narrow_residual = narrow_residual
        self.collectives = collectives or IdentityCollectives()
        build = LayerBuilder(
            config,
            self.collectives,
            sequence_parallel,
            device,
            dtype,
            experts or IdentityCollectives(),
            state_dtype,
            initialise,
            form,
        )
        self.vocabulary = build.split(vocabulary)
        self.has_stream_shares = sequence_parallel and self.collectives.size > 1
        shares = [build.split(count).sizes for count in mixer_units(config).values()]
        self.has_uneven_shards = any(len(set(sizes)) > 1 for sizes in shares)
        self.embedding = VocabularyParallelEmbedding(
            self.vocabulary,
            config.width,
            self.collectives,
            sequence_parallel=sequence_parallel,
            initialise=initialise,
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
        self._has_attention = "A" in mixers(config)
        self._frequencies: tuple[object, Tensor] | None = None

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
        if self._narrow_residual and torch.is_autocast_enabled(self.device.type):
            x = x.to(torch.get_autocast_dtype(self.device.type))
        keeps = not (self._recomputes and torch.is_grad_enabled())
        for block in self.blocks:
            # Nothing in a block is random.
            x = (
                block(x, context)
                if keeps
                else checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
            )
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

    def memory_specs(self) -> list[LayerSpec]:
        """What each block keeps of a request on this rank; see `pcomm.inference.Model`. Local.

        Raises:
            UnsupportedError: The residual stream is split over the tensor-parallel ranks.
        """
        if self.has_stream_shares:
            raise UnsupportedError(
                "LanguageModel.memory_specs: a model with sequence_parallel=True",
                found=f"a residual stream that {self.collectives.size} ranks share by tokens",
                why="A step of inference has any number of tokens, mostly fewer than ranks.",
                fix="Build the model with sequence_parallel=False; its weights are the same.",
            )
        return [block.mixer.memory_spec for block in self._blocks]

    def step_weights(self) -> StepWeights:
        """Bytes of this rank's weights that a step of inference reads. Local."""
        mixtures = [b.mlp for b in self._blocks if isinstance(b.mlp, MixtureOfExperts)]
        return StepWeights.of(
            self,
            tables=[self.embedding],
            experts=[(one.experts, one.expert_weights) for one in mixtures],
        )

    @torch.inference_mode()
    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits `[L, V]` of the tokens `batch.logits_rows`, and all memories extended.

        See `pcomm.inference.Model`. On one context-parallel rank; collective over the tensor- and
        the expert-parallel group, whose ranks have the same batch and get the same logits.

        Args:
            batch: New tokens of many requests.
            memory: Pools of each block, as `memory_specs` asks for them.
        """
        turn = self._turns(batch.positions_T) if self._has_attention else None
        context = StepContext.of(batch, turn)
        x = self.embedding(batch.tokens_T)
        if ResidualStream.takes(x):
            logits_Lv = self._step_on_device(ResidualStream(x), context, memory)
        else:
            for block, own in zip(self._blocks, memory, strict=True):
                assert own is not None, "every block keeps something"
                x = block.step(x, context, own)
            logits_Lv = self.head(self.norm(x.index_select(0, batch.logits_rows)))
        if self.collectives.size == 1:
            return logits_Lv
        return self.collectives.all_gather(logits_Lv, dim=-1, sizes=self.vocabulary.sizes)

    def _step_on_device(
        self, stream: ResidualStream, context: StepContext, memory: Sequence[LayerMemory | None]
    ) -> Tensor:
        """This rank's part of the logits, where sums, norms and gates are part of other kernels."""
        for block, own in zip(self._blocks, memory, strict=True):
            assert own is not None, "every block keeps something"
            block.step_on_device(stream, context, own)
        return stream.select(context.batch.logits_rows).product(self.norm.of_step, self.head)

    def num_parameters(self) -> int:
        """Parameters of the whole model, whatever part of them this rank has; local."""
        param_layouts = param_layouts_of(self)
        return sum(
            param_layouts[name].logical_shape(parameter.shape).numel()
            for name, parameter in self.named_parameters()
        )

    def training_flops(self, sequence_length: int) -> float:
        """Floating-point operations of one token in forward and backward, as PaLM counts. Local.

        Six for each weight of a product that the token meets; in attention, 12 for each number of
        its queries and each token of a row. What a recurrence does beside its products, and what is
        computed again in backward, is left out.

        Args:
            sequence_length: Tokens in a row.
        """
        config = self.config
        table = 0 if config.tie_embeddings else sum(self.vocabulary.sizes) * config.width
        weights = self.num_parameters() - self._num_idle_parameters() - table
        queries = mixers(config).count("A") * config.heads * config.head_dim
        return 6.0 * weights + 12.0 * queries * sequence_length

    def describe(self) -> str:
        """The blocks, and which kernels run those that are recurrent; one line each, local."""
        lines = [f"{self.num_parameters():,} parameters in blocks {mixers(self.config)}"]
        if self.config.experts:
            lines.append(self._describe_experts())
        kernels = [b.mixer.kernels for b in self._blocks if not isinstance(b.mixer, Attention)]
        return "\n".join([*lines, *dict.fromkeys(one.describe() for one in kernels)])

    def _describe_experts(self) -> str:
        config, layers = self.config, sum(expert_blocks(self.config))
        return (
            f"{config.experts} experts in {layers} blocks, {config.experts_per_token} a token, "
            f"which meets {self.num_parameters() - self._num_idle_parameters():,} parameters"
        )

    def _num_idle_parameters(self) -> int:
        """Those of experts that a token does not go to: three matrices each."""
        config = self.config
        idle = max(0, config.experts - config.experts_per_token) * sum(expert_blocks(config))
        return idle * 3 * config.width * config.expert_width

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _rotation(self, plan: Plan) -> Rotation | None:
        """Of the tokens that attention sees, where there is attention."""
        for spec in self.specs:
            if isinstance(spec, AttentionSpec):
                return self._turns(plan.positions_of(spec, self.device))
        return None

    def _turns(self, positions_T: Tensor) -> Rotation:
        weight = self.norm.weight
        known = self._frequencies
        if known is None or known[0] != (weight.dtype, weight.device):
            turns_R = frequencies(self.config, weight.dtype, weight.device)
            known = self._frequencies = ((weight.dtype, weight.device), turns_R)
        return rotation(positions_T, known[1], weight.dtype)


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
        """`[T, D]` to `[T, D]`, in the dtype of `x`."""
        # What is added may be in a wider one than a narrow stream; the sum is rounded once.
        x = (x + self.mixer(self.mixer_norm(x), context)).to(x.dtype)
        return self._feed_forward(x, context.balance)

    def step(self, x: Tensor, context: StepContext, memory: LayerMemory) -> Tensor:
        """The same for the new tokens of many requests, of which the mixer has kept `memory`."""
        # A call of a module costs as much as a small operation, so `forward` is called directly.
        # The engine allocates what the mixer asks for in `memory_spec`.
        x = x + self.mixer.step(self.mixer_norm.forward(x), context, memory)  # type: ignore[arg-type]
        mlp, norm = self.mlp, self.mlp_norm
        return x if mlp is None or norm is None else x + mlp.forward(norm.forward(x))

    def step_on_device(
        self, stream: ResidualStream, context: StepContext, memory: LayerMemory
    ) -> None:
        """The same on a GPU, where what is added to the stream is part of other kernels."""
        mixer, mlp, norm = self.mixer, self.mlp, self.mixer_norm
        if isinstance(mixer, Attention):
            mixer.step_on_device(stream, norm, context, memory)  # type: ignore[arg-type]
        else:
            stream.add(mixer.step(stream.normed(norm.of_step), context, memory))  # type: ignore[arg-type]
        if self.mlp_norm is None or mlp is None:
            return
        if isinstance(mlp, SwiGLU):
            mlp.step_on_device(stream, self.mlp_norm)
        else:
            stream.add(mlp.forward(stream.normed(self.mlp_norm.of_step)))

    def _feed_forward(self, x: Tensor, balance: Balance | None) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        normed = self.mlp_norm(x)
        with_experts = isinstance(self.mlp, MixtureOfExperts)
        y: Tensor = self.mlp(normed, balance) if with_experts else self.mlp(normed)
        return (x + y).to(x.dtype)
