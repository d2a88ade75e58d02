"""What the layers share: in a forward, and in a step of inference."""

# Shape suffixes: T tokens of the step, N requests, C channels, W width of a convolution,
# P = W - 1 tokens before a token.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp import Plan, Spec
from pcomm.gdn_cp.ops import causal_convolution, convolution_step, graph_break
from pcomm.inference import StateMemory, StateSpec, StepBatch
from pcomm.integration.models.layers import Rotation
from pcomm.integration.models.moe import Balance

__all__ = ["Context", "StepContext", "advance", "convolve", "state_spec"]


@dataclass(frozen=True)
class Context:
    """Shared by the layers of one forward pass over packed sequences.

    Args:
        plan: The plan of the sequences, which tells what tokens belong together, and how they
            travel between context-parallel ranks.
        rotation: Rotation of the tokens that attention sees; None in a model without attention.
        has_stream_shares: True if the residual stream is split over tensor-parallel ranks. Then no
            strategy of the plan moves hidden states, and projections gather the tokens.
        balance: Counts for the balance losses of layers with experts; None without these.
    """

    plan: Plan
    rotation: Rotation | None
    has_stream_shares: bool = False
    balance: Balance | None = None

    @graph_break
    def enter(self, spec: Spec, x: Tensor) -> Tensor:
        """Hidden states as the projections of a mixer want them; collective, see `Plan.enter`."""
        return x if self.has_stream_shares else self.plan.enter(spec, x)

    @graph_break
    def leave(self, spec: Spec, y: Tensor) -> Tensor:
        """What `enter` undoes."""
        return y if self.has_stream_shares else self.plan.leave(spec, y)


Part = Callable[..., tuple[Tensor, Tensor]]
"""`(states, *inputs)` of some requests to their outputs and the states after them."""

Chunks = Callable[..., tuple[Tensor, Tensor]]
"""The same for requests with `cu_seqlens` after the inputs, from which their tokens begin."""


@dataclass(frozen=True)
class StepContext:
    """Shared by the layers of one step over the tokens of many requests.

    Attributes:
        batch: Tokens and places of the requests.
        rotation: Rotation of the tokens; None in a model without attention.
        num_single: Number of requests before the first one with several new tokens. Recurrent
            layers compute them token by token, and the others in chunks.
        cu_seqlens: Offsets of the requests behind them in their tokens, from 0.
    """

    batch: StepBatch
    rotation: Rotation | None
    num_single: int
    cu_seqlens: tuple[int, ...]

    @classmethod
    def of(cls, batch: StepBatch, rotation: Rotation | None) -> StepContext:
        """The context of `batch`; integers only."""
        num_single, offsets = 0, batch.cu_seqlens
        if len(offsets) - 1 == offsets[-1]:
            num_single = offsets[-1]
        else:
            for start, stop in pairwise(offsets):
                if stop - start != 1:
                    break
                num_single += 1
        return cls(batch, rotation, num_single, tuple(n - num_single for n in offsets[num_single:]))


def state_spec(spec: Spec, dtype: torch.dtype, state_dtype: torch.dtype | None) -> StateSpec:
    """What a recurrent mixer keeps of a request: the inputs of its convolution, and its state.

    Args:
        spec: Mixer on this rank.
        dtype: Dtype of the model.
        state_dtype: Dtype of the states; None for fp32, and for fp64 in a model of that.
    """
    state, convolution = spec.state, spec.convolution
    assert state is not None, "a recurrent mixer has a state"
    assert convolution is not None, "and a convolution"
    shapes = {"halo": (convolution.reach, convolution.channels), "state": state.shape}
    wide = torch.promote_types(dtype, torch.float32)
    return StateSpec(shapes, {"halo": dtype, "state": state_dtype or wide})


def advance(
    name: str,
    context: StepContext,
    memory: StateMemory,
    inputs: tuple[Tensor, ...],
    *,
    one_token: Part,
    chunks: Chunks,
    is_apart: bool = False,
) -> Tensor:
    """Outputs `[T, ...]` of a recurrence that goes on from the states in `memory`; local.

    The states after the step are written back. Requests with one new token go through `one_token`
    as one batch, the others through `chunks` as one pack.

    Args:
        name: Name of the tensor in the `StateSpec`.
        context: Step that is computed.
        memory: Pools of the layer.
        inputs: Tensors whose first dimension is T.
        one_token: Function of states `[N, ...]` and inputs of N tokens.
        chunks: Function of states `[N, ...]`, inputs of N sequences, and their offsets.
        is_apart: True to call `chunks` for each request alone, where products of several requests
            together have other roundings; on a CPU, where that takes about as long.
    """
    batch, n = context.batch, context.num_single
    states = memory.read(name, batch)
    if n == batch.num_requests:
        output, states = one_token(states, *inputs)
    else:
        parts = [one_token(states[:n], *(x[:n] for x in inputs))] if n else []
        states, inputs = states[n:], tuple(x[n:] for x in inputs)
        if is_apart and not states.is_cuda:
            for place, (start, stop) in enumerate(pairwise(context.cu_seqlens)):
                own = (x[start:stop] for x in inputs)
                parts.append(chunks(states[place : place + 1], *own, (0, stop - start)))
        else:
            parts.append(chunks(states, *inputs, context.cu_seqlens))
        output, states = (torch.cat(part) for part in zip(*parts, strict=True))
    memory.write(name, batch, states)
    return output


def convolve(
    context: StepContext,
    memory: StateMemory,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
) -> Tensor:
    """The causal convolution of a mixer, `[T, C]`, with the inputs before the step from `memory`.

    Args:
        context: Step that is computed.
        memory: Pools of the layer, of which `halo` is `[N, P, C]` for N requests.
        x_TC: Inputs.
        weight_CW: Filters.
        bias_C: Bias of each channel, if there is one.
    """
    return advance(
        "halo",
        context,
        memory,
        (x_TC,),
        one_token=lambda halo, x: convolution_step(x, halo, weight_CW, bias_D=bias_C),
        chunks=lambda halo, x, cu_seqlens: causal_convolution(
            x, weight_CW, cu_seqlens=cu_seqlens, bias_D=bias_C, initial_halo=halo
        ),
    )
