"""Operations of a counted step, done again on this machine and timed one by one.

A roofline knows one rate of products and one of memory. On a processor neither is one number: small
products, attention, `exp` and what is read across a stride run at rates of their own. So what a
step takes here is measured, operation by operation, each kind of it once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["OperationCall", "Replay", "share_of_cores", "threads_of_rank"]


def share_of_cores(num_ranks: int) -> float:
    """Cores of this machine for each of so many local ranks; they wait for each other below 1."""
    cores = os.cpu_count() or 1
    return cores / num_ranks if num_ranks > cores else cores // num_ranks


@contextmanager
def threads_of_rank(num_ranks: int) -> Iterator[None]:
    """As many threads of torch as each of so many local ranks has."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(share_of_cores(num_ranks))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OperationCall(NamedTuple):
    """An operation and its arguments without their memory; equal ones take as long."""

    function: Any
    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperationCall:
        """A call, of whose tensors the form is kept, and of host integers the values, too."""
        leaves, tree = tree_flatten((args, dict(kwargs)))
        return cls(function, tuple(map(_described, leaves)), tree)

    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments of the same form that have memory. Local."""
        args, kwargs = tree_unflatten([_made(leaf) for leaf in self.leaves], self.tree)
        return args, kwargs


@dataclass(frozen=True)
class _TensorForm:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None = field(compare=False)


def _described(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    is_host = type(leaf) is Tensor and not leaf.is_floating_point()
    values = leaf if is_host else None
    return _TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, values)


def _made(leaf: object) -> object:
    if not isinstance(leaf, _TensorForm):
        return leaf
    if leaf.values is not None:
        return leaf.values.clone()
    last = sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))
    # Neither 0, of which some functions have an easy answer, nor anything that overflows.
    number = 0.5 if leaf.dtype.is_floating_point else 0
    filled = torch.full((last + 1 if all(leaf.shape) else 0,), number, dtype=leaf.dtype)
    return filled.as_strided(leaf.shape, leaf.stride)


# An operation is timed for so long, at most so often and at least twice.
_TIMED_S, _MOST_TURNS = 2e-3, 7
# Bytes that push what was used before them out of the caches of a core.
_CACHED = 2**24


class Replay:
    """Seconds of operations on this machine, in time of the processor.

    Other programs do not add to that time, but they take caches away from it.

    Args:
        num_ranks: Local ranks that share this machine.
        limit_s: Seconds of the processor that all calls of `measure` may take together, about.
    """

    def __init__(self, num_ranks: int, limit_s: float) -> None:
        self._num_ranks, self._left_s = num_ranks, limit_s
        self._known: dict[OperationCall, float] = {}
        self._other = torch.zeros(_CACHED // 4)

    def measure(self, steps: Iterable[tuple[OperationCall, float]]) -> None:
        """Time operations that are not known, those first that are expected to take most. Local.

        Args:
            steps: Each operation that is done, with the seconds that it is expected to take.
        """
        expected: Counter[OperationCall] = Counter()
        for call, seconds in steps:
            if call not in self._known:
                expected[call] += seconds  # type: ignore[assignment]
        with threads_of_rank(self._num_ranks):
            for call, _ in expected.most_common():
                if self._left_s <= 0:
                    return
                start = time.process_time()
                # What asks for values that are not there keeps what is expected.
                with suppress(RuntimeError, IndexError):
                    self._known[call] = self._seconds(call)
                self._left_s -= time.process_time() - start

    def seconds(self, call: OperationCall | None) -> float | None:
        """What an operation takes; None if it was not timed. Local."""
        return None if call is None else self._known.get(call)

    def _seconds(self, call: OperationCall) -> float:
        function, (args, kwargs), turns = call.function, call.arguments(), list[float]()
        with torch.no_grad():
            # What a shape asks for once, such as a kernel of oneDNN, is not part of a step.
            function(*args, **kwargs)
            while len(turns) < 2 or (sum(turns) < _TIMED_S and len(turns) < _MOST_TURNS):
                # A step has done other things since this memory was last used.
                self._other.add_(1.0)
                start = time.process_time()
                function(*args, **kwargs)
                turns.append(time.process_time() - start)
        return statistics.median(turns) / share_of_cores(self._num_ranks)
