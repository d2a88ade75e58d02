"""A model of Llama's kind in plain PyTorch, with the calls that no implementation can leave out."""

# Shape suffixes: T tokens of the step, D width, H query heads, G key heads, K head dim, V
# vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.tensor_parallel import WeightProduct
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.layers.packed_weight import packed_weight
from pcomm.inference.model import KVMemory, KVSpec, LayerMemory, StepBatch


@dataclass(frozen=True)
class Shape:
    """Widths of a model of Llama's kind, whose head is its embedding.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        mlp_width: Width between the two matrices of the MLP.
        vocabulary: Number of token ids.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int


SHAPES = (
    Shape("tiny", 4, 64, 4, 2, 16, 176, 512),
    Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152),
)


class WideWeight:
    """A weight as it is: `F.linear`.

    Args:
        weight_OI: Weight of O outputs and I inputs.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight_OI, self.nbytes = weight_OI, weight_OI.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `WeightProduct`; without a bias."""
        return F.linear(x, self.weight_OI)


class PlainLlama:
    """Random weights, packed where that gains; a `pcomm.inference.model.Model`.

    Args:
        shape: Widths of the model.
        longest: Number of positions that are prepared.
        dtype: Dtype of weights, activations, keys and values.
        device: Device of the model.
    """

    def __init__(
        self,
        shape: Shape,
        longest: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator(device).manual_seed(0)

        def matrix(outputs: int, inputs: int) -> Tensor:
            weight = torch.randn(outputs, inputs, generator=generator, device=device)
            return weight.mul_(inputs**-0.5).to(dtype)

        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.table_VD = matrix(shape.vocabulary, shape.width)
        self.layers = [
            (
                matrix(heads, shape.width),
                matrix(shape.width, shape.heads * shape.head_dim),
                matrix(2 * shape.mlp_width, shape.width),
                matrix(shape.width, shape.mlp_width),
            )
            for _ in range(shape.layers)
        ]
        self._products = [tuple(map(_product, layer)) for layer in self.layers]
        self._head = _product(self.table_VD)
        self.norm_D = torch.ones(shape.width, dtype=dtype, device=device)
        frequencies = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(longest), frequencies).repeat(1, 2)
        self.rotations = torch.stack([angles.cos(), angles.sin()], 1).to(device, dtype)

    def memory_specs(self) -> Sequence[KVSpec]:
        """Keys and values of every layer."""
        shape = self.shape
        return [KVSpec(shape.kv_heads, shape.head_dim, self.dtype)] * shape.layers

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """See `pcomm.inference.model.Model`."""
        shape = self.shape
        x_TD = F.embedding(batch.tokens_T, self.table_VD)
        cos, sin = self.rotations.index_select(0, batch.positions_T).unsqueeze(2).unbind(1)
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        for (qkv, out, gate_up, down), kv in zip(self._products, memory, strict=True):
            assert isinstance(kv, KVMemory)
            heads = qkv(self._norm(x_TD), None).unflatten(1, (-1, shape.head_dim))
            q_and_k, v_TGK = heads.split([sum(counts[:2]), counts[2]], 1)
            left, right = q_and_k.chunk(2, -1)
            turned = q_and_k * cos + torch.cat([-right, left], -1) * sin
            q_THK, k_TGK = turned.split(counts[:2], 1)
            mixed_THK = paged_attention(q_THK, k_TGK, v_TGK, kv, batch)
            x_TD = x_TD + out(mixed_THK.flatten(1), None)
            gate, up = gate_up(self._norm(x_TD), None).chunk(2, -1)
            x_TD = x_TD + down(F.silu(gate) * up, None)
        return self._head(self._norm(x_TD.index_select(0, batch.logits_rows)), None)

    def linears(self, num_tokens: int) -> Tensor:
        """The matrix products of a step in which each request has one token, and nothing else."""
        shape = self.shape
        x_TD = torch.ones(num_tokens, shape.width, dtype=self.dtype)
        mixed = torch.ones(num_tokens, shape.heads * shape.head_dim, dtype=self.dtype)
        inner = torch.ones(num_tokens, shape.mlp_width, dtype=self.dtype)
        for qkv, out, gate_up, down in self._products:
            qkv(x_TD, None)
            out(mixed, None)
            gate_up(x_TD, None)
            down(inner, None)
        return self._head(x_TD, None)

    def _norm(self, x_TD: Tensor) -> Tensor:
        return F.rms_norm(x_TD, self.norm_D.shape, self.norm_D, 1e-5)


def _product(weight_OI: Tensor) -> WeightProduct:
    return packed_weight(weight_OI) or WideWeight(weight_OI)
