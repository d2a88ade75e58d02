"""What the compiler makes of each kernel, as the operations launch it: without a GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pcomm.nvls.bench.calls import calls
from pcomm.nvls.testing.compiled import compile_kernel
from pcomm.nvls.testing.fake_device import fake_driver, fake_workspace
from pcomm.nvls.workspace.launch import Launch

__all__ = ["Build", "builds", "recorded_launches"]


@dataclass(frozen=True)
class Build:
    """A kernel that was compiled.

    Args:
        operation: Name of the operation.
        algorithm: How it is carried out.
        architecture: Architecture, 90 for Hopper.
        seconds: Time of the compiler, with an empty cache.
        registers: Registers of a thread.
        spilled_bytes: Bytes of a thread in local memory.
        num_blocks: Number of thread blocks (CTAs) of the launch.
        num_warps: Number of warps of a block.
    """

    operation: str
    algorithm: str
    architecture: int
    seconds: float
    registers: int
    spilled_bytes: int
    num_blocks: int
    num_warps: int


def builds(*, world: int, architectures: Sequence[int]) -> Iterator[Build]:
    """Compile the kernel of each operation and algorithm. Local; needs Linux and no GPU.

    Args:
        world: Number of ranks that kernels are compiled for.
        architectures: Architectures, 90 for Hopper.
    """
    with _empty_cache():
        for architecture in architectures:
            for (operation, algorithm), launch in recorded_launches(world, architecture).items():
                begin = time.perf_counter()
                made = compile_kernel(
                    launch.kernel,
                    launch.arguments,
                    architecture,
                    num_warps=launch.num_warps,
                    max_registers=launch.max_registers,
                )
                seconds = time.perf_counter() - begin
                usage = made.resources()
                yield Build(
                    operation,
                    algorithm,
                    architecture,
                    seconds,
                    usage["REG"],
                    usage["STACK"] + usage["LOCAL"],
                    launch.num_blocks,
                    launch.num_warps,
                )


def recorded_launches(world: int, architecture: int) -> dict[tuple[str, str], Launch]:
    """What each operation would launch on ranks that are not there, by operation and algorithm."""
    found: dict[tuple[str, str], Launch] = {}
    with (
        fake_driver(architecture),
        # With `debug` no call is kept, of which there would have to be a compiled kernel.
        fake_workspace(world, 1 << 24, capability=architecture, debug=True) as workspace,
    ):
        launches: list[Launch] = []
        workspace.launcher.run = launches.append  # type: ignore[method-assign, assignment]
        for case, run in calls(workspace).items():
            run()
            found[case] = launches[-1]
    return found


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before
