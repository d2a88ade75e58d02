"""Inputs whose states live for hundreds of tokens, and packs with awkward lengths.

With the usual initial values a state is forgotten after about eight tokens, and a test of what
happens between chunks, segments or documents passes whatever happens there. The tests take their
inputs from here too.
"""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim,
# P head dim, S state dim

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.gated_delta_rule import delta_gates
from pcomm.gdn_cp.ops.norms import normalise_queries_keys


class DeltaInputs(NamedTuple):
    """Arguments of `chunk_gated_delta_rule`, each a leaf that wants its gradient."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    beta_TH: Tensor
    state_NHKV: Tensor


class SsdInputs(NamedTuple):
    """Arguments of `chunk_mamba2_ssd`, each a leaf that wants its gradient."""

    x_THP: Tensor
    dt_TH: Tensor
    a_log_H: Tensor
    b_TGS: Tensor
    c_TGS: Tensor
    d_H: Tensor
    dt_bias_H: Tensor
    state_NHSP: Tensor


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """`cu_seqlens` of sequences of these lengths."""
    return tuple(accumulate(lengths, initial=0))


def awkward_lengths(chunk: int) -> tuple[int, ...]:
    """One token, a chunk less one, a chunk, one more, nothing, several chunks, two tokens."""
    return (1, chunk - 1, chunk, chunk + 1, 0, 3 * chunk + 2, 2)


def slow_parameters(
    num_heads: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`A_log` from -5 to -1 and `dt_bias` from -2 to -1, `[H]` each."""
    log = torch.rand(num_heads, generator=generator, dtype=torch.float64) * 4 - 5
    bias = torch.rand(num_heads, generator=generator, dtype=torch.float64) - 2
    return log.to(dtype), bias.to(dtype)


def delta_inputs(
    lengths: Sequence[int],
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 6,
    value_dim: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> DeltaInputs:
    """Normalised queries and keys, values, gates and states of a pack, the same for a seed."""
    num_tokens, (normal, log, bias) = sum(lengths), _drawn(heads, seed)
    q, k = (normal(num_tokens, key_heads, key_dim) for _ in range(2))
    g, beta = delta_gates(normal(num_tokens, heads), normal(num_tokens, heads), log, bias)
    state = normal(len(lengths), heads, key_dim, value_dim)
    tensors = (*normalise_queries_keys(q, k), normal(num_tokens, heads, value_dim), g, beta, state)
    return DeltaInputs(*(x.to(dtype).requires_grad_() for x in tensors))


def ssd_inputs(
    lengths: Sequence[int],
    *,
    groups: int = 2,
    heads: int = 4,
    head_dim: int = 5,
    state_dim: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> SsdInputs:
    """Inputs, time steps, parameters and states of a pack, the same for a seed."""
    num_tokens, (normal, log, bias) = sum(lengths), _drawn(heads, seed)
    b, c = (normal(num_tokens, groups, state_dim) for _ in range(2))
    x, dt = normal(num_tokens, heads, head_dim), normal(num_tokens, heads)
    state = normal(len(lengths), heads, state_dim, head_dim)
    tensors = (x, dt, log, b, c, normal(heads), bias, state)
    return SsdInputs(*(x.to(dtype).requires_grad_() for x in tensors))


def _drawn(num_heads: int, seed: int) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """What draws normal numbers of a shape, and parameters that were drawn before."""
    generator = torch.Generator().manual_seed(seed)
    parameters = slow_parameters(num_heads, generator, torch.float64)
    return partial(torch.randn, generator=generator, dtype=torch.float64), *parameters


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, seed: int = 1
) -> tuple[Tensor, ...]:
    """Gradients of the inputs when a random gradient, the same for a seed, meets each output."""
    generator = torch.Generator().manual_seed(seed)
    arriving = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs
    ]
    return torch.autograd.grad(outputs, inputs, arriving, materialize_grads=True)


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The worst element of all pairs, each relative to the largest element of its reference.

    A value that is not finite counts as infinitely wrong.
    """
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
        if theirs.numel():
            reference = theirs.detach().double()
            scale = float(reference.abs().max()) or 1.0
            off = float((ours.detach().double() - reference).abs().max()) / scale
            worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst
