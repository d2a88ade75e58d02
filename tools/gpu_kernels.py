"""Write docs/gpu-kernels.md: what the kernels are compiled to, and what bandwidth that allows.

    python tools/gpu_kernels.py

Launches are those that other tools and tests make; nothing is launched. A test compares the page.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Test support and benchmarks are no part of the wheels.
sys.path.extend(map(str, Path(__file__).parents[1].glob("packages/*/[tb]e*s")))

import gpu_counts
from bandwidth_model import GPUS, LIMITS, LINK_LATENCY_S, Gpu, Needs, share
from core_support.kernel_launches import compiled, recorded
from gdn_cp_support.pack_launches import launch_of as pack_launch_of
from machine_code import Reading, read_code
from nvls_bench.on_host import recorded_launches
from nvls_support.compiled import CompiledKernel, compile_kernel
from pcomm.core.kernel_launch import KernelLaunch
from repository import ROOT

__all__ = ["PAGE", "Kernel", "Row", "kernels", "pack_launches", "page", "release", "row"]

PAGE = ROOT / "docs" / "gpu-kernels.md"
RANKS = 8


# -- what is launched ------------------------------------------------------------------------


class Compiled(NamedTuple):
    """The code of a kernel, and what a block has beside."""

    code: CompiledKernel
    num_warps: int
    tensor_columns: int


class Kernel(NamedTuple):
    """A kernel with the grid of one launch, as which it is compiled."""

    package: str
    name: str
    num_blocks: int
    compile: Callable[[], Compiled]

    @property
    def over_link(self) -> bool:
        """Whether what it moves is between GPUs."""
        return self.package == "nvls"


def kernels(gpu: Gpu, packages: Iterable[str] = ("nvls", "gdn-cp", "inference")) -> list[Kernel]:
    """Each kernel once, as the launches compile it that other pages and benchmarks look at."""
    found = {"nvls": _of_nvls, "gdn-cp": _of_gdn_cp, "inference": _of_inference}
    return [kernel for package in packages for kernel in found[package](gpu)]


def _of_nvls(gpu: Gpu) -> list[Kernel]:
    found: dict[str, Any] = {}
    large = recorded_launches(RANKS, gpu.capability, rows=2048, hidden=4096, lamport=False)
    # By multicast where there is that: it stands before copies between peers.
    for launch in (*large.values(), *recorded_launches(RANKS, gpu.capability).values()):
        found.setdefault(launch.kernel.__name__, launch)

    def compile_it(launch: Any) -> Compiled:
        made = compile_kernel(
            launch.kernel,
            launch.arguments,
            gpu.capability,
            num_warps=launch.num_warps,
            max_registers=launch.max_registers,
        )
        return Compiled(made, launch.num_warps, 0)

    return [
        Kernel("nvls", name, one.num_blocks, partial(compile_it, one))
        for name, one in found.items()
    ]


def _of_gdn_cp(gpu: Gpu) -> list[Kernel]:
    with recorded() as launches:
        gpu_counts.layers(list(gpu_counts.SHAPES)[:1])
    return _most_frequent("gdn-cp", [*launches, *pack_launches(torch.device("meta"))], gpu)


def pack_launches(device: torch.device) -> Iterator[KernelLaunch]:
    """Those that pack and unpack what a layer of Gated DeltaNet exchanges."""
    for case in ("pack", "unpack"):
        tokens = gpu_counts.TOKENS // RANKS
        tiles = pack_launch_of(case, RANKS, tokens=tokens, device=str(device))
        yield KernelLaunch(tiles.kernel, (tiles.num_programs,), tiles.arguments, tiles.device)


def _of_inference(gpu: Gpu) -> list[Kernel]:
    with recorded() as launches:
        gpu_counts.steps()
    return _most_frequent("inference", launches, gpu)


def _most_frequent(package: str, launches: Iterable[KernelLaunch], gpu: Gpu) -> list[Kernel]:
    """Of each kernel the grid that is launched most often, of those the largest, and its last."""
    by_name: dict[str, dict[int, KernelLaunch]] = {}
    times: Counter[tuple[str, int]] = Counter()
    for launch in launches:
        name, blocks = launch.kernel.__name__, prod(launch.grid)
        by_name.setdefault(name, {})[blocks] = launch
        times[name, blocks] += 1

    def compile_it(launch: KernelLaunch) -> Compiled:
        made = compiled(launch, gpu.capability)
        asm, told = made.asm, made.metadata
        code = CompiledKernel(gpu.capability, asm["ptx"], asm["cubin"], told.shared)
        return Compiled(code, told.num_warps, told.tmem_size if gpu.capability >= 100 else 0)

    found = []
    for name, launch_of in by_name.items():
        _, blocks = max((times[name, blocks], blocks) for blocks in launch_of)
        found.append(Kernel(package, name, blocks, partial(compile_it, launch_of[blocks])))
    return found


# -- the page --------------------------------------------------------------------------------


class Row(NamedTuple):
    """A kernel on a GPU."""

    kernel: Kernel
    gpu: Gpu
    needs: Needs
    spilled_bytes: int
    reading: Reading

    @property
    def share(self) -> float:
        """Of the bandwidth, as predicted."""
        return self._share(self.kernel.num_blocks)

    def text(self) -> str:
        """The line of the table."""
        needs, read = self.needs, self.reading
        fit, limit = needs.fitting()
        loads = " + ".join(f"{n} x {width}" for width, n in sorted(read.loads.items())[::-1])
        full = 32 * needs.warps * fit * read.num_bytes / 1024
        return _line(
            *(self.kernel.package, f"`{self.kernel.name}`", f"{self.kernel.num_blocks:,}"),
            *(needs.warps, needs.registers, self.spilled_bytes),
            *(f"{needs.shared_bytes / 1024:.1f}", f"{fit}, {limit}"),
            *(loads, "yes" if read.in_loop else "no"),
            *(", ".join(read.divisions) or "-", ", ".join(read.products) or "-"),
            *(f"{full:.0f}", f"{100 * self.share:.0f} %"),
        )

    def reason(self) -> str:
        """What keeps it from more of the bandwidth."""
        fit, limit = self.needs.fitting()
        of_thread = f"{self.reading.num_bytes} bytes of a thread"
        if self._share(1 << 40) < 0.5:
            return f"{of_thread}, {fit * self.needs.warps} of {LIMITS.warps} warps for {limit}"
        many = f"{self.kernel.num_blocks:,} blocks of {32 * self.needs.warps} threads"
        return f"{of_thread}, {many} on {self.gpu.multiprocessors} multiprocessors"

    def _share(self, blocks: int) -> float:
        over_link, num_bytes = self.kernel.over_link, self.reading.num_bytes
        return share(self.gpu, self.needs, blocks, num_bytes, over_link=over_link)


def row(kernel: Kernel, gpu: Gpu) -> Row:
    """Compile and read a kernel."""
    code, num_warps, columns = kernel.compile()
    used = code.resources()
    needs = Needs(num_warps, used["REG"], code.shared_bytes, columns)
    return Row(kernel, gpu, needs, used["STACK"] + used["LOCAL"], read_code(code.machine_code()))


_HEAD = """\
# Kernels by their machine code

**Nothing here was measured, and no kernel ran on a GPU.** Triton {triton} compiled each for
`sm_90a` and `sm_100a`, nvdisasm printed what came out, and `python tools/gpu_kernels.py` read that
and wrote this page; a test compares it. Shares of a bandwidth are predictions, to be compared
[when hardware is there](hardware-status.md).

## What is read

Kernels of pcomm-inference and pcomm-gdn-cp are compiled as in the steps and in the layer of Gated
DeltaNet of [what a GPU is asked for](gpu-counts.md), with the grid that is launched most often;
packs for {ranks} ranks. Those of pcomm-nvls are what `pcomm bench nvls` looks at, on {ranks} ranks,
by multicast where there is that, of 16 MiB in bf16; Lamport's and the all-reduce in one shot of
64 KiB. A kernel that only waits for other ranks is left out.

- **blocks**: of the launch. **warps**: of a block. **registers**, **spilled**: of a thread, the
  latter in bytes. **shared**: KiB of a block.
- **fit**: how many blocks a multiprocessor takes at a time, by arithmetic, and what there is least
  of.
- **in flight**: the most loads of global memory that a thread has asked for and not waited for,
  times their bytes, in the **loop** that loads most, or in the whole code where none loads. A load
  ends where an instruction names its register, a copy to shared memory where its group is waited
  for. No branch is taken, all predicates are true, and loops that wait for a rank are left out.
- **divisions**: what is divided in any loop. `fp32` is the exact one, inline but for denormal
  numbers; `int32` is some twenty instructions; `int64` would be a subroutine.
- **KiB**: in flight to a multiprocessor that is full. **share**: of the bandwidth, by Little's law:
  bytes in flight of all blocks that fit at a time, by the latency and the bandwidth.

It is a bound from above: a thread has so many bytes in flight at one moment, not at all of them,
and threads that read the same count twice. Stores, caches and the time of products are not in it.
So a kernel that multiplies much may have less, and one that finds its bytes in L2 may have more.

## What is assumed

| GPU | multiprocessors | memory, TB/s | KiB in flight | latency, ns | NVLink, GB/s |
|---|---|---|---|---|---|
{gpus}
Multiprocessors, memory and NVLink (one direction) are those of NVIDIA's data sheets. NVIDIA gives
the bytes in flight with which a multiprocessor saturates that memory ("CUDA Techniques to Maximize
Memory Bandwidth and Hide Latency", GTC 2025); from them comes the latency under load. That of a
load over NVLink is {link:.0f} us, for which no published figure was found. Kernels of pcomm-nvls
are compared with NVLink, the others with memory. A multiprocessor has {registers:,} registers,
{shared_kib} KiB of shared memory, {warps} warps and {blocks} blocks (CUDA C++ Programming Guide,
technical specifications of compute capabilities 9.0 and 10.0), and on Blackwell {tensor_columns}
columns of tensor memory (PTX ISA, tcgen05).
"""
_COLUMNS = (
    *("package", "kernel", "blocks", "warps", "registers", "spilled", "shared", "fit"),
    *("in flight", "loop", "divisions", "tensor cores", "KiB", "share"),
)
_WHY = """
## Why they are so

- **Grids of pcomm-nvls** are those of its table without a measured policy: few blocks leave the
  others to what computes beside them. Lamport's kernels and the one shot are for what is small,
  where a barrier costs more than the bytes.
- **A load at a time** in the gather and the reduce-scatter of rows that are counted on the device:
  the host does not know whether four would leave threads without rows.
- **Integers are divided** where rows of ranks stand side by side in the result.
- **The recurrences spill** in products that are as exact as fp32 in three of TF32, and **one block
  has all of the tensor memory** since Triton rounds the columns of all accumulators up to a power
  of two.
- **Scans** have a block for each head and piece of its state: a sequence is a chain of chunks.
- **Gates, edits and the last step backward** read a few MB in all.
- **Kernels that draw tokens** read logits that the first of them has read, 8 MB, again.
"""


def page() -> str:
    """The text of the page."""
    assumed = "".join(
        _line(
            *(gpu.name, gpu.multiprocessors, f"{gpu.bytes_per_s / 1e12:g}"),
            *(gpu.bytes_in_flight >> 10, f"{1e9 * gpu.latency_s:.0f}"),
            f"{gpu.link_bytes_per_s / 1e9:.0f}",
        )
        for gpu in GPUS
    )
    text = _HEAD.format(
        triton=release(),
        ranks=RANKS,
        gpus=assumed,
        link=1e6 * LINK_LATENCY_S,
        **LIMITS._asdict(),
    )
    for gpu in GPUS:
        rows = [row(kernel, gpu) for kernel in kernels(gpu)]
        text += f"\n## {gpu.name}, sm_{gpu.capability}\n\n{_line(*_COLUMNS)}"
        text += "|---" * len(_COLUMNS) + "|\n" + "".join(one.text() for one in rows)
        text += _findings(rows)
    return text + _WHY


def _findings(rows: Sequence[Row]) -> str:
    """What the table says of defects."""
    slow: dict[str, list[Row]] = {}
    for one in rows:
        if one.share < 0.5:
            slow.setdefault(one.reason(), []).append(one)
    text = "\nUnder half of the bandwidth:\n\n"
    for reason, those in slow.items():
        names = (f"`{one.kernel.name}` {100 * one.share:.0f} %" for one in those)
        text += f"- {reason}: {', '.join(names)}.\n"
    text += "\nOther things that a kernel should not have:\n\n"
    kinds: dict[str, Callable[[Row], bool]] = {
        "spills": lambda one: one.spilled_bytes > 0,
        "few blocks for want of tensor memory": lambda one: (
            one.needs.fitting()[1] == "tensor memory"
        ),
        "integers divided in a loop": lambda one: "int" in "".join(one.reading.divisions),
        "a load at a time": lambda one: one.reading.loads.total() == 1,
    }
    for what, has in kinds.items():
        names = (f"`{one.kernel.name}`" for one in rows if has(one))
        text += f"- {what}: {', '.join(names) or 'none'}.\n"
    return text


def release() -> str:
    """Triton's release, which compiles: `3.7.1`."""
    return version("triton")


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
