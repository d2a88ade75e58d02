"""Collective operations of one group of ranks: what a call asks for, and how its result comes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsIndex, TypeVar, cast, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from pcomm.core.errors import LayoutError, PeerError, UnsupportedError

__all__ = [
    "Call",
    "Collectives",
    "Handle",
    "OperationName",
    "Pending",
    "Reduction",
]


OperationName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Reduction = Literal["sum", "max"]


class Collectives(ABC):
    """Operations over the ranks of one group; every rank calls them in the same order.

    `dim` is the tensor dimension along which shards lie (it may be negative). `sizes` gives
    each rank's length along `dim` where they are uneven; without it all are equal. Each
    operation has a twin ending in `_async` that returns a `Pending` at once.

    Results are new tensors unless `out` is given. With one rank the result is the input itself.
    `x` may have any strides.

    `out` has the shape of the result, and dtype and device of `x`. It may have any strides and lie
    over `x`, in whole or in part; a result in `out` carries no gradient. While an operation is in
    flight neither `out` nor `x` may be written to, and `out` not be read.

    Sizes and an `out` that do not fit raise `LayoutError` before anything is sent. A call that is
    refused counts as made: the next one is the next on all ranks.

    The named methods make a `Call` and pass it to `run` or `start`, which subclasses write.

    Attributes:
        rank: Place of this rank in the group.
        size: Number of ranks in the group.
    """

    rank: int
    size: int

    @abstractmethod
    def run(self, call: Call) -> Tensor:
        """The result of an operation. Collective: all ranks of the group make the same call."""

    @abstractmethod
    def start(self, call: Call) -> Pending:
        """Start an operation and return at once. Collective: all ranks make the same call."""

    def skip(self, operation: OperationName) -> None:  # noqa: B027
        """Count an operation that this rank was refused, so that it meets none of the next. Local.

        Called where a call is refused before it gets here. The other ranks may be in that
        operation; the next one of this rank never gets what they have sent for it.
        """

    def recording(self) -> AbstractContextManager[None]:
        """A block whose operations are recorded into one CUDA graph, and do not run. Local.

        Where the block raises, the graph is given up on all ranks: the operations after it take up
        where those before it ended, however many of them this rank had recorded.
        """
        return nullcontext()

    def sequence(self) -> AbstractContextManager[None]:
        """A block whose operations follow each other, with no replay of a graph between. Local.

        Such as a step of a model that runs eagerly beside recorded ones. Operations that know what
        was before them wait for less, and `empty_input` has memory for more of them.
        """
        return nullcontext()

    def empty_input(
        self, operation: OperationName, shape: Sequence[int], like: Tensor
    ) -> Tensor | None:
        """Memory for the input of the next operation, which then need not copy it. Local.

        Where ranks read each other's memory, an operation first copies its input to where the
        others read it. A product that writes its result there saves that copy. The tensor is
        written to at once, on the current stream, and passed to the next operation without an
        `out`. After that it is neither read nor written: other operations have the same memory.

        Args:
            operation: Next operation: "all_reduce", or "reduce_scatter" along dimension 0, a sum.
            shape: Shape of its input.
            like: Tensor of its dtype and device.

        Returns:
            A contiguous tensor of that shape, with any numbers; None where the operation copies
            nothing that this could save. A rank may ask for it and another one not.
        """
        return None

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks, in rank order along `dim`."""
        return self.run(Call("all_gather", x, out, dim, sizes))

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_gather`."""
        return self.start(Call("all_gather", x, out, dim, sizes))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard along `dim` of the sum of `x` over all ranks."""
        return self.run(Call("reduce_scatter", x, out, dim, sizes))

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Start a `reduce_scatter`."""
        return self.start(Call("reduce_scatter", x, out, dim, sizes))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum of `x` over all ranks; `out=x` works in place.

        The sum of booleans is "any". Whether a maximum carries a NaN depends on the backend: on
        gloo the NaN of one rank can be lost.
        """
        return self.run(Call("all_reduce", x, out, op=op))

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Start an `all_reduce`."""
        return self.start(Call("all_reduce", x, out, op=op))

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Part i of `x` along `dim` goes to rank i; the parts received, in rank order."""
        return self.run(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

    def all_to_all_async(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Pending:
        """Start an `all_to_all`."""
        return self.start(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of the rank at place `source`; all ranks pass the same shape; `out=x` in place."""
        return self.run(Call("broadcast", x, out, source=source))

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Start a `broadcast`."""
        return self.start(Call("broadcast", x, out, source=source))


# Not frozen: that makes an object seven times as slow to create, and one is made for each call.
@dataclass(slots=True, eq=False)
class Call:
    """One call of an operation, as it was made on this rank; not changed once it is made.

    It refers to tensors, so an object that outlives the call keeps the fields it needs and not
    the call.

    Args:
        operation: Name of the operation.
        x: Input tensor, of any strides.
        out: Tensor for the result; None for a new tensor.
        dim: Dimension along which shards lie, negative counted from the end. An all-reduce and a
            broadcast have none.
        sizes: Length along `dim` of each rank's shard, or of the part that an all-to-all sends to
            each rank. None where all are equal.
        receive_sizes: Length of the part received from each rank, for an all-to-all.
        op: Reduction that combines the inputs of an all-reduce.
        source: Place in the group of the rank whose input a broadcast sends.
    """

    operation: OperationName
    x: Tensor
    out: Tensor | None = None
    dim: int = 0
    sizes: Sequence[int] | None = None
    receive_sizes: Sequence[int] | None = None
    op: Reduction = "sum"
    source: int = 0

    @property
    def length(self) -> int:
        """Length of the input along `dim`. Local.

        Raises:
            LayoutError: The input has no such dimension.
        """
        try:
            return self.x.shape[self.dim]
        except IndexError:
            raise LayoutError(
                f"{self.operation}: dim={self.dim}",
                found=f"a tensor of shape {tuple(self.x.shape)}",
                why="Shards lie along a dimension of the tensor.",
                fix="Name a dimension that it has; give a single number one by x.view(1).",
            ) from None

    def with_input(self, x: Tensor) -> Call:
        """The same call of another input tensor. Local."""
        sizes = self.sizes, self.receive_sizes
        return Call(self.operation, x, self.out, self.dim, *sizes, self.op, self.source)

    def sent_bytes(self, rank: int, size: int) -> int:
        """Least number of bytes that a rank must send. Local.

        For N ranks and an input of b bytes these are (N-1)b for a gather, (N-1)/N b for a
        reduce-scatter, 2(N-1)/N b for an all-reduce, all parts but its own for an all-to-all, and
        b from the source of a broadcast (every other rank must get it; a tree sends it on).

        Args:
            rank: Place in the group of the rank that made this call.
            size: Number of ranks in the group.
        """
        x, sizes = self.x, self.sizes
        if self.operation == "all_gather":
            return (size - 1) * x.nbytes
        if self.operation == "broadcast":
            return x.nbytes if rank == self.source else 0
        # A call whose sizes are not one for each rank is refused before it sends anything.
        if sizes is None or len(sizes) != size or not self.length:
            others = x.nbytes * (size - 1) // size
        else:
            others = x.nbytes * (sum(sizes) - sizes[rank]) // self.length
        return 2 * others if self.operation == "all_reduce" else others

    @property
    def agreed(self) -> str:
        """One line of text with all that must be the same on every rank of the group."""
        shape: list[str] = [str(n) for n in self.x.shape]
        parts: list[str] = [self.operation]
        match self.operation:
            case "all_reduce":
                parts.append(self.op)
            case "reduce_scatter":
                parts.append("sum")
            case "broadcast":
                parts.append(f"from {self.source}")
        parts.append(str(self.x.dtype).removeprefix("torch."))
        if self.operation not in ("all_reduce", "broadcast"):
            dim = self.dim % max(1, self.x.dim())
            # These lengths differ between ranks; where they must fit together, sizes says how.
            if self.sizes is not None and self.operation != "reduce_scatter":
                shape[dim : dim + 1] = ["*"]
            parts.append(f"dim {dim}")
        parts.append(f"[{', '.join(shape)}]")
        if self.sizes is not None and self.operation != "all_to_all":
            parts.append(f"sizes {list(self.sizes)}")
        return " ".join(parts)


class Pending:
    """The result of an operation in flight; `wait` returns it.

    Local: only this rank waits. Every pending result must be waited for once before its
    tensors are read or freed; a second `wait` returns the same tensor at once.

    Args:
        finish: Function that waits for the operation and returns its result.
        work: Handle that tells when the operation has ended: torch's, or another pending result
            of the same operation. None where the host cannot see the end, as on a GPU.
        polled: Torch's handle of an operation on a device, which does not tell when that ends but
            can be asked whether it has; None where there is none.
    """

    __slots__ = ("_finish", "_polled", "_result", "_work")

    def __init__(
        self,
        finish: Callable[[], Tensor],
        work: dist.Work | TellsItsEnd | None = None,
        *,
        polled: dist.Work | None = None,
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._work, self._polled = work, polled
        self._result: Tensor | None = None

    @classmethod
    def ready(cls, result: Tensor) -> Pending:
        """A pending result of an operation that has ended. Local."""
        pending = cls.__new__(cls)
        pending._finish, pending._result = None, result
        pending._work = pending._polled = None
        return pending

    def wait(self) -> Tensor:
        """Block until the operation has finished and return its result."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = self._work = self._polled = None
        assert self._result is not None
        return self._result

    def is_done(self) -> bool | None:
        """Whether the operation has ended, well or with an error. Local; it never blocks.

        It must still be waited for: `wait` then returns without blocking, or raises the error.
        The local work that `wait` may do afterwards is not part of the operation.

        On NCCL it is true once the device has passed the operation's event, as
        `torch.cuda.Event.query` is, or the communicator has failed. That is later than the return
        of `wait`, which only orders the current stream behind the operation, and after such a
        `wait` it is true. It may not be asked while a CUDA graph is captured.

        Returns:
            None where nothing tells: the operation was made with neither handle.
        """
        if self._finish is None:
            return True
        if isinstance(self._work, TellsItsEnd):
            return self._work.is_done()
        handle = self._polled if self._work is None else self._work
        return None if handle is None else bool(handle.is_completed())

    def wait_or(self, failure: Callable[[], str | None]) -> Tensor:
        """Wait as `wait` does, but leave the operation behind when another rank has failed. Local.

        An operation that has ended counts before a failure, so its result or its own error comes
        first. One that is left behind goes on: its tensors may neither be read nor written, and
        no further operation of that communicator ends. `Groups.abandon` ends or leaves them.

        Args:
            failure: Function called every few milliseconds while the operation is in flight, on
                this thread; the message of a rank that failed, or None. Such as
                `lambda: flag.heard(round_number=step)` with a `FailureFlag`. What it raises leaves
                the operation behind, too.

        Raises:
            PeerError: `failure` returned a message.
            UnsupportedError: Nothing tells when the operation ends, so that the wait could not be
                left; nothing was waited for.
        """
        ended = threading.Event()
        is_told = False
        while True:
            is_done = self.is_done()
            if is_done is None:
                raise UnsupportedError(
                    "Pending.wait_or",
                    found="an operation whose end neither the host nor a handle tells",
                    why="It could only be waited for by blocking, which no failure interrupts.",
                    fix="Call wait(), or give Pending the handle of the operation.",
                )
            if is_done or ended.is_set():
                return self.wait()
            message = failure()
            if message is not None:
                raise PeerError(
                    "Pending.wait_or",
                    found=message,
                    why="That rank will not finish the operation that this one waits for.",
                    fix="Abandon these groups, and open others in the next generation.",
                )
            if not is_told:
                is_told = True
                self.on_done(ended.set)
            ended.wait(_PAUSE_S)

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called at the end of the operation, also if `wait` is never called. Local.

        It runs on another thread, before `wait` returns, or here if the operation has ended
        already; what it raises is lost. The local work that `wait` may do afterwards, such as the
        sum of a reduce-scatter on gloo, is not part of the operation.

        Returns:
            False where the end cannot be seen; then `call` is not called.
        """
        if self._finish is None:
            call()
        elif self._work is None:
            return False
        elif isinstance(self._work, TellsItsEnd):
            return self._work.on_done(call)
        else:
            self._work.get_future().add_done_callback(lambda _: call())
        return True

    def around(self, finish: Callable[[], Tensor]) -> Pending:
        """The same operation, waited for by `finish`, which waits for this one. Local."""
        return Pending(finish, self)


@runtime_checkable
class TellsItsEnd(Protocol):
    """An operation that is in flight, or has ended."""

    def is_done(self) -> bool | None:
        """Whether it has ended, as `Pending.is_done` says."""
        ...

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called at the end of the operation, as `Pending.on_done` does."""
        ...


# Between two looks at a failure check, which may read a store. An end that the host sees wakes the
# waiting thread at once; one on a device is looked for as often.
_PAUSE_S = 0.002
H = TypeVar("H", bound="Handle")


class Handle:
    """Base of groups, and of collectives that hold a communicator.

    A module that holds them can be copied with `copy.deepcopy`: the copy has parameters of its
    own, and communicates through the same communicator.
    """

    __slots__ = ()

    def __copy__(self: H) -> H:
        """Itself."""
        return self

    def __deepcopy__(self: H, memo: dict[int, object]) -> H:
        """Itself."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Refuse to be pickled.

        Raises:
            UnsupportedError: Always.
        """
        collectives = cast(Collectives, self)
        raise UnsupportedError(
            f"pickle: {type(self).__name__}, or a module that holds it",
            found=f"the communicator of rank {collectives.rank} of {collectives.size}",
            why="A communicator belongs to the process that opened it, and to no other one.",
            fix="Save the module's state_dict, or its shards (pcomm.core.checkpoint), and build "
            "the module anew with the groups of the process that loads it.",
        )
