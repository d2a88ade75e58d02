"""Assertions of tests: close numbers, fresh memory that is no result, and what is left behind."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pcomm.core.testing.programs import scaled_s

__all__ = [
    "Living",
    "assert_as_accurate",
    "assert_close",
    "assert_equal",
    "left_behind",
    "num_parameters",
    "poisoned_memory",
]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits; NaN equals NaN. For everything that only moves data."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_close(
    actual: Tensor, expected: Tensor, *, num_terms: int, magnitude: float | None = None
) -> None:
    """Equal up to the rounding of sums of `num_terms` products in the dtype of `actual`.

    Args:
        actual: The tensor under test.
        expected: The reference, in the same or a wider dtype.
        num_terms: Length of the longest chain of additions behind one element, in both results
            together; a matrix product of inner size K has K.
        magnitude: Largest sum of absolute values behind one element; by default the largest
            element of `expected`, times the square root of `num_terms`, which is what such a
            sum has for terms of random sign.
    """
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    assert torch.isfinite(actual).all(), "the result holds values that are not finite"
    # An infinite reference would make the bound infinite too, and let everything pass.
    assert torch.isfinite(expected).all(), "the reference holds values that are not finite"
    if not expected.numel():
        return
    unit = torch.finfo(actual.dtype).eps / 2
    reference = expected.double()
    if magnitude is None:
        magnitude = float(reference.abs().max()) * num_terms**0.5
    bound = (num_terms + 1) * unit * magnitude
    worst = float((actual.double() - reference).abs().max())
    assert worst <= bound, (
        f"worst element is off by {worst:.3e}; {num_terms} terms of total magnitude "
        f"{magnitude:.3e} in {actual.dtype} explain {bound:.3e}"
    )


def assert_as_accurate(
    actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2.0, num_terms: int = 1
) -> None:
    """At most `factor` times as far from `exact` as plain torch is, in norm and worst element.

    Args:
        actual: The tensor under test.
        plain: Result of the same computation by plain torch, in the same dtype.
        exact: Result of the same computation in float64.
        factor: Largest allowed ratio of the two errors.
        num_terms: Roundings granted in any case, for when plain torch is exact by luck.
    """
    assert actual.shape == exact.shape, f"shapes {actual.shape} and {exact.shape}"
    assert torch.isfinite(exact).all(), "the reference holds values that are not finite"
    assert plain.shape == exact.shape, f"plain torch has shape {plain.shape}, not {exact.shape}"
    assert actual.dtype == plain.dtype, f"{actual.dtype}, plain torch has {plain.dtype}"
    reference = exact.double()
    floor = num_terms * torch.finfo(actual.dtype).eps / 2
    for name, measure in (("norm", torch.Tensor.norm), ("worst element", _largest)):
        ours = float(measure(actual.double() - reference))
        theirs = float(measure(plain.double() - reference))
        allowed = factor * theirs + floor * float(measure(reference))
        assert ours <= allowed, f"{name} of the error is {ours:.3e}, plain torch's {theirs:.3e}"


def _largest(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN (the largest value for integers).

    Code that reads an element before it is written then fails a comparison instead of finding a
    zero by luck. Torch does this under deterministic algorithms, of which only this part is used:
    an operation without a deterministic form is not an error here.
    """
    # A module with a property, which type checkers do not see.
    memory: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # `torch.use_deterministic_algorithms` would import torch's compiler, which takes seconds in
    # each new process.
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills


# Threads of a gloo communicator: two that run its operations, one that polls its connections.
_GLOO = frozenset({"pt_gloo_runloop", "gloo_tcp_loop"})
# A thread that was told to end may need a moment. Only one that never ends costs all of it.
_ENDING_S = 2.0


@dataclass(frozen=True)
class Living:
    """What there is in this process at a moment.

    Args:
        gloo_threads: Ids of the threads of gloo communicators, three for each; none where the
            system does not tell (only Linux does).
        other_threads: Ids of all others. A thread of gloo may not have its name yet.
        threads: Threads that Python knows.
        process_groups: Names and descriptions of the communicators that torch.distributed knows;
            they are not held by this object.
    """

    gloo_threads: frozenset[int]
    other_threads: frozenset[int]
    threads: frozenset[threading.Thread]
    process_groups: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Living:
        """Count. Local; nothing is collected, connected or ended."""
        names = dist.distributed_c10d._world.pg_names if dist.is_available() else {}
        groups = frozenset((name, group.group_desc) for group, name in names.items())
        return cls(*_threads_of_the_system(), frozenset(threading.enumerate()), groups)

    @property
    def names_of_groups(self) -> frozenset[str]:
        """Under which torch.distributed knows the communicators."""
        return frozenset(name for name, _ in self.process_groups)

    def beyond(self, before: Living) -> list[str]:
        """What there is now and was not there before, in words; empty if nothing."""
        found = []
        if gloo := self.gloo_threads - before.gloo_threads - before.other_threads:
            found.append(f"{len(gloo)} threads of gloo communicators")
        found += sorted(f"the thread {t.name!r}" for t in self.threads - before.threads)
        found += sorted(
            f"the process group {description or name!r}"
            for name, description in self.process_groups - before.process_groups
        )
        return found


def left_behind(before: Living, *, within_s: float | None = None) -> list[str]:
    """What is there now and was not before, although it had the chance to go. Local.

    Nothing is collected where nothing is left, so the check is cheap in the usual case.

    Args:
        before: The count that was taken before.
        within_s: Time that threads may take to end, in seconds; by default a few seconds, and
            more where the machine is busy.
    """
    found = Living.now().beyond(before)
    if not found:
        return found
    end = time.monotonic() + (scaled_s(_ENDING_S) if within_s is None else within_s)
    pause_s = 0.02
    while True:
        gc.collect()
        found = Living.now().beyond(before)
        if not found or time.monotonic() >= end:
            return found
        # A collection takes 0.1 s of a processor, which those that are waited for may need.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def num_parameters() -> int:
    """How many `nn.Parameter` live in this process after a collection. Local; some 100 ms."""
    gc.collect()
    with warnings.catch_warnings():
        # Some of torch's own objects warn when they are asked for their type.
        warnings.simplefilter("ignore", FutureWarning)
        return sum(isinstance(found, nn.Parameter) for found in gc.get_objects())


def _threads_of_the_system() -> tuple[frozenset[int], frozenset[int]]:
    """Ids of the threads of gloo, and of all others."""
    gloo: set[int] = set()
    others: set[int] = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        # One that ends while it is looked at is gone.
        with suppress(OSError):
            (gloo if task.read_text().strip() in _GLOO else others).add(int(task.parent.name))
    return frozenset(gloo), frozenset(others)
