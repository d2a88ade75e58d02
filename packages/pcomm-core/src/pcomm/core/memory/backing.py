"""Where symmetric memory lies: the interface, segments, one allocation, one file of /dev/shm."""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pcomm.core.errors import UnsupportedError

__all__ = ["Backing", "Segments", "SharedFileMemory", "VirtualMemory", "this_host"]


class Backing(Protocol):
    """Symmetric memory of one kind, opened in two phases with an agreement of all ranks after each.

    Attributes:
        name: Name of the kind, such as `"shm"`.
        device: Device of the tensors.
        buffer_ptrs: Address of the buffer of each rank, in this process; from `rendezvous` on.
        signal_pad_ptrs: Address of the signal pad of each rank, likewise.
        multicast_ptr: Address at which a store reaches all buffers; None where there is none.
    """

    name: str
    device: torch.device
    buffer_ptrs: tuple[int, ...]
    signal_pad_ptrs: tuple[int, ...]
    multicast_ptr: int | None

    def allocate(self) -> str:
        """Allocate what this rank contributes. Local; returns a text for all ranks."""
        ...

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Map the memory of all ranks, of which `texts` has what `allocate` returned. Collective.

        After it the signal pad of this rank is zero.
        """
        ...

    def finish(self) -> None:
        """Give back what only `rendezvous` of other ranks needed. Local, when all are through."""
        ...

    def buffer(self, rank: int) -> torch.Tensor:
        """The buffer of a rank: uint8, `[num_bytes]`. It keeps the memory mapped. Local."""
        ...

    def signal_pad(self, rank: int) -> torch.Tensor:
        """The signal pad of a rank: int32, `[signal_bytes // 4]`. It keeps the memory mapped."""
        ...

    def quiesce(self) -> None:
        """Return when the device has done all that it was given. Local."""
        ...

    def release(self) -> None:
        """Drop all references to the memory, also of a half-opened one. Local; never raises."""
        ...


_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Segments:
    """A segment for each rank, one after another: its buffer, then its signal pad.

    Both begin at multiples of 4096 bytes from the begin of the range.

    Args:
        size: Number of ranks.
        num_bytes: Size of each buffer, in bytes.
        signal_bytes: Size of each signal pad, in bytes.
    """

    size: int
    num_bytes: int
    signal_bytes: int

    @property
    def segment_bytes(self) -> int:
        """Distance from the segment of one rank to that of the next, in bytes."""
        return _whole_pages(self.num_bytes) + _whole_pages(self.signal_bytes)

    @property
    def total_bytes(self) -> int:
        """Size of the range, in bytes."""
        return self.size * self.segment_bytes

    def buffer_offset(self, rank: int) -> int:
        """First byte of the buffer of `rank`."""
        return rank * self.segment_bytes

    def pad_offset(self, rank: int) -> int:
        """First byte of the signal pad of `rank`."""
        return self.buffer_offset(rank) + _whole_pages(self.num_bytes)

    def buffer_ptrs(self, begin: int) -> tuple[int, ...]:
        """Addresses of all buffers in a range that begins at address `begin`."""
        return tuple(begin + self.buffer_offset(rank) for rank in range(self.size))

    def pad_ptrs(self, begin: int) -> tuple[int, ...]:
        """Addresses of all signal pads in a range that begins at address `begin`."""
        return tuple(begin + self.pad_offset(rank) for rank in range(self.size))

    @staticmethod
    def aligned(address: int) -> int:
        """The first address at or after `address` at which a range may begin."""
        return _whole_pages(address)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class VirtualMemory:
    """The `Backing` of ranks that exist in one process only.

    Args:
        segments: Sizes.
        device: Device of the allocation.
        arena: Allocation that another rank has made, by `new_arena`; None to make one.
    """

    name = "virtual"

    def __init__(
        self, segments: Segments, device: torch.device, arena: torch.Tensor | None = None
    ) -> None:
        self.device, self._segments, self._arena = device, segments, arena
        self.buffer_ptrs: tuple[int, ...] = ()
        self.signal_pad_ptrs: tuple[int, ...] = ()
        self.multicast_ptr: int | None = None

    @staticmethod
    def new_arena(segments: Segments, device: torch.device) -> torch.Tensor:
        """Zeros for all ranks: uint8, from an aligned address on."""
        slack = Segments.aligned(1)
        arena = torch.zeros(segments.total_bytes + slack, dtype=torch.uint8, device=device)
        begin = Segments.aligned(arena.data_ptr()) - arena.data_ptr()
        return arena[begin : begin + segments.total_bytes]

    def allocate(self) -> str:
        """Allocate, unless there is an allocation already."""
        if self._arena is None:
            self._arena = self.new_arena(self._segments, self.device)
        return ""

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Compute the addresses."""
        begin = self._memory.data_ptr()
        self.buffer_ptrs = self._segments.buffer_ptrs(begin)
        self.signal_pad_ptrs = self._segments.pad_ptrs(begin)

    def finish(self) -> None:
        """There is nothing to give back."""

    def buffer(self, rank: int) -> torch.Tensor:
        """A view of the allocation."""
        begin = self._segments.buffer_offset(rank)
        return self._memory[begin : begin + self._segments.num_bytes]

    def signal_pad(self, rank: int) -> torch.Tensor:
        """A view of the allocation."""
        begin = self._segments.pad_offset(rank)
        return self._memory[begin : begin + self._segments.signal_bytes].view(torch.int32)

    def quiesce(self) -> None:
        """Wait for all streams of a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Drop the allocation; the last rank or tensor frees it."""
        self._arena = None

    @property
    def _memory(self) -> torch.Tensor:
        assert self._arena is not None
        return self._arena


_FOLDER = "/dev/shm"


class SharedFileMemory:
    """The `Backing` of CPU processes on one host.

    Args:
        rank: Place of this rank in the group.
        segments: Sizes.
    """

    name = "shm"

    def __init__(self, rank: int, segments: Segments) -> None:
        self.device = torch.device("cpu")
        self._rank, self._segments = rank, segments
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self.buffer_ptrs: tuple[int, ...] = ()
        self.signal_pad_ptrs: tuple[int, ...] = ()
        self.multicast_ptr: int | None = None

    def allocate(self) -> str:
        """Make the file, on the first rank. Returns host, process and file of this rank.

        Raises:
            UnsupportedError: /dev/shm is not there or has too little room.
        """
        told: dict[str, object] = {"host": this_host(), "process": os.getpid()}
        if self._rank == 0:
            try:
                free = os.statvfs(_FOLDER)
                self._check_room(free.f_bavail * free.f_frsize)
                with tempfile.TemporaryFile(dir=_FOLDER, buffering=0) as file:
                    self._file = os.dup(file.fileno())
                # Sparse: each rank allocates its own segment.
                os.ftruncate(self._file, self._segments.total_bytes)
                told |= {"file": self._file, "inode": os.fstat(self._file).st_ino}
            except OSError as problem:
                raise self._failed("make a file in /dev/shm", problem) from problem
        return json.dumps(told)

    def rendezvous(self, texts: Sequence[str]) -> None:
        """Open the file of the first rank, allocate this rank's segment and map all of them.

        Raises:
            UnsupportedError: The ranks are on several hosts, or the system refused.
        """
        told = [json.loads(text) for text in texts]
        self._check_hosts([entry["host"] for entry in told])
        try:
            if self._file is None:
                path = f"/proc/{told[0]['process']}/fd/{told[0]['file']}"
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(self._file).st_ino != told[0]["inode"]:
                raise FileNotFoundError("that descriptor of the first rank is another file")
            # Without it a full /dev/shm would end the process by SIGBUS at the first touch.
            begin = self._segments.buffer_offset(self._rank)
            os.posix_fallocate(self._file, begin, self._segments.segment_bytes)
            self._map = mmap.mmap(self._file, self._segments.total_bytes)
        except OSError as problem:
            raise self._failed("map the file of the first rank", problem) from problem
        address = self._tensor(torch.uint8, 0, 1).data_ptr()
        self.buffer_ptrs = self._segments.buffer_ptrs(address)
        self.signal_pad_ptrs = self._segments.pad_ptrs(address)

    def finish(self) -> None:
        """Close the descriptor by which other ranks have opened the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def buffer(self, rank: int) -> torch.Tensor:
        """The buffer of a rank, with a storage of its own."""
        begin = self._segments.buffer_offset(rank)
        return self._tensor(torch.uint8, begin, self._segments.num_bytes)

    def signal_pad(self, rank: int) -> torch.Tensor:
        """The signal pad of a rank, with a storage of its own."""
        begin = self._segments.pad_offset(rank)
        return self._tensor(torch.int32, begin, self._segments.signal_bytes // 4)

    def quiesce(self) -> None:
        """There is no device to wait for."""

    def release(self) -> None:
        """Close the descriptor and drop the mapping, which ends with the last tensor in it."""
        self.finish()
        # Never `mmap.close`: tensors refer to the mapping without telling it.
        self._map = None

    def _tensor(self, dtype: torch.dtype, begin: int, count: int) -> torch.Tensor:
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=dtype, offset=begin, count=count)

    def _check_room(self, free: int) -> None:
        needed = self._segments.total_bytes
        if needed <= free:
            return
        raise UnsupportedError(
            self._asked,
            found=f"/dev/shm has {free} bytes free, of {needed} that are needed",
            why="The buffers and signal pads of all ranks of a host lie there together.",
            fix="Ask for less, free what is left there, or give the container a larger one "
            "(docker run --shm-size).",
        )

    def _check_hosts(self, hosts: Sequence[str]) -> None:
        if len(set(hosts)) == 1:
            return
        first = {host: hosts.index(host) for host in hosts}
        raise UnsupportedError(
            self._asked,
            found="; ".join(f"rank {rank} of the group on {host}" for host, rank in first.items()),
            why="Memory of CPU processes is shared within one host and one tree of processes.",
            fix="Use a group whose ranks are all on one host.",
        )

    def _failed(self, what: str, problem: OSError) -> UnsupportedError:
        return UnsupportedError(
            self._asked,
            found=f"{type(problem).__name__}: {problem}",
            why=f"This rank could not {what}.",
            fix="Run all ranks as one user, on a Linux with /dev/shm and /proc and enough memory.",
        )

    @property
    def _asked(self) -> str:
        return (
            f"SymmetricMemory.open: {self._segments.num_bytes} bytes for each of "
            f"{self._segments.size} ranks by shm"
        )


def this_host() -> str:
    """A text that processes have in common if they can map each other's files. Local."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    since = boot.read_text().strip() if boot.exists() else "unknown"
    processes = os.readlink(namespace) if namespace.exists() else "unknown"
    return f"{socket.gethostname()} (boot {since}, {processes})"
