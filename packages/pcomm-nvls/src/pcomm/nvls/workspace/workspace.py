"""The symmetric memory in which the operations of one group take turns.

A workspace is opened by all ranks of a group together. It votes on what they can do, allocates, and
compares what each rank would choose by. Where anything of that fails on any rank, all of them use
torch.distributed, and `capability` says why. It owns the choice of the algorithm of each call.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.control.control import Control
from pcomm.core.errors import ClosedError, ConfigError, PcommError, PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.nvls._capability import RankProbe, capability, default_device
from pcomm.nvls.policy.choose import Choice, Chooser, CollectiveRequest, GroupInfo
from pcomm.nvls.policy.table import Table
from pcomm.nvls.workspace.launch import CachedCall, Launch, Launcher, Repeat, remember
from pcomm.nvls.workspace.memory import (
    LAMPORT_BYTES,
    Regions,
    check_memory,
    check_numbers,
    device_of,
    lamport_region_bytes,
    open_memory,
)
from pcomm.nvls.workspace.slots import (
    SLOTS,
    DeviceStream,
    SlotLease,
    SlotRing,
    StreamOrder,
    Turns,
    stream_of,
)

__all__ = ["Workspace"]


class Workspace:
    """Symmetric memory, signals and slots for the operations of a group.

    A context manager; collective to open and to close. Its operations run one after another on
    one stream of the device, in the same order on all ranks. One that is dropped without being
    closed keeps its memory until the group closes, and warns.

    Args:
        group: Group of the ranks that call the operations.
        max_bytes: Size of the largest tensor, in bytes: the result of an all-gather, the input of
            a reduce-scatter or an all-reduce. Larger ones go through torch.distributed.
        slots: Number of slots; 1 saves half of the memory for one more barrier an operation, and
            more than 2 gain nothing. Operations without a barrier have three of their own.
        lamport_bytes: Room for what a rank sends to another without a barrier, in bytes; 0 for no
            such operations. The memory has three times as much for each rank.
        deterministic: True sums in rank order in fp32 and never in the switch.
        device: Device of the tensors, or its name; by default the current CUDA device, or the CPU
            without one.
        table: Table of the sizes at which another algorithm is chosen; by default the package's.
        debug: True compares each call between the ranks before it runs: all but the values of
            tensors, and counts on the device. A call then waits for all.
        alias_fences: True puts `fence.proxy.alias` into the barriers of operations by multicast.
            PTX's memory model asks for it where a kernel reads memory by another address than it
            was stored by; torch and NCCL leave it out. Neither form has run on a GPU.
        timeout_s: Longest wait of an operation for another rank, in seconds.
        control: Control by which the ranks agree; by default that of `group`.
        probe: Source of the facts about this rank; by default this process and its device.
        stream: Source of the current stream of the device; by default torch.

    Attributes:
        capability: Capability of the ranks together, with reasons.
        memory: Symmetric memory of the ranks; None where they can only use torch.distributed.
        stream: Source of the current stream of the device.
        launcher: Variants of kernels that were compiled for it.
        turns: Turns of its operations.
        repeats: Calls that may come again: `remember` keeps them, `again` takes them.
        failure_word: Place of a missing rank plus 1, or 0, as kernels report it.
        own_range: First address of this rank's memory, and that behind it.
        num_launches: Number of kernels that were launched so far.
        streams: Stream of the operations so far.

    Raises:
        ConfigError: A size or a time that cannot be used, or no slot.
        DivergenceError: Ranks ask for different workspaces; on all, naming the difference.
        PeerError: Another rank has one of these errors.
        PeerTimeoutError: A rank did not come.
    """

    def __init__(
        self,
        group: Group,
        max_bytes: int,
        *,
        slots: int = SLOTS,
        lamport_bytes: int = LAMPORT_BYTES,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        table: Table | None = None,
        debug: bool = False,
        alias_fences: bool = False,
        timeout_s: float = 30.0,
        control: Control | None = None,
        probe: RankProbe | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        self.max_bytes, self.deterministic, self.debug = max_bytes, deterministic, debug
        self._alias_fences = alias_fences
        self.group, self._control, self._timeout_s = group, control, timeout_s
        self._is_closed, self._process = True, os.getpid()
        lines = [f"max_bytes {max_bytes}", f"slots {slots}", f"deterministic {deterministic}"]
        lines += [f"debug {debug}", f"lamport_bytes {lamport_bytes}"]
        lines.append(f"alias_fences {alias_fences}")
        error: PcommError | None = None
        try:
            self.device = default_device() if device is None else device_of(device)
            lines.append(f"device {self.device.type}")
            check_numbers(max_bytes, slots, lamport_bytes, timeout_s)
            lines.append(f"timeout_s {timeout_s:g}")
            rotation = SlotRing(slots)
            region = lamport_region_bytes(group.size, lamport_bytes)
            self.regions = Regions(group.size, max_bytes, slots, region)
            if group.size > 1:
                check_memory(max_bytes, self.regions.num_bytes, self.device)
            chooser_table = _table_or_default(table)
        except PcommError as problem:
            error = problem
        self._agree("workspace", lines, error)
        self.memory: SymmetricMemory | None = None
        self.capability = capability(group, device=self.device, control=control, probe=probe)
        if self.capability.is_usable:
            self._open_memory(lamport_bytes, control)
        facts = GroupInfo(
            self.capability.architecture,
            group.size,
            self.capability.multicast,
            self.capability.peers,
            max_bytes if self.memory is not None else 0,
            self.capability.multicast_reason,
            self.capability.peers_reason,
            lamport_bytes if self.memory is not None else 0,
        )
        try:
            self._agree("policy", facts.agreed_lines(chooser_table))
        except PcommError:
            if self.memory is not None:
                self.memory.close()
            raise
        self._chooser = Chooser(facts, chooser_table, warns=group.rank == 0)
        self.stream = stream_of(self.device) if stream is None else stream
        self.launcher = Launcher(self.stream)
        self.repeats: dict[Hashable, Repeat] = {}
        self.streams = StreamOrder(self.stream)
        self.turns = Turns(rotation, self.streams)
        # By object: views of one slot have one address, whichever operation they are of.
        self._turns_of_views = WeakIdKeyDictionary()
        self.num_launches, self._is_closed = 0, False
        find = weakref.ref(self)
        self._forget = group.before_close(lambda: _close(find()))

    # -- what operations use -------------------------------------------------------------

    def choose(
        self, question: CollectiveRequest, *, strict: bool = False, detail: object = None
    ) -> Choice:
        """The algorithm of one call, the same on all ranks. Local, or collective with `debug`.

        Args:
            question: The call; equal on all ranks.
            strict: True refuses torch.distributed.
            detail: Further properties of the call, equal on all ranks; `debug` compares their text.

        Raises:
            ConfigError: An unknown algorithm.
            UnsupportedError: The algorithm that is wanted cannot be used, or `strict` is in force.
            ClosedError: The workspace is closed, or another process has opened it.
            PeerTimeoutError: An operation before had to wait for a rank for too long.
            DivergenceError: With `debug`, ranks make different calls.
        """
        if self._is_closed:
            raise _closed(question.operation)
        if os.getpid() != self._process:
            raise ClosedError(
                question.operation,
                found=f"a workspace that process {self._process} has opened",
                why="Two processes would take part as one rank, and count its operations apart.",
                fix="Call it in the process of the rank, or start processes by spawn.",
            )
        self.check()
        if self.debug:
            self._agree("operation", [f"{question}, strict={strict}", f"detail {detail}"])
        return self._chooser.choose(question, strict=strict)

    def turn(self) -> SlotLease:
        """The turn of the operation that is launched next. Local; see `Turns.take`."""
        return self.turns.take()

    def shared_arguments(self) -> dict[str, Any]:
        """The arguments that all kernels take. Local."""
        memory = self.memory
        assert memory is not None
        return {
            "buffers": memory.buffer_table,
            "multicast": memory.multicast_ptr or 0,
            "epochs": self._epochs,
            "failure": self._failure.data_ptr(),
            "limit_ns": int(self._timeout_s * 1e9),
            "rank": self.group.rank,
            "WORLD": self.group.size,
        }

    def barrier_way(self, is_multicast: bool) -> str:
        """`WAY` of kernels with a barrier; that of others is in `lamport_arguments`. Local."""
        if not is_multicast:
            return "peers"
        return "fenced multicast" if self._alias_fences else "multicast"

    def lamport_arguments(self) -> dict[str, Any]:
        """The arguments that kernels without barriers take, and `WAY`. Local.

        They need no fence: all that one of them orders behind another access of the same memory
        was in a kernel before it.
        """
        # Between two ranks the switch would send what a rank stores to that rank, too.
        by_multicast = self.capability.multicast and self.group.size > 2
        way = "multicast" if by_multicast else "peers"
        return {**self.shared_arguments(), **self._lamport.arguments(), "WAY": way}

    def run(self, launch: Launch, call: CachedCall | None = None) -> None:
        """Enqueue a launch; under the interpreter, which has done it then, look at the outcome.

        Args:
            launch: Kernel and arguments.
            call: A call that may come again.

        Raises:
            ConfigError: It would compile a kernel while a CUDA graph is captured.
            PeerTimeoutError: Under the interpreter, a rank did not come.
        """
        lease = self.turns.last
        try:
            self._enqueue(launch)
        except Exception:
            if lease is not None:
                self.turns.put_back(lease)
            raise
        if call is None or lease is None or self.debug or self.turns.on_trial is not None:
            return
        remember(self.repeats, call, self.launcher, launch, lease)

    def is_in_slot(self, x: Tensor, turn: SlotLease) -> bool:
        """Whether `x` is what `empty` returned for this turn, so that it need not be copied.

        Raises:
            ConfigError: It lies elsewhere in the memory of the workspace, which is written again.
        """
        memory = self.memory
        assert memory is not None
        start = memory.buffer_ptrs[self.group.rank]
        offset = x.data_ptr() - start
        if not 0 <= offset < self.regions.num_bytes:
            return False
        is_there = offset == self.regions.slot(turn.slot) and x.is_contiguous()
        if is_there and turn.is_prepared:
            return True
        # Refused before anything was written: the next operation has this turn.
        self.turns.put_back(turn)
        raise ConfigError(
            "an operation on a view of the workspace",
            found=f"a tensor at byte {offset} of it, which was not handed out for this operation",
            why="Other ranks write into that memory, and it has been written since.",
            fix="Use what workspace.empty() returned last, in the same CUDA graph as the "
            "operation, or a copy of the view.",
        )

    def release(self, x: Tensor) -> None:
        """Have `empty` hand out again where `x` lies, which torch.distributed reads. Local.

        It takes no turn, so without this the memory would count as not yet used.
        """
        if (slot := self._slot_of(x)) is not None:
            self.turns.release(slot)

    def result_in_slot(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What the last operation left in its slot, which is valid until the next one. Local."""
        assert self.turns.last is not None
        return self._slot_view(self.turns.last, shape, dtype)

    # -- what callers use ----------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the addends of the next operation, a reduction, which need not copy them.

        Such as the `out` of the matrix product before a reduce-scatter. Without symmetric memory or
        numbers it is a new tensor. All ranks call it, or none, and once for an operation:
        where an operation meets the others before it writes (one slot, or a CUDA graph), this does
        so for it.

        Args:
            shape: Shape of that input.
            dtype: Type of its numbers.

        Raises:
            ConfigError: It is larger than `max_bytes`, or the tensor that it returned for the next
                operation is still held: that one has the same memory.
        """
        if self._is_closed:
            raise _closed("Workspace.empty")
        # Torch knows which shapes and types there are.
        num_bytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"Workspace.empty: shape {tuple(shape)} of {dtype}",
                found=f"{num_bytes} bytes, and max_bytes={self.max_bytes}",
                why="A slot has max_bytes.",
                fix="Open a larger workspace, or allocate the tensor with torch.empty.",
            )
        if self.memory is None or not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        lease, needs_entry = self.turns.hand_out()
        if self._is_held(lease):
            raise ConfigError(
                f"Workspace.empty: shape {tuple(shape)} of {dtype}",
                found="the memory for the next operation, which was handed out before and is "
                "still held",
                why="Both tensors would lie in one place.",
                fix="Call the operation first, or use the tensor again that was returned.",
            )
        if needs_entry:
            # Before the caller writes there: other ranks may still read what was in it.
            try:
                self._wait_for_all()
            except Exception:
                self.turns.withdraw()
                raise
        return self._slot_view(lease, shape, dtype)

    def empty_if_read_there(
        self, question: CollectiveRequest, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """What `empty` returns, where that saves a copy and waits for nobody. Local.

        Args:
            question: Next operation, a reduction.
            shape: Shape of its input.
            dtype: Type of its numbers.

        Returns:
            None where its algorithm copies no input, where all ranks would have to meet before the
            memory is written to (that operation then does so before its copy), and where what was
            handed out before is still held. One rank may take it, and another one copy.

        Raises:
            ConfigError: It is on another stream than the operations before.
        """
        is_read_there = self._chooser.choose(question).algorithm in ("multimem", "p2p")
        if self._is_closed or not is_read_there or not question.num_bytes:
            return None
        lease, needs_entry = self.turns.hand_out()
        if needs_entry:
            self.turns.withdraw()
            return None
        if self._is_held(lease):
            return None
        return self._slot_view(lease, shape, dtype)

    def prepare(self, operations: Callable[[], object]) -> None:
        """Compile and load what operations need, so that a CUDA graph can capture them.

        Kernels are not run, so results are undefined, and turns stay as they are. What goes through
        torch.distributed, and what else the function does, happens, twice.

        Args:
            operations: Function of no arguments that makes the calls which are captured later, with
                tensors of the same shapes and types.

        Raises:
            ConfigError: A capture has begun already.
        """
        for needs_entry in (False, True):
            with self.turns.trial(needs_entry=needs_entry):
                operations()

    def sequence(self) -> AbstractContextManager[None]:
        """Operations in this block always run one after another, as those of one CUDA graph do.

        In a graph each operation waits for all ranks before it writes, since the one before it is
        not known. Within this block only the first one does.
        """
        return self.turns.rotation.sequence()

    def check(self) -> None:
        """Raise if an operation had to wait for a rank for too long. Local, without waiting.

        On a GPU that is seen once the device has got there: after a synchronisation for certain.
        What such an operation returned is not valid, and what those before it returned may be
        wrong: a rank that gave up before had queued operations that stored over it.

        Raises:
            PeerTimeoutError: The rank that did not come.
        """
        if self.memory is None or not self.failure_word.value:
            return
        rank = self.group.ranks[self.failure_word.value - 1]
        raise PeerTimeoutError(
            "an operation of pcomm.nvls",
            found=f"rank {rank} did not signal within {self._timeout_s:g} s",
            why="Every rank of the group makes the same operations in the same order.",
            fix=f"Look for an earlier error on rank {rank}, or for another call than this one "
            "there: open the workspace with debug=True. This one cannot be used any more: close it "
            "and open a new one.",
        )

    def check_view(self, view: Tensor) -> None:
        """Raise if an operation has begun since that of which a view shows the slot. Local.

        A rank that ends the next operation may write into the slot with the one after it.

        Args:
            view: Tensor that `empty` returned, or an operation without a copy, or a part of one.
                Others pass, and parts of a view whose slot the last operation uses again.

        Raises:
            ConfigError: One has, so that the view may show another operation's numbers.
        """
        lease, newest = self._turns_of_views.get(view), self.turns.rotation.generation - 1
        generation = self._newest_of_slot(view, newest) if lease is None else lease.generation
        if newest > generation:
            raise ConfigError(
                f"a view of operation {generation} of the workspace",
                found=f"operation {newest} has begun",
                why="Other ranks may write into that slot from then on.",
                fix="Launch what reads the view before the next operation, or ask for a copy.",
            )

    def explain(self, question: CollectiveRequest) -> str:
        """Which algorithm a call would use, why, and why not each faster one. Local."""
        return self._chooser.explain(question)

    def close(self) -> None:
        """Give the memory back, once all ranks have come. Collective; again it does nothing.

        Operations under way on the device are waited for. The memory of this rank is given back
        also where another rank does not come.

        Raises:
            PeerTimeoutError: A rank did not come.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.repeats.clear()
        self._forget()
        if self.memory is not None:
            self.memory.close()

    def __del__(self) -> None:
        # Not closed here: all ranks have to come to that.
        if not self._is_closed and self.memory is not None and os.getpid() == self._process:
            num_bytes, ranks = self.regions.num_bytes, self.group.size
            told = f"a workspace of {num_bytes} bytes on each of {ranks} ranks was not closed"
            warnings.warn(told, ResourceWarning, source=self, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, object]) -> Workspace:
        """Itself: a copy of a module that holds it uses the same memory."""
        return self

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as problem:
            if value is None:
                raise
            # The error of the block is the cause of this one.
            value.add_note(f"closing the workspace: {type(problem).__name__}: {problem}")

    # -- how it is done ------------------------------------------------------------------

    def _slot_view(self, lease: SlotLease, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = self.memory
        assert memory is not None
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self.regions.slot(lease.slot)
        view = memory.buffer()[start : start + num_bytes].view(dtype).view(tuple(shape))
        self._turns_of_views[view] = lease
        return view

    def _is_held(self, lease: SlotLease) -> bool:
        """Whether a tensor that was handed out for a turn is alive."""
        return any(other is lease for other in self._turns_of_views.values())

    def _newest_of_slot(self, view: Tensor, newest: int) -> int:
        """Generation of the last operation that had the slot of a tensor; `newest` outside."""
        slot = self._slot_of(view)
        return newest if slot is None else newest - (newest - slot) % self.turns.rotation.num_slots

    def _slot_of(self, x: Tensor) -> int | None:
        """The slot in which a tensor begins; None outside."""
        if self.memory is None:
            return None
        offset = x.data_ptr() - self.memory.buffer_ptrs[self.group.rank]
        if not self.regions.slot(0) <= offset < self.regions.lamport_region:
            return None
        slots = range(self.turns.rotation.num_slots)
        return next(i for i in slots if offset < self.regions.slot(i + 1))

    def _open_memory(self, lamport_bytes: int, control: Control | None) -> None:
        opened, self.capability = open_memory(
            self.group, self.regions, lamport_bytes, self.device, self.capability, control
        )
        if opened is not None:
            self.memory, self._lamport = opened.symmetric, opened.lamport
            self._epochs, self._failure = opened.epochs, opened.failure
            self.failure_word = opened.failure_word
            begin = opened.symmetric.buffer_ptrs[self.group.rank]
            self.own_range = (begin, begin + self.regions.num_bytes)

    def _wait_for_all(self) -> None:
        from pcomm.nvls.primitives.barrier import wait_for_all_kernel

        arguments = {**self.shared_arguments(), "WAY": self.barrier_way(self.capability.multicast)}
        self._enqueue(Launch(wait_for_all_kernel, 1, 4, arguments, self.device))

    def _enqueue(self, launch: Launch) -> None:
        if self.turns.on_trial is not None:
            self.launcher.compile(launch)
            return
        self.launcher.run(launch)
        self.num_launches += 1
        if self.device.type == "cpu":
            self.check()

    def _agree(self, what: str, lines: Sequence[str], error: PcommError | None = None) -> None:
        topic = f"nvls: {what}"
        agree_in_group(self.group, topic, lines, error=error, control=self._control)


def _close(workspace: Workspace | None) -> None:
    if workspace is not None:
        workspace.close()


def _table_or_default(table: object) -> Table:
    if table is None or isinstance(table, Table):
        return table or Table()
    raise ConfigError(
        f"Workspace: table={table!r}",
        found=f"a value of type {type(table).__name__}",
        why="Thresholds are bands of rows.",
        fix="Pass a pcomm.nvls.policy.Table, or None for that of the package.",
    )


def _closed(operation: str) -> ClosedError:
    return ClosedError(
        operation,
        found="the workspace is closed",
        why="Its memory has been given back, on this rank at least.",
        fix="Use it within its `with` block, and before its groups close.",
    )
