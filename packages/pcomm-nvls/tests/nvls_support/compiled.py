"""Kernels compiled without a GPU: their PTX, their machine code, and which rules they break.

Triton brings the compiler, the assembler and the disassembler. What is compiled is what a launch
would compile: Triton itself derives types and alignment from the arguments.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "CompiledKernel",
    "accesses",
    "any_arguments",
    "assemble",
    "compile_kernel",
    "problems_of",
]

# Narrow accesses of a kernel: the table of buffers, failures, epochs and signals.
_TABLE = {"ld.global.b64", "ld.global.u64"}
_SIGNALS = {
    "ld.acquire.sys.global.u32",
    "ld.relaxed.gpu.global.u32",
    "multimem.st.release.sys.global.u32",
    "st.relaxed.gpu.global.u32",
    "st.release.sys.global.u32",
}
_EPOCHS = ("ld.global.b32", "st.global.b32")

_ACCESS = re.compile(r"^(?:@!?%\w+\s+)?((?:multimem\.)?(?:ld|ld_reduce|st|red|atom)\.[\w.:]+)")
_EFFECT = re.compile(r"^(?:multimem\.)?(?:st|red|atom)\.")


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as it was compiled for one architecture.

    Attributes:
        capability: Architecture, 90 for Hopper.
        ptx: Assembly of the virtual machine.
        cubin: Assembled code, an ELF file.
        shared_bytes: Shared memory of a block, in bytes.
    """

    capability: int
    ptx: str
    cubin: bytes
    shared_bytes: int

    def machine_code(self) -> str:
        """The instructions of the device as text. Raises FileNotFoundError without nvdisasm."""
        # An analysis of branches is most of its time, and changes nothing in the text.
        return _run_tool("nvdisasm", ("-c", "-ndf"), self.cubin)

    def subroutines(self) -> set[str]:
        """Names of the functions that the kernel calls, such as a division of 64 bits."""
        kernel = re.findall(r"\.entry (\w+)", self.ptx)
        return _functions_of(self.cubin) - {*kernel}

    def resources(self) -> dict[str, int]:
        """Use of REG (registers of a thread), STACK, SHARED and LOCAL (bytes), by these names.

        Registers that do not suffice show as bytes of STACK. Raises FileNotFoundError without
        cuobjdump.
        """
        usage = _run_tool("cuobjdump", ("--dump-resource-usage",), self.cubin)
        return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", usage)}


def any_arguments(world: int, way: str) -> dict[str, Any]:
    """What all kernels are told of the group and its memory, with numbers of realistic sizes."""
    return {
        "buffers": torch.zeros(world, dtype=torch.int64),
        "multicast": 1 << 44,
        "epochs": torch.zeros(64, dtype=torch.int32),
        "failure": 1 << 45,
        "slot": 1 << 20,
        "limit_ns": 10**10,
        "rank": 0,
        "WORLD": world,
        "WAY": way,
    }


def compile_kernel(
    kernel: Any,
    arguments: Mapping[str, Any],
    capability: int,
    *,
    num_warps: int,
    max_registers: int | None = None,
) -> CompiledKernel:
    """Compile a kernel as a launch with these arguments would. Local, needs no GPU.

    Args:
        kernel: Function under `triton.jit`, not interpreted.
        arguments: Values by name; tensors may be on the CPU. Addresses have to be real ones, above
            4 GiB: the type of an integer follows from its value.
        capability: Architecture, 90 for Hopper.
        num_warps: Number of warps of a block.
        max_registers: Number of registers of a thread that the compiler may use, as in `Launch`.

    Raises:
        ValueError: `BLOCK` is no multiple of the threads: each copy of an element would store.
    """
    if "BLOCK" in arguments and arguments["BLOCK"] % (32 * num_warps):
        raise ValueError(f"BLOCK is {arguments['BLOCK']}, with {32 * num_warps} threads")
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, compile, make_backend  # type: ignore[import-untyped]
    from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    given = {"num_warps": num_warps, "maxnreg": max_registers}
    options, *source = kernel._pack_args(backend, given, bound, specialization, {})
    made = compile(ASTSource(kernel, *source), target=target, options=vars(options))
    return CompiledKernel(capability, made.asm["ptx"], made.asm["cubin"], made.metadata.shared)


def assemble(ptx: str, capability: int) -> CompiledKernel:
    """Assemble PTX that was changed by hand. Raises CalledProcessError where it is no PTX."""
    assembler = "ptxas" if capability < 100 else "ptxas-blackwell"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command: list[str | Path] = [
            _tool(assembler),
            f"-arch=sm_{capability}a",
            "-o",
            made,
            source,
        ]
        subprocess.run(command, capture_output=True, check=True)
        return CompiledKernel(capability, ptx, made.read_bytes(), 0)


def accesses(ptx: str) -> Counter[str]:
    """Number of instructions of each kind that access global memory, by full name."""
    found = (_ACCESS.match(line.strip()) for line in ptx.splitlines())
    names = Counter(match[1] for match in found if match)
    return Counter(
        {name: n for name, n in names.items() if not re.search(r"\.(?:param|shared)\b", name)}
    )


def problems_of(
    ptx: str, *, barriers: int, control: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """What in a kernel breaks the rules that all kernels of this package keep; empty when nothing.

    Data are accessed 16 bytes at a time. Each thread of a block executes inline assembly, so a
    store there is predicated, or jumped over; a signal depends on the thread. Local memory is not
    used.

    Args:
        ptx: Assembly of the kernel.
        barriers: Number of barriers in the kernel: how often an epoch is read, and written, and
            the word of a failure is read.
        control: Further narrow accesses that are no data, with the number of each.
    """
    words = (*_EPOCHS, "ld.volatile.global.b32")
    allowed = Counter(dict.fromkeys(words, barriers)) + Counter(control or {})
    problems = []
    for name, number in sorted(accesses(ptx).items()):
        if ".v4." in name or name in _TABLE or name in _SIGNALS:
            continue
        if number != allowed[name]:
            problems.append(f"{number} x {name}, allowed: {allowed[name]}")
    waits = accesses(ptx)["ld.acquire.sys.global.u32"]
    if waits < barriers:
        problems.append(f"{waits} waits in {barriers} barriers")
    if _numbers_overtaken(ptx):
        problems.append("a thread may read the number of a barrier before another has stored it")
    problems += [f"local memory: {line}" for line in re.findall(r"\b(?:ld|st)\.local.*", ptx)]
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    for block in blocks:
        problems += _unguarded(block)
    outside = re.sub(r"// begin inline asm\n.*?// end inline asm", "", ptx, flags=re.DOTALL)
    problems += [
        f"outside of assembly: {name}" for name in accesses(outside) if _EFFECT.match(name)
    ]
    return tuple(problems)


def _numbers_overtaken(ptx: str) -> bool:
    """Whether a number may be read again while the one thread that stores it is on its way."""
    is_stored = False
    for line in (line.strip() for line in ptx.splitlines()):
        if line.startswith("bar.sync"):
            is_stored = False
        name = _ACCESS.match(line)
        if name is None or name[1] not in _EPOCHS:
            continue
        if name[1].startswith("ld") and is_stored:
            return True
        is_stored = name[1].startswith("st")
    return False


def _unguarded(block: str) -> list[str]:
    """The stores of one piece of assembly that every thread executes."""
    problems, jumped = [], False
    for line in (line.strip() for line in block.splitlines()):
        jumped |= bool(re.match(r"@!?%\w+ bra\b", line))
        name = _ACCESS.match(line)
        if name is None or not _EFFECT.match(name[1]) or ".shared" in name[1]:
            continue
        if not (jumped or line.startswith("@")):
            problems.append(f"every thread stores: {line}")
        if name[1] in _SIGNALS and "%tid" not in block:
            problems.append(f"does not depend on the thread: {line}")
    return problems


def _tool(name: str) -> Path:
    """The place of a tool in Triton's own folder."""
    from triton.backends.nvidia import __file__ as nvidia  # type: ignore[import-untyped]

    tool = Path(nvidia).parent / "bin" / name
    if not tool.exists():
        raise FileNotFoundError(f"this build of Triton comes without {name}")
    return tool


# Of an ELF file of 64 bits: a table of symbols, one of them, and one that is code.
_SYMBOL_TABLE, _SYMBOL, _FUNCTION = 2, struct.Struct("<IBBHQQ"), 2


def _functions_of(elf: bytes) -> set[str]:
    """The names of all code in the file."""
    first, size, number = (*struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<2H", elf, 58))
    # Of a section: its type, where it lies, its bytes, and the section that has its names.
    sections = [struct.unpack_from("<4xI16x2QI", elf, first + size * i) for i in range(number)]
    found = set()
    for kind, begin, length, names in sections:
        if kind != _SYMBOL_TABLE:
            continue
        for name, info, *_ in _SYMBOL.iter_unpack(elf[begin : begin + length]):
            if info & 15 == _FUNCTION:
                at = sections[names][1] + name
                found.add(elf[at : elf.index(0, at)].decode())
    return found


@cache
def _run_tool(name: str, options: tuple[str, ...], cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command: list[str | Path] = [_tool(name), *options, file]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout
