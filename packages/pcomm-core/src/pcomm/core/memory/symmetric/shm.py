"""Processes of one host: one file of /dev/shm that all of them map.

The file never has a name. The first rank makes it without one, and the others open it through the
first rank's entry in /proc, so whichever rank is killed at whatever moment, the kernel frees the
memory with the last process that maps it.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from pcomm.core.errors import UnsupportedError
from pcomm.core.memory.symmetric.segments import Segments

__all__ = ["SharedFileMemory", "this_host"]

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
