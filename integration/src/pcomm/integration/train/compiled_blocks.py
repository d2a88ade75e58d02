"""The blocks of a model under torch.compile, and what came of it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch import nn

from pcomm.core.errors import ConfigError

__all__ = ["CompiledBlocks", "check_compiler", "uncompiled"]


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
        blocks = list(model.get_submodule("blocks").children())
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=backend)
        self._num_blocks, self._before, self._start = len(blocks), _counts(), time.perf_counter()

    def describe(self) -> str:
        """Graphs and breaks until now, and the time that the first step took with them. Local."""
        graphs, breaks = (now - was for now, was in zip(_counts(), self._before, strict=True))
        taken_s = time.perf_counter() - self._start
        return (
            f"{self._num_blocks} blocks compiled: {graphs} graphs for all of them, {breaks} graph "
            f"breaks; {taken_s:.1f} s until the end of the first step"
        )


def uncompiled() -> AbstractContextManager[object]:
    """Within it, what is compiled runs as it was written: its shapes are those of one call only."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


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
