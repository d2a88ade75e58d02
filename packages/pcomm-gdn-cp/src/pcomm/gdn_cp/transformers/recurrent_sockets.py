"""Gated DeltaNet and Mamba-2 mixers of transformers, over the ranks of a plan.

All of them call two functions by the same global names: a short convolution, and then a
recurrence. A mixer's own `forward` runs with these two names bound to functions of this module, so
its projections, norms and multipliers stay its own. The convolution is put off: what goes into it
travels with what else the recurrence takes, in one exchange.
"""

# t tokens of this rank between layers, T tokens of its core, C channels, H value heads, G key heads
# or groups, K key dim, V value dim, P head dim, S state dim

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.gdn_cp.ops.backend import Kernels, choose_kernels
from pcomm.gdn_cp.ops.entry import compute_dtype, graph_break
from pcomm.gdn_cp.plan import Plan
from pcomm.gdn_cp.specs import GdnSpec, Mamba2Spec, Section, Spec

__all__ = ["RecurrentSocket", "recurrent_sockets"]

_CONVOLUTION = "causal_conv1d_fn"
_RECURRENCES = ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan")
# The fused form of all steps, where its package is installed; without it mixers take them apart.
_FUSED = "mamba2_split_conv1d_scan_combined"


@dataclass(frozen=True)
class DeltaRuleSpec(GdnSpec):
    """A Gated DeltaNet whose gates travel already computed, in the dtype of the projections.

    Args:
        beta_parts: Columns of a head's beta: 3 where it is wider than that dtype.
        decay_parts: Columns of the logarithm of a head's decay, by the same rule.
    """

    beta_parts: int = 1
    decay_parts: int = 1

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Queries, keys, values and both gates."""
        q, k, v, b, a = super().sections
        beta = Section(b.name, b.num_heads, self.beta_parts)
        return q, k, v, beta, Section(a.name, a.num_heads, self.decay_parts)


@dataclass(frozen=True)
class StateSpaceSpec(Mamba2Spec):
    """A Mamba-2 mixer whose time steps may be wider than its other projections.

    Args:
        step_parts: Columns of a head's time step: 3 where it is wider.
    """

    step_parts: int = 1

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The inputs x, B, C and the time steps."""
        x, b, c, dt = super().sections
        return x, b, c, Section(dt.name, dt.num_heads, self.step_parts)


@dataclass(frozen=True)
class _PutOff:
    """A convolution that waits for the exchange: `[t, C]`, `[C, W]` and `[C]`."""

    x_tC: Tensor
    weight: Tensor
    bias: Tensor | None


class RecurrentSocket:
    """One recurrent mixer of a model, which can run over ranks.

    Args:
        name: The name of the module in the model.
        module: The mixer itself, whose `forward` is replaced while it is plugged.

    Attributes:
        spec: The specification of what the mixer moves; None until it has run once.
        hidden_dim: The width of the mixer's input; 0 until then.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.spec: Spec | None = None
        self.hidden_dim = 0
        self._plan_of: Callable[[Spec], Plan] | None = None
        self._waiting: _PutOff | None = None
        self._is_empty = False
        self._forward = self._with_own_names(inspect.unwrap(type(module).forward))

    def plug(self, plan_of: Callable[[Spec], Plan]) -> None:
        """Have the module run by the plan that has its specification."""
        self._plan_of = plan_of
        self.module.__dict__["forward"] = self._run

    def unplug(self) -> None:
        """Have the module run as it does alone."""
        self._plan_of = self._waiting = None
        self.module.__dict__.pop("forward", None)

    def _with_own_names(self, forward: Any) -> Callable[..., Any]:
        """The mixer's own `forward`, whose functions are those of this socket."""
        names = {
            **forward.__globals__,
            _CONVOLUTION: self._put_off,
            _FUSED: _no_fused_form,
            _RECURRENCES[0]: self._delta_rule,
            _RECURRENCES[1]: self._state_space,
        }
        rebound = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        rebound.__kwdefaults__ = forward.__kwdefaults__
        return MethodType(rebound, self.module)

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's `forward` on the tokens of its core's strategy."""
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if hidden.shape[0] != 1:
            raise LayoutError(
                f"context_parallel: {self.name}",
                found=f"hidden states of shape {tuple(hidden.shape)}",
                why="The sequences of a batch lie one after the other in one row.",
                fix="Pass what `batch` returns to the model.",
            )
        self.hidden_dim = hidden.shape[-1]
        if self.spec is None:
            found: Tensor = self._forward(hidden, *args[1:], **kwargs)
            return found
        assert self._plan_of is not None, "its forward runs within a batch only"
        plan = self._plan_of(self.spec)
        x = plan.enter(self.spec, hidden[0])
        # Views with a dimension of -1 do not exist of no tokens, so a rank without any has one
        # that goes nowhere.
        self._is_empty = not len(x)
        if self._is_empty:
            x = torch.cat([x, x.new_zeros(1, self.hidden_dim)])
        y = self._forward(x[None], *args[1:], **kwargs)[0]
        if self._is_empty:
            y = y[:0]
        return plan.leave(self.spec, y)[None]

    # -- the functions that the mixer's forward finds by their names --------------------------

    @graph_break
    def _put_off(
        self,
        x_1Ct: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> Tensor:
        """What comes in, for the mixer to split; the recurrence convolves it."""
        if activation not in ("silu", "swish"):
            raise self._refused(f"a convolution with {activation!r}", "Ours are followed by SiLU.")
        x_tC = x_1Ct[0].mT.contiguous()
        self._waiting = _PutOff(x_tC, weight, bias)
        return x_tC.mT[None]

    @graph_break
    def _delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """`[1, t, H, V]`: convolution and gated delta rule."""
        waiting = self._taken((query, key, value), initial_state)
        dtype = waiting.x_tC.dtype
        spec = DeltaRuleSpec(
            key.shape[2],
            value.shape[2],
            key.shape[3],
            value.shape[3],
            waiting.weight.shape[1],
            _num_parts(beta, dtype),
            _num_parts(g, dtype),
        )
        gates, normalise = (beta, g), use_qk_l2norm_in_kernel
        plan, kernels, (q, k, v, b, a) = self._moved(spec, waiting, gates, normalise=normalise)
        if not normalise:
            q = q * q.shape[-1] ** -0.5
        offsets = plan.cu_seqlens_of(spec)
        chunks = kernels.delta_chunks(k, v, _whole(a), _whole(b), cu_seqlens=offsets)
        summary = chunks.summary() if plan.needs_summary(spec) else None
        y, _ = chunks.outputs(q, initial_state=plan.entry_states(spec, summary))
        return self._back(plan, spec, y), None

    @graph_break
    def _state_space(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *unused: Any,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = (0.0, float("inf")),
        **others: Any,
    ) -> Tensor:
        """`[1, t, H, P]`: convolution and state space."""
        waiting = self._taken((x, B, C), initial_states)
        if not dt_softplus or dt_bias is None:
            raise self._refused(
                "time steps without a softplus or a bias", "The core has both for each head."
            )
        if tuple(dt_limit) != (0.0, float("inf")):
            dt, dt_bias = _limited(dt, dt_bias, *dt_limit), torch.zeros_like(dt_bias)
        spec = StateSpaceSpec(
            x.shape[2],
            x.shape[3],
            B.shape[2],
            B.shape[3],
            waiting.weight.shape[1],
            _num_parts(dt, waiting.x_tC.dtype),
        )
        plan, kernels, (x, b, c, step) = self._moved(spec, waiting, (dt,))
        share = plan.head_share(spec)
        # A is what the mixer made of its parameter: -exp(A_log).
        log, bias = (share.take(of_heads, "dt") for of_heads in ((-A).log(), dt_bias))
        offsets = plan.cu_seqlens_of(spec)
        chunks = kernels.ssd_chunks(x, _whole(step), log, b, dt_bias_H=bias, cu_seqlens=offsets)
        summary = chunks.summary() if plan.needs_summary(spec) else None
        skip = None if D is None else share.take(D, "dt")
        y, _ = chunks.outputs(c, d_H=skip, initial_state=plan.entry_states(spec, summary))
        return self._back(plan, spec, y)

    # -- what both have in common -------------------------------------------------------------

    def _taken(self, parts: Sequence[Tensor], initial_state: Tensor | None) -> _PutOff:
        """The convolution that was put off, if `parts` are what came out of it, side by side."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or initial_state is not None:
            raise self._refused(
                "a recurrence that goes on from a cache, or without a convolution before it",
                "A plan continues sequences by itself.",
            )
        x_tC = waiting.x_tC
        if self.spec is None:
            place = x_tC.data_ptr()
            for part in parts:
                if part.data_ptr() != place or part.stride(1) != x_tC.stride(0):
                    raise self._refused(
                        "something between its convolution and its recurrence",
                        "The convolution is put off until the exchange before the recurrence.",
                    )
                place += part.shape[2] * part.shape[3] * part.element_size()
        return waiting

    def _moved(
        self, spec: Spec, waiting: _PutOff, gates: Sequence[Tensor], *, normalise: bool = False
    ) -> tuple[Plan, Kernels, list[Tensor]]:
        """The sections at the tokens and heads of the core, `[T, heads, width]`, convolved."""
        self.spec = spec
        assert self._plan_of is not None, "its forward runs within a batch only"
        plan, names = self._plan_of(spec), [section.name for section in spec.sections[:3]]
        num_tokens = 0 if self._is_empty else len(waiting.x_tC)
        widths = [section.width for section in spec.sections[:3]]
        inputs = [*waiting.x_tC[:num_tokens].split(widths, -1)]
        inputs += [
            _in_parts(gate[0, :num_tokens], waiting.x_tC.dtype, section.head_width)
            for gate, section in zip(gates, spec.sections[3:], strict=True)
        ]
        mixed, *others = plan.to_heads(spec, inputs, fused=3)
        share = plan.head_share(spec)
        kernels = choose_kernels(mixed.device, mixed.dtype)
        convolved = kernels.convolve_sections(
            mixed,
            share.take(waiting.weight, names),
            share.shapes(names),
            cu_seqlens=plan.cu_seqlens_of(spec),
            bias_D=None if waiting.bias is None else share.take(waiting.bias, names),
            initial_halo=plan.conv_halo(spec, mixed),
            normalise=normalise,
        )
        apart = [
            x.unflatten(-1, (-1, section.head_width))
            for x, section in zip(others, spec.sections[3:], strict=True)
        ]
        return plan, kernels, [*convolved, *apart]

    def _back(self, plan: Plan, spec: Spec, y: Tensor) -> Tensor:
        """`[1, t, H, V]` of all heads."""
        y = plan.from_heads(spec, y.flatten(1))
        if self._is_empty:
            y = torch.cat([y, y.new_zeros(1, y.shape[1])])
        found: Tensor = y.unflatten(-1, (spec.output.num_heads, -1))[None]
        return found

    def _refused(self, found: str, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"context_parallel: {self.name} ({type(self.module).__name__})",
            found=found,
            why=why,
            fix="Call the operations of a plan in a forward of your own for this mixer.",
        )


def recurrent_sockets(model: nn.Module) -> list[RecurrentSocket]:
    """The mixers of a model that call a convolution and a recurrence of this package. Local."""
    found = []
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
        if _CONVOLUTION in names and names.intersection(_RECURRENCES):
            found.append(RecurrentSocket(name, module))
    return found


def _limited(dt: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """What the softplus of the core makes time steps within limits of."""
    dtype = compute_dtype(dt)
    steps = nn.functional.softplus(dt.to(dtype) + bias.to(dtype)).clamp(max(low, 1e-30), high)
    raw: Tensor = steps + (-torch.expm1(-steps)).log()
    return raw


def _no_fused_form(*_: Any, **__: Any) -> None:
    """The mixer takes the steps apart."""


def _num_parts(gate: Tensor, dtype: torch.dtype) -> int:
    return 3 if gate.dtype.itemsize > dtype.itemsize else 1


def _in_parts(gate_tH: Tensor, dtype: torch.dtype, num_parts: int) -> Tensor:
    """A gate as a sum of numbers of a narrower dtype, so that it travels with the others exactly.

    Three of bf16 have the 24 bits of fp32. The gradient goes through the first.
    """
    parts = [gate_tH.to(dtype)]
    rest = gate_tH.detach()
    for _ in range(num_parts - 1):
        rest = rest - parts[-1].detach()
        parts.append(rest.to(dtype))
    return torch.stack(parts, -1).flatten(1)


def _whole(parts_THW: Tensor) -> Tensor:
    """The gate that `_in_parts` took apart."""
    if parts_THW.shape[-1] == 1:
        return parts_THW[..., 0]
    whole: Tensor = parts_THW.float().sum(-1)
    return whole
