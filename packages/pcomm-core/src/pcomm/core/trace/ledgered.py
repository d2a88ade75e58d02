"""Collectives that raise where ranks do not issue the same operations, instead of hanging."""

from __future__ import annotations

import threading

from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.control.control import Control
from pcomm.core.control.default import control_of_group
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import Groups
from pcomm.core.trace.ledger import Ledger

__all__ = ["LedgeredCollectives", "ledgered", "ledgered_groups"]


class LedgeredCollectives(InstrumentedCollectives):
    """The collectives that `ledgered` returns; `close` them when the group is done.

    A call that blocks is issued as its asynchronous twin and waited for, so that this rank can
    look at the other ranks meanwhile.
    """

    def __init__(self, inner: Collectives, ledger: Ledger) -> None:
        super().__init__(inner)
        self.ledger = ledger

    def run(self, call: Call) -> Tensor:
        """Record, compare if a round is full, then wait while looking at the other ranks."""
        return self.start(call).wait()

    def start(self, call: Call) -> Pending:
        """Record and compare if a round is full; the wait looks at the other ranks."""
        self.ledger.enter(call.agreed)
        pending = self.inner.start(call)
        ended = threading.Event()
        is_seen = pending.on_done(ended.set)

        def finish() -> Tensor:
            if is_seen:
                self.ledger.wait(ended)
            try:
                return pending.wait()
            except RuntimeError as problem:
                self.ledger.explain(problem)
                raise

        return pending.around(finish)

    def close(self) -> None:
        """Compare the operations since the last comparison. Collective; again it does nothing.

        Raises:
            DivergenceError: A rank has issued others, or more.
            PeerTimeoutError: A rank did not come.
        """
        self.ledger.close()


def ledgered(
    collectives: Collectives,
    group: Group,
    *,
    every: int = 64,
    patience_s: float = 10.0,
    timeout_s: float | None = None,
    control: Control | None = None,
) -> Collectives:
    """`collectives` that name the first rank and operation that diverge, on every rank.

    For finding mistakes, not for production: a comparison costs each rank a message to the store
    for each rank of the group, and makes all of them wait for the slowest. Collective over the
    group. Alone it returns `collectives` themselves.

    What is compared are the name of the operation, its dtype, dimension, shape, sizes, reduction
    and source, leaving out lengths that may differ from rank to rank.

    - With `every=1` ranks compare before they enter each operation: nothing wrong is ever sent.
    - With more, two ranks that enter *different* operations of one communicator within a round
      exchange what neither meant; gloo may deliver it, or end the process. A rank that waits in an
      operation that another skipped, or while that rank is in another group or has closed, finds
      out after `patience_s`.
    - On NCCL a call returns before the operation ends, and its end is not seen here. The ranks
      compare at the end of a round, unless a rank waits for its device before; leave that to
      NCCL's own watchdog.
    - After an error the operation is still under way: close the group and end the program.

    Args:
        collectives: Collectives of `group`, without gradients.
        group: Group whose ranks compare.
        every: Number of operations between comparisons.
        patience_s: Seconds after which an operation or a comparison that does not end is looked
            into.
        timeout_s: Seconds from then on until a silent rank is an error; by default that of
            `control`, or `PCOMM_TIMEOUT_S`.
        control: Control by which the ranks agree; by default in the store of torch.distributed.

    Raises:
        ConfigError: `every` is not positive.
        PeerTimeoutError: A rank of the group does not call this.
    """
    if every < 1:
        raise ConfigError(
            f"ledgered: every={every}",
            found="a number below 1",
            why="It is the number of operations between two comparisons.",
            fix="Give 1 to compare before each operation, or more for less waiting.",
        )
    if group.is_identity:
        return collectives
    members = control_of_group(group, control)
    ledger = Ledger(
        members,
        group.key,
        every=every,
        patience_s=patience_s,
        timeout_s=members.wait_s(timeout_s),
    )
    return LedgeredCollectives(collectives, ledger)


def ledgered_groups(
    groups: Groups, *, every: int = 64, patience_s: float = 10.0, timeout_s: float | None = None
) -> Groups:
    """`groups` of which every call is compared; see `ledgered`. All ranks call it.

    Closing them compares what is left, while the communicators still work, unless an error was
    raised before. Both use the same communicators; closing one closes those of the other too.
    """
    watched: list[LedgeredCollectives] = []

    def watch(group: Group) -> Collectives:
        collectives = ledgered(
            group.collectives,
            group,
            every=every,
            patience_s=patience_s,
            timeout_s=timeout_s,
            control=groups.control,
        )
        if isinstance(collectives, LedgeredCollectives):
            watched.append(collectives)
        return collectives

    def close() -> None:
        # The peers of one that has failed do not come to the comparisons of the others.
        if not any(collectives.ledger.has_failed for collectives in watched):
            for collectives in watched:
                collectives.close()

    groups.before_close(close)
    return groups.with_collectives(watch)
