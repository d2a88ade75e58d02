"""Gradients of gates where decays leave little or nothing over, against the recurrence in fp64.

A token's decay scales a state that a gradient arrives at later: their product is what the logarithm
of the decay gets. So the error allowed is a share of the two norms, which are as small as the decay
makes them: where nothing is left over, nothing may be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core_support.interpreter import interpreted
from gdn_cp_bench.slow_decay import delta_inputs, gradients, offsets, ssd_inputs
from gdn_cp_support.kernels import MODULES, TORCH, TRITON, in_double
from pcomm.core.testing.assertions import poisoned_memory
from pcomm.gdn_cp.ops.backend import Kernels

# A chunk and one more, nothing, and a sequence that ends within its chunk.
LENGTHS = (65, 0, 9)
# Logarithms of the decay of every token of a head; other heads mix them.
STRENGTHS = (-0.01, -10.0, -100.0)
NUM_HEADS = len(STRENGTHS) + 3
WAYS = pytest.mark.parametrize("way", [TORCH, TRITON], ids=["torch", "triton"])
SIZES = pytest.mark.parametrize(
    ("lengths", "key_dim", "value_dim"),
    [(LENGTHS, 6, 5), pytest.param((130, 1, 64), 70, 33, marks=pytest.mark.soak)],
)
UNIT, LEAST = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.float32).tiny


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted(MODULES), poisoned_memory():
        yield


def logs_of_decays(num_tokens: int) -> Tensor:
    """`[T, NUM_HEADS]`: even ones, of all strengths, mostly weak, and weak behind strong ones."""
    generator = torch.Generator().manual_seed(3)
    drawn = -(1e4 ** torch.rand(num_tokens, generator=generator)) / 100
    in_turns, first = torch.full((2, num_tokens), -0.01)
    in_turns[::5], first[:40] = -100.0, -100.0
    even = [torch.full_like(drawn, log) for log in STRENGTHS]
    return torch.stack([*even, drawn, in_turns, first], 1)


class Passed(NamedTuple):
    """What passes the decays of a recurrence in fp64.

    Args:
        grads: Gradients of the leaves.
        decayed_TH: Norm of each token's state behind its decay.
        arriving_TH: Norm of the gradient of that.
        largest_H: Largest norm of a state times the largest of a gradient.
    """

    grads: tuple[Tensor, ...]
    decayed_TH: Tensor
    arriving_TH: Tensor
    largest_H: Tensor


def passed(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state_NHKV: Tensor,
    lengths: tuple[int, ...],
    leaves: tuple[Tensor, ...],
    skip_H: Tensor | None = None,
) -> Passed:
    """Token by token, with the gradients that `gradients` gives; the delta rule without a skip."""
    repeats = v_THV.shape[1] // k_TGK.shape[1]
    q, k = (x.repeat_interleave(repeats, 1) for x in (q_TGK, k_TGK))
    outputs, finals, decayed, states = [], [], [], [state_NHKV.flatten(2)]
    for state, (start, stop) in zip(state_NHKV, pairwise(offsets(lengths)), strict=True):
        for t in range(start, stop):
            decayed.append(g_TH[t].exp()[:, None, None] * state)
            known = 0 if skip_H is not None else torch.einsum("hkv,hk->hv", decayed[-1], k[t])
            written = beta_TH[t][:, None] * (v_THV[t] - known)
            state = decayed[-1] + torch.einsum("hk,hv->hkv", k[t], written)
            read = torch.einsum("hkv,hk->hv", state, q[t])
            outputs.append(read if skip_H is None else read + skip_H[:, None] * v_THV[t])
            states.append(state.flatten(1)[None])
        finals.append(state)
    wanted = (*leaves, *decayed)
    found = gradients((torch.stack(outputs), torch.stack(finals)), wanted)
    grads, arriving = found[: len(leaves)], torch.stack(found[len(leaves) :])
    arriving_TH = arriving.norm(dim=(2, 3))
    largest_H = torch.cat(states).norm(dim=2).amax(0) * arriving_TH.amax(0)
    decayed_TH = torch.stack(decayed).norm(dim=(2, 3))
    return Passed(grads, decayed_TH.detach(), arriving_TH, largest_H.detach())


def roundings(g_TH: Tensor, num_terms: int) -> Tensor:
    """`[H]`: of sums, and of a decay, the exponential of a difference of sums over a chunk.

    Three more are those of the logarithms themselves, where they are computed.
    """
    sums_H = g_TH.detach().double().unfold(0, min(64, len(g_TH)), 1).sum(-1).amin(0).neg()
    return (num_terms + 4 * sums_H) * UNIT


def allowed(exact: Passed, share_H: Tensor, way: Kernels) -> Tensor:
    """`[T, H]`: this share of what passes each decay."""
    # Torch's form takes decays for 0 from where they change no digit of what they are added to.
    least = LEAST if way is TRITON else (2 * UNIT) ** 2
    return share_H * exact.decayed_TH * exact.arriving_TH + least * exact.largest_H


@WAYS
@SIZES
def test_gated_delta_rule(
    lengths: tuple[int, ...], key_dim: int, value_dim: int, way: Kernels
) -> None:
    sizes = {"key_heads": 2, "key_dim": key_dim, "value_dim": value_dim}
    inputs = delta_inputs(lengths, heads=NUM_HEADS, dtype=torch.float32, **sizes)
    inputs = inputs._replace(g_TH=logs_of_decays(sum(lengths)).requires_grad_())
    *tokens, state = inputs
    cu = offsets(lengths)
    outputs = way.chunk_gated_delta_rule(*tokens, cu_seqlens=cu, initial_state=state)
    found = gradients(outputs, (inputs.g_TH,))[0].double()
    leaves = in_double(inputs)
    exact = passed(*leaves, lengths, (leaves[3],))
    bound = allowed(exact, roundings(inputs.g_TH, 64 + key_dim + value_dim), way)
    assert ((found - exact.grads[0]).abs() <= bound).all()
    # Much of what is compared is far below a rounding of what decays.
    assert (bound < UNIT * exact.largest_H).double().mean() > 0.4


@WAYS
@SIZES
def test_mamba2(lengths: tuple[int, ...], key_dim: int, value_dim: int, way: Kernels) -> None:
    """Parameters get what the decays get, times their logarithms; time steps what is new, too."""
    sizes = {"groups": 2, "state_dim": key_dim, "head_dim": value_dim}
    inputs = ssd_inputs(lengths, heads=NUM_HEADS, dtype=torch.float32, **sizes)
    logs_TH = logs_of_decays(sum(lengths))
    # Rates at which a time step of 2 is the strongest decay of the head.
    rate_H = -logs_TH.amin(0) / 2
    inputs = inputs._replace(
        dt_TH=(-logs_TH / rate_H).expm1().log().requires_grad_(),
        a_log_H=rate_H.log().requires_grad_(),
        dt_bias_H=torch.zeros(NUM_HEADS, requires_grad=True),
    )
    x, dt, a_log, b, c, d, bias, state = inputs
    options = {"d_H": d, "dt_bias_H": bias, "initial_state": state}
    outputs = way.chunk_mamba2_ssd(x, dt, a_log, b, c, cu_seqlens=offsets(lengths), **options)
    of_dt, of_log, of_bias = (one.double() for one in gradients(outputs, (dt, a_log, bias)))
    x, dt, a_log, b, c, d, bias, state = in_double(inputs)
    time_TH = F.softplus(dt + bias)
    g_TH = -a_log.exp() * time_TH
    exact = passed(c, b, x, g_TH, time_TH, state, lengths, (dt, a_log, bias), d)
    share_H = roundings(g_TH, 64 + key_dim + value_dim)
    bound = allowed(exact, share_H, way) * g_TH.detach().abs()
    assert ((of_log - exact.grads[1]).abs() <= bound.sum(0)).all()
    new_TH = b.norm(dim=2).repeat_interleave(NUM_HEADS // 2, 1) * x.norm(dim=2) * time_TH
    bound = bound + share_H * exact.arriving_TH * new_TH.detach()
    # From the logarithm of a time step to `dt`.
    bound = bound * ((dt + bias).sigmoid() / time_TH).detach()
    assert ((of_dt - exact.grads[0]).abs() <= bound).all()
    assert ((of_bias - exact.grads[2]).abs() <= bound.sum(0)).all()
