"""Write docs/gpu-kernels.md: what the kernels are compiled to, and what bandwidth that allows.

    python tools/gpu_kernels.py

Launches are those that other tools and tests make; nothing is launched. A test compares the page.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# Test support and benchmarks are no part of the wheels.
for _kind in ("tests", "benchmarks"):
    for _folder in sorted(Path(__file__).parents[1].glob(f"packages/*/{_kind}")):
        if str(_folder) not in sys.path:
            sys.path.append(str(_folder))

from core_support.kernel_launches import compiled, recorded
from gdn_cp_support.pack_launches import launch_of as pack_launch_of
from nvls_bench.on_host import recorded_launches
from nvls_support.compiled import CompiledKernel, compile_kernel

import gpu_counts
from machine_code import Reading, read_code
from pcomm.core.kernel_launch import KernelLaunch
from repository import ROOT

__all__ = ["GPUS", "PAGE", "Gpu", "Kernel", "Needs", "kernels", "page", "release", "row", "share"]

PAGE = ROOT / "docs" / "gpu-kernels.md"
RANKS = 8


# -- what a GPU has --------------------------------------------------------------------------


class Gpu(NamedTuple):
    """A GPU of one architecture. Assumptions from what is published; none was measured here."""

    name: str
    capability: int
    multiprocessors: int
    bytes_per_s: float
    """Of its memory."""

    bytes_in_flight: int
    """How many of a multiprocessor saturate that memory."""

    link_bytes_per_s: float
    """NVLink, one direction."""

    @property
    def latency_s(self) -> float:
        """Time of a load when memory is saturated, as those bytes imply."""
        return self.bytes_in_flight * self.multiprocessors / self.bytes_per_s


# Data sheets of NVIDIA for H100 SXM and B200. Bytes in flight: "CUDA Techniques to Maximize Memory
# Bandwidth and Hide Latency", GTC 2025.
GPUS = (
    Gpu("H100 SXM", 90, 132, 3.35e12, 32 << 10, 450e9),
    Gpu("B200", 100, 148, 8.0e12, 40 << 10, 900e9),
)
# A load from another GPU, through a switch. No published figure is behind this one.
LINK_LATENCY_S = 2e-6
# Of a multiprocessor of 9.0 and of 10.0: CUDA C++ Programming Guide, technical specifications for
# each compute capability; granularities as in the occupancy calculator of Nsight Compute; columns of
# tensor memory, which Hopper has none of: PTX ISA, tcgen05.
_WARPS, _BLOCKS, _QUARTERS = 64, 32, 4
_REGISTERS, _REGISTERS_AT_A_TIME = 1 << 16, 256
_SHARED, _SHARED_OF_SYSTEM, _SHARED_AT_A_TIME = 228 << 10, 1 << 10, 128
_TENSOR_COLUMNS = 512


class Needs(NamedTuple):
    """What a block asks of a multiprocessor."""

    warps: int
    registers: int
    """Of a thread."""

    shared_bytes: int = 0
    tensor_columns: int = 0

    def fitting(self) -> tuple[int, str]:
        """How many blocks fit at a time, and what there would have to be more of."""
        of_warp = -(-32 * self.registers // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
        warps = _REGISTERS // _QUARTERS // of_warp * _QUARTERS
        shared = -(-self.shared_bytes // _SHARED_AT_A_TIME) * _SHARED_AT_A_TIME
        found = {
            "blocks": _BLOCKS,
            "threads": _WARPS // self.warps,
            "registers": warps // self.warps,
            "shared memory": _SHARED // (shared + _SHARED_OF_SYSTEM),
        }
        if self.tensor_columns:
            found["tensor memory"] = _TENSOR_COLUMNS // self.tensor_columns
        limit = min(found, key=lambda name: found[name])
        return found[limit], limit


def share(gpu: Gpu, needs: Needs, num_blocks: int, thread_bytes: int, *, over_link: bool) -> float:
    """Which part of the bandwidth the loads on their way can have, by Little's law; at most 1.

    Args:
        gpu: GPU.
        needs: What a block asks for.
        num_blocks: Blocks of the launch.
        thread_bytes: Bytes that a thread has on the way.
        over_link: Whether NVLink is the limit, in place of memory.
    """
    resident = min(num_blocks, needs.fitting()[0] * gpu.multiprocessors)
    on_the_way = resident * needs.warps * 32 * thread_bytes
    if over_link:
        return min(1.0, on_the_way / LINK_LATENCY_S / gpu.link_bytes_per_s)
    return min(1.0, on_the_way / gpu.latency_s / gpu.bytes_per_s)


# -- what is launched ------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel with the grid of one launch, which compiles it."""

    package: str
    name: str
    num_blocks: int
    compile: Callable[[], tuple[CompiledKernel, int, int]]
    """The code, the warps of a block, and its columns of tensor memory."""


def kernels(gpu: Gpu) -> list[Kernel]:
    """Each kernel once, as the launches compile it that other pages and benchmarks look at."""
    return [*_of_nvls(gpu), *_of_gdn_cp(gpu), *_of_inference(gpu)]


def _of_nvls(gpu: Gpu) -> list[Kernel]:
    """Each operation on 2,048 rows of 4,096 numbers; those for what is small on 64 rows of 512."""
    found: dict[str, Any] = {}
    large = {"rows": 2048, "hidden": 4096, "lamport": False}
    for sizes in (large, {}):
        for launch in recorded_launches(RANKS, gpu.capability, **sizes).values():
            # By multicast where there is that: it stands before copies between peers.
            found.setdefault(launch.kernel.__name__, launch)

    def compile_it(launch: Any) -> tuple[CompiledKernel, int, int]:
        made = compile_kernel(
            launch.kernel,
            launch.arguments,
            gpu.capability,
            num_warps=launch.num_warps,
            max_registers=launch.max_registers,
        )
        return made, launch.num_warps, 0

    return [
        Kernel("pcomm-nvls", name, one.num_blocks, lambda one=one: compile_it(one))
        for name, one in found.items()
    ]


def _of_gdn_cp(gpu: Gpu) -> list[Kernel]:
    """A layer of Gated DeltaNet as in docs/gpu-counts.md, and packs of its sections on 8 ranks."""
    with recorded() as launches:
        gpu_counts.layers(list(gpu_counts.SHAPES)[:1])
    for case in ("pack", "unpack"):
        tiles = pack_launch_of(case, RANKS, tokens=gpu_counts.TOKENS // RANKS, device="meta")
        grid = (tiles.num_programs,)
        launches.append(KernelLaunch(tiles.kernel, grid, tiles.arguments, tiles.device))
    return _representatives("pcomm-gdn-cp", launches, gpu)


def _of_inference(gpu: Gpu) -> list[Kernel]:
    """The steps of docs/gpu-counts.md."""
    with recorded() as launches:
        gpu_counts.steps()
    return _representatives("pcomm-inference", launches, gpu)


def _representatives(package: str, launches: Iterable[KernelLaunch], gpu: Gpu) -> list[Kernel]:
    """Of each kernel the launch that is made most often, and of those the one of most blocks."""
    by_name: dict[str, dict[int, KernelLaunch]] = {}
    times: Counter[tuple[str, int]] = Counter()
    for launch in launches:
        name, blocks = launch.kernel.__name__, 1
        for size in launch.grid:
            blocks *= size
        by_name.setdefault(name, {})[blocks] = launch
        times[name, blocks] += 1

    def compile_it(launch: KernelLaunch) -> tuple[CompiledKernel, int, int]:
        made = compiled(launch, gpu.capability)
        asm, told = made.asm, made.metadata
        code = CompiledKernel(gpu.capability, asm["ptx"], asm["cubin"], told.shared)
        return code, told.num_warps, getattr(told, "tmem_size", 0)

    found = []
    for name, of_blocks in by_name.items():
        blocks = max(of_blocks, key=lambda n, name=name: (times[name, n], n))
        one = of_blocks[blocks]
        found.append(Kernel(package, name, blocks, lambda one=one: compile_it(one)))
    return found


# -- the page --------------------------------------------------------------------------------


class Row(NamedTuple):
    """A kernel on a GPU."""

    kernel: Kernel
    needs: Needs
    spilled_bytes: int
    reading: Reading
    share: float

    def text(self, gpu: Gpu) -> str:
        """The line of the table."""
        fit, limit = self.needs.fitting()
        read = self.reading
        loads = " + ".join(f"{n} x {width}" for width, n in sorted(read.loads.items())[::-1])
        of_thread = self.needs.warps * 32 * fit * read.num_bytes / 1024
        cells = [
            *(f"`{self.kernel.name}`", f"{self.kernel.num_blocks:,}", self.needs.warps),
            *(self.needs.registers, self.spilled_bytes, f"{self.needs.shared_bytes / 1024:.1f}"),
            *(f"{fit}, {limit}", f"{loads}{'' if read.in_loop else ', no loop'}"),
            *(", ".join(read.divisions) or "-", ", ".join(read.products) or "-"),
            *(f"{of_thread:.1f}", f"{100 * self.share:.0f} %"),
        ]
        return f"| {' | '.join(map(str, cells))} |\n"

    def reason(self, gpu: Gpu) -> str:
        """Why it has less than half of the bandwidth."""
        fit, limit = self.needs.fitting()
        least = 1 << 40
        many = share(gpu, self.needs, least, self.reading.num_bytes, over_link=self.over_link)
        text = f"{self.reading.num_bytes} bytes of a thread"
        if many >= 0.5:
            return f"{self.kernel.num_blocks:,} blocks of {32 * self.needs.warps} threads, {text}"
        warps = fit * self.needs.warps
        return f"{text}, {warps} of {_WARPS} warps, for {limit}"

    @property
    def over_link(self) -> bool:
        """Whether what it moves goes to other GPUs."""
        return self.kernel.package == "pcomm-nvls"


def row(kernel: Kernel, gpu: Gpu) -> Row:
    """Compile and read a kernel."""
    code, warps, columns = kernel.compile()
    used = code.resources()
    needs = Needs(warps, used["REG"], code.shared_bytes, columns)
    reading = read_code(code.machine_code())
    over_link = kernel.package == "pcomm-nvls"
    part = share(gpu, needs, kernel.num_blocks, reading.num_bytes, over_link=over_link)
    return Row(kernel, needs, used["STACK"] + used["LOCAL"], reading, part)
