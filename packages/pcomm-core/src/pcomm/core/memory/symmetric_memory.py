"""Memory that all ranks of a group reach: a buffer and a pad on each, of the kind that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from pcomm.core.control.agreement import agree_in_group, vote
from pcomm.core.control.agreement_round import all_or_none
from pcomm.core.control.control import Control
from pcomm.core.errors import ClosedError, ConfigError, near_misses
from pcomm.core.groups.group import Group
from pcomm.core.memory.backing import Backing, Segments, SharedFileMemory, VirtualMemory
from pcomm.core.memory.torch_memory import TorchMemory

__all__ = [
    "SymmetricMemory",
]


_KINDS = ("auto", "shm", "torch", "virtual")
_TOPIC = "symmetric memory"


class SymmetricMemory:
    """One buffer and one signal pad for each rank of a group, mapped by all of them.

    Made by `open` or `virtual`. Buffers begin at multiples of 4096 bytes where the memory is ours
    (`shm`, `virtual`), and where torch's allocator puts them on GPUs. Signal pads are zero at the
    beginning; the contents of buffers are not defined.

    A tensor of it stays valid as long as it is referred to, also after `close`: the mapping ends
    with the last one. Addresses do not keep it.

    Attributes:
        rank: Place of this rank in the group.
        size: Number of ranks.
        num_bytes: Size of each buffer, in bytes.
        signal_bytes: Size of each signal pad, in bytes.
        device: Device of the tensors.
        backend: `"torch"`, `"shm"` or `"virtual"`.
    """

    def __init__(
        self,
        backing: Backing,
        rank: int,
        segments: Segments,
        *,
        agree_to_close: Callable[[Exception | None], None],
    ) -> None:
        self.rank, self.size = rank, segments.size
        self.num_bytes, self.signal_bytes = segments.num_bytes, segments.signal_bytes
        self.device, self.backend = backing.device, backing.name
        self._backing: Backing | None = backing
        self._agree_to_close = agree_to_close
        self._take_back: Callable[[], None] = _nothing
        self._tables = [
            torch.tensor(addresses, dtype=torch.int64, device=backing.device)
            for addresses in (backing.buffer_ptrs, backing.signal_pad_ptrs)
        ]

    @classmethod
    def open(
        cls,
        group: Group,
        num_bytes: int,
        *,
        signal_bytes: int = 9216,
        backend: str = "auto",
        device: torch.device | str | None = None,
        control: Control | None = None,
        timeout_s: float | None = None,
    ) -> SymmetricMemory:
        """Allocate memory on every rank of a group and map that of all of them. Collective.

        Either every rank gets it, or every rank raises and nothing stays allocated or mapped. It
        closes with the groups that `group` belongs to, unless `close` was called before. The owner
        of a group of `Group.from_process_group` alone calls `close`.

        Args:
            group: Ranks that share the memory.
            num_bytes: Size of the buffer of each rank, in bytes; the same on all ranks.
            signal_bytes: Size of the signal pad of each rank, in bytes, a multiple of 4; the same
                on all ranks. The default has room for 32 blocks of 72 ranks.
            backend: `"torch"` (GPUs), `"shm"` (CPU processes of one host), `"virtual"` (one rank),
                or `"auto"`: `"torch"` on a GPU and `"shm"` on a CPU; `"virtual"` where one rank
                has no communicator.
            device: Device of the buffers; None for the current GPU if the group is on NCCL, else
                for the CPU.
            control: Control by which the ranks agree; by default that of the group.
            timeout_s: Seconds to wait for other ranks; by default that of the control, or
                `PCOMM_TIMEOUT_S`. Used again when it is closed.

        Raises:
            ConfigError: Sizes, backend or device cannot be used.
            UnsupportedError: The system or torch refused: too little room in /dev/shm, ranks on
                several hosts, no symmetric memory.
            DivergenceError: The ranks ask for different sizes or backends; on every rank.
            PeerError: Another rank has one of these errors.
            PeerTimeoutError: A rank did not arrive.
            ClosedError: The group is closed.
        """
        made: list[Backing] = []
        segments = Segments(group.size, num_bytes, signal_bytes)

        def choose() -> list[str]:
            _check_sizes(segments)
            made.append(_new_backing(group, segments, backend, device))
            return [f"{num_bytes} bytes, {signal_bytes} bytes of signal pad, {made[0].name}"]

        def compare(lines: list[str] | None, error: Exception | None) -> None:
            agree(f"{_TOPIC}: open", lines or [], error)

        def agree(topic: str, lines: list[str], error: Exception | None) -> None:
            agree_in_group(group, topic, lines, error=error, timeout_s=timeout_s, control=control)

        def collect(text: str | None, error: Exception | None) -> tuple[str, ...]:
            topic, said = f"{_TOPIC}: allocate", text or ""
            told = vote(group, topic, 0, said, error=error, timeout_s=timeout_s, control=control)
            return told.reasons

        def undo(error: Exception | None) -> Iterable[Exception]:
            for backing in made:
                backing.release()
            return ()

        all_or_none(choose, compare, undo)
        (backing,) = made
        _, texts = all_or_none(backing.allocate, collect, undo)

        def connect() -> SymmetricMemory:
            backing.rendezvous(texts)
            return cls(
                backing,
                group.rank,
                segments,
                agree_to_close=lambda late: agree(f"{_TOPIC}: close", [], late),
            )

        def confirm(memory: SymmetricMemory | None, error: Exception | None) -> None:
            agree(f"{_TOPIC}: rendezvous", [], error)

        memory, _ = all_or_none(connect, confirm, undo)
        backing.finish()
        memory._take_back = group.before_close(memory.close)
        return memory

    @classmethod
    def virtual(
        cls,
        size: int,
        num_bytes: int,
        *,
        signal_bytes: int = 9216,
        device: torch.device | str = "cpu",
    ) -> tuple[SymmetricMemory, ...]:
        """The memories of all ranks of a group that exists in this process only. Local.

        For kernels and protocols of several ranks in one launch or one thread. All of them lie in
        one allocation and have equal addresses; each one is closed by itself.

        Args:
            size: Number of ranks.
            num_bytes: Size of the buffer of each rank, in bytes.
            signal_bytes: Size of the signal pad of each rank, in bytes, a multiple of 4.
            device: Device of the allocation.

        Raises:
            ConfigError: A size cannot be used.
        """
        segments, place = Segments(size, num_bytes, signal_bytes), torch.device(device)
        _check_sizes(segments)
        arena = VirtualMemory.new_arena(segments, place)
        memories = []
        for rank in range(size):
            backing = VirtualMemory(segments, place, arena)
            backing.rendezvous(())
            memories.append(cls(backing, rank, segments, agree_to_close=_raise_late))
        return tuple(memories)

    @property
    def buffer_ptrs(self) -> tuple[int, ...]:
        """Address of the buffer of each rank, in this process. Raises `ClosedError` when closed."""
        return self._opened("buffer_ptrs").buffer_ptrs

    @property
    def signal_pad_ptrs(self) -> tuple[int, ...]:
        """Address of the signal pad of each rank. Raises `ClosedError` when closed."""
        return self._opened("signal_pad_ptrs").signal_pad_ptrs

    @property
    def multicast_ptr(self) -> int | None:
        """Address at which a store reaches the buffers of all ranks, and a load adds them up.

        None where the hardware or the backend has none; never 0. Raises `ClosedError` when closed.
        """
        return self._opened("multicast_ptr").multicast_ptr

    @property
    def buffer_table(self) -> torch.Tensor:
        """`buffer_ptrs` as a tensor on the device: int64, `[size]`; the same one at each call."""
        self._opened("buffer_table")
        return self._tables[0]

    @property
    def signal_table(self) -> torch.Tensor:
        """`signal_pad_ptrs` as a tensor on the device: int64, `[size]`."""
        self._opened("signal_table")
        return self._tables[1]

    def buffer(self, rank: int | None = None) -> torch.Tensor:
        """The buffer of a rank: uint8, `[num_bytes]`. Local.

        Args:
            rank: Place of the rank in the group; None for this rank.

        Raises:
            ClosedError: It was closed.
        """
        return self._opened("buffer").buffer(self._place(rank))

    def signal_pad(self, rank: int | None = None) -> torch.Tensor:
        """The signal pad of a rank: int32, `[signal_bytes // 4]`. Local.

        Args:
            rank: Place of the rank in the group; None for this rank.

        Raises:
            ClosedError: It was closed.
        """
        return self._opened("signal_pad").signal_pad(self._place(rank))

    def close(self) -> None:
        """Give the memory back, once the device is idle and all ranks have come. Collective.

        Calling it again does nothing. This rank's part is given back also where other ranks do not
        come, and the error is raised after that. Tensors that are still referred to stay valid.
        Of virtual ranks each one is closed alone.

        Raises:
            PeerTimeoutError: A rank did not come.
            RuntimeError: The device reports an error of an earlier operation.
        """
        if self._backing is None:
            return
        backing, self._backing = self._backing, None
        self._take_back()
        self._tables.clear()
        late: Exception | None = None
        try:
            backing.quiesce()
        except RuntimeError as problem:
            late = problem
        try:
            # No memory is unmapped that a peer still writes to.
            self._agree_to_close(late)
        finally:
            backing.release()

    def _place(self, rank: int | None) -> int:
        return self.rank if rank is None else range(self.size)[rank]

    def _opened(self, what: str) -> Backing:
        if self._backing is None:
            raise ClosedError(
                f"SymmetricMemory.{what}",
                found=f"the memory of rank {self.rank} of {self.size} was closed",
                why="It closes with its groups, or by close, and its addresses end with that.",
                fix="Use it within the `with` block of its groups, or open another one.",
            )
        return self._backing

    def __repr__(self) -> str:
        state = ", closed" if self._backing is None else ""
        place = f"rank {self.rank} of {self.size}, {self.num_bytes} bytes"
        return f"SymmetricMemory({place} by {self.backend} on {self.device}{state})"


def _check_sizes(segments: Segments) -> None:
    """Raise `ConfigError` for sizes that no memory has. Local."""
    num_bytes, signal_bytes = segments.num_bytes, segments.signal_bytes
    if segments.size > 0 and num_bytes > 0 and signal_bytes > 0 and signal_bytes % 4 == 0:
        return
    raise ConfigError(
        f"SymmetricMemory of {segments.size} ranks",
        found=f"num_bytes={num_bytes}, signal_bytes={signal_bytes}",
        why="A buffer has at least one byte, and a signal pad is a number of int32, at least one.",
        fix="Give a num_bytes above 0 and a signal_bytes above 0 that is a multiple of 4.",
    )


def _new_backing(
    group: Group, segments: Segments, kind: str, device: torch.device | str | None
) -> Backing:
    """Symmetric memory of a kind that is not allocated yet. Local.

    Args:
        group: Ranks that share the memory.
        segments: Sizes.
        kind: `"shm"`, `"torch"`, `"virtual"`, or `"auto"`: by the device, and `"virtual"` for one
            rank without a communicator.
        device: Device of the buffers; None for the current GPU on NCCL, else the CPU.

    Raises:
        ConfigError: The kind is not known, or does not go with the group or the device.
    """
    process_group = group.process_group
    place = _device_of(process_group) if device is None else torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if kind not in _KINDS:
        raise ConfigError(
            f"SymmetricMemory.open: backend {kind!r}",
            found=f"the backends {_KINDS}",
            why="A backend decides whose memory can be mapped.",
            fix=near_misses(kind, _KINDS),
        )
    if kind == "auto":
        kind = "torch" if place.type == "cuda" else "shm"
        kind = "virtual" if process_group is None and group.size == 1 else kind
    if kind == "shm" and place.type == "cpu":
        return SharedFileMemory(group.rank, segments)
    if kind == "virtual" and group.size == 1:
        return VirtualMemory(segments, place)
    if kind == "torch" and place.type == "cuda" and process_group is not None:
        return TorchMemory(process_group, group.rank, segments, place)
    raise ConfigError(
        f"SymmetricMemory.open: backend {kind!r}",
        found=f"group {group.key} of {group.size} ranks, device {place}"
        + ("" if process_group is not None else ", without a communicator"),
        why="shm is for CPUs, torch for GPUs and a communicator, virtual for one rank.",
        fix="Leave backend='auto'; SymmetricMemory.virtual makes several ranks in one process.",
    )


def _device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    on_gpus = process_group is not None and "nccl" in dist.get_backend(process_group)
    return torch.device("cuda" if on_gpus else "cpu")


def _nothing() -> None:
    return None


def _raise_late(late: Exception | None) -> None:
    if late is not None:
        raise late
