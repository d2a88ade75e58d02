"""Whether a model mixes tokens only where its sockets are.

Ranks hold tokens in another order than that of the sequence. So everything outside of the sockets
has to work token by token, from the token and its position. That is tried on one rank, by a run
whose tokens lie backwards: a convolution, a shift or a state that is no socket sees other
neighbours, and its module is named.
"""

# n tokens of the text, V token ids

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.plan import Plan, make_plan
from pcomm.gdn_cp.specs import Spec

__all__ = ["BackwardsPlan", "Trace", "plan_alone", "refuse_difference", "traced"]

# What rounding explains, as a part of the largest number: of fp32, in which cores of transformers
# compute whatever comes in; and of narrower dtypes, where these round steps that ours do not.
_ROUNDED, _NARROW = 2e-4, 0.3

Trace = list[tuple[str, Tensor]]


class BackwardsPlan:
    """A plan of one rank that holds the tokens of one text from the last to the first.

    Args:
        spec: The mixer.
        num_tokens: Tokens of the text.
    """

    def __init__(self, spec: Spec, num_tokens: int) -> None:
        self._plan = plan_alone(spec, num_tokens)

    def to_heads(self, spec: Spec, sections: Sequence[Tensor], *, fused: int = 1) -> list[Tensor]:
        """The sections, forwards."""
        return self._plan.to_heads(spec, [x.flip(0) for x in sections], fused=fused)

    def from_heads(self, spec: Spec, output_TW: Tensor) -> Tensor:
        """The output, backwards."""
        return output_TW.flip(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def plan_alone(spec: Spec, num_tokens: int) -> Plan:
    """The plan of one text on one rank."""
    return make_plan((0, num_tokens), (0, 1), spec)


@contextmanager
def traced(model: nn.Module, num_tokens: int, *, is_backwards: bool = False) -> Iterator[Trace]:
    """What each module returns within, where it has a row for each token; inner modules first."""
    trace: Trace = []

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.shape[:2] == (1, num_tokens):
                trace.append((name, first.flip(1) if is_backwards else first))

        return note

    hooks = [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if name]
    try:
        yield trace
    finally:
        for handle in hooks:
            handle.remove()


def refuse_difference(
    model: nn.Module, alone: Trace, ours: Trace, logits: tuple[Tensor, Tensor], what: str
) -> None:
    """Raise if two runs of a model differ, by the name of the first module that does. Local.

    Args:
        model: The model.
        alone: What its modules return in its own forward.
        ours: What the same modules return within the sockets.
        logits: The logits of both.
        what: What was done, for the error.

    Raises:
        UnsupportedError: They differ by more than rounding.
    """
    # Logits may be wider than what they were computed from.
    is_narrow = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    part = _NARROW if is_narrow else _ROUNDED
    if _close(*logits, part):
        return
    modules = dict(model.named_modules())
    pairs = zip(alone, ours, strict=False)
    name = next((n for (n, x), (m, y) in pairs if n == m and not _close(x, y, part)), "")
    outer = name.rpartition(".")[0]
    raise UnsupportedError(
        f"context_parallel: {type(model).__name__}",
        found=f"{what}, its logits are others; the first module to differ is {name!r} "
        f"({type(modules[name]).__name__} of {type(modules[outer]).__name__})",
        why="It mixes tokens, or counts them, outside of attention by name and the recurrences "
        "that are known.",
        fix="Call the operations of a plan in a forward of your own for that layer.",
    )


def _close(wanted: Tensor, found: Tensor, part: float) -> bool:
    if wanted.shape != found.shape:
        return False
    limit = part * float(wanted.double().abs().max())
    return float((wanted.double() - found.double()).abs().max()) <= limit
