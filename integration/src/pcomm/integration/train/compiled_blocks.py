"""The blocks of a model under torch.compile, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pcomm.core.errors import ConfigError

__all__ = ["CompiledBlocks", "check_compiler"]


class CompiledBlocks:
    """Compiles the forward of each block, when it is called first; blocks alike share the code.

    What ranks exchange, the cores of the mixers and attention stay as they are: a graph ends before
    each of them, and the next one begins behind it. Made before blocks are sharded, whose hooks are
    then outside of the graphs.

    Args:
        model: A model with `blocks`.
        backend: Backend of `torch.compile`.
    """

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        # Of graphs that fit the same sizes, the first one is taken each time, not the one that ran
        # last: a block that is computed again must save what it saved before (pytorch#166926). It
        # holds for the process, in which it changes no number. Not every torch has it.
        orders_by_use = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
        if orders_by_use is not None:
            orders_by_use(False)
        blocks = model.get_submodule("blocks").children()
        self._compiled = [(x, torch.compile(x.forward, backend=backend)) for x in blocks]
        self._put_in()
        self._before, self._start = _counts(), time.perf_counter()

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Within it, the blocks run as they were written: its shapes are those of one call only.

        Local, and of this model alone: a stance of torch would be one for all threads, each of
        which could be in a run of its own. Not to be entered again before it was left.
        """
        for block, _ in self._compiled:
            # The one of the class shows again.
            del block.forward
        try:
            yield
        finally:
            self._put_in()

    def _put_in(self) -> None:
        for block, forward in self._compiled:
            block.forward = forward

    def describe(self) -> str:
        """Graphs and breaks until now, and the time that the first step took with them. Local."""
        graphs, breaks = (now - was for now, was in zip(_counts(), self._before, strict=True))
        taken_s = time.perf_counter() - self._start
        return (
            f"{len(self._compiled)} blocks compiled: {graphs} graphs for all of them, {breaks} "
            f"graph breaks; {taken_s:.1f} s until the end of the first step"
        )


def _counts() -> tuple[int, int]:
    """Graphs that this process has compiled, and breaks between them."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where there is nothing to compile with. Local.

    Raises:
        ConfigError: A CPU without a C++ compiler.
    """
    if device.type != "cpu":
        return
    # Imported late: it takes a second, and most runs are not compiled.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # of a class that torch keeps to itself
        raise ConfigError(
            "train.compile",
            found=f"the value true, and {str(error).splitlines()[0] or 'no C++ compiler'}",
            why="On a CPU torch.compile writes C++.",
            fix="Install g++ (Debian: `apt install g++`), name a compiler in CXX, or set "
            "train.compile = false.",
        ) from error
