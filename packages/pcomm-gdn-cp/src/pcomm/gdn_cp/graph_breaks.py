"""Where `torch.compile` leaves its graph: at operations that communicate or read a plan.

A plan is another one for each micro-batch, and its collectives run in Python. A graph that had
traced them would belong to one pack, so what a layer asks a plan or a core for runs as it stands,
and `torch.compile` compiles what lies between. With `fullgraph=True` it says so instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

# The same as torch.compiler.disable, except that Dynamo (seconds) is imported by the first call,
# not when a function is defined. torch's optimizers use it for that reason.
from torch._compile import _disable_dynamo

__all__ = ["outside_graphs"]

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def outside_graphs(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """`function`, at which a compiled layer leaves its graph; the same to all other callers."""
    outside = _disable_dynamo(function)

    @wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        # Nothing is traced before Dynamo is imported, which takes seconds.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return outside(*args, **kwargs)

    return call
