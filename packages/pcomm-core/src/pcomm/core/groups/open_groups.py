"""Opening the groups of a topology, and the handles to what was opened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.agreement_round import all_or_none
from pcomm.core.control.control import Control
from pcomm.core.errors import TopologyError, near_misses
from pcomm.core.groups.abandoning import (
    AbortOnFailure,
    abandon_communicators,
    is_abortable,
    never_freed,
)
from pcomm.core.groups.communicators import close_communicator
from pcomm.core.groups.group import Closing, Group
from pcomm.core.groups.opening import (
    Made,
    agree_on_groups,
    callers_of,
    connected_groups,
    with_own_collectives,
)
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.topology import Topology

__all__ = [
    "Groups",
    "open_groups",
]


def open_groups(
    topology: Topology,
    specs: Sequence[str | tuple[str, str] | GroupSpec],
    *,
    backend: str = "gloo",
    timeout_s: float | None = None,
    control: Control | None = None,
    collectives: Callable[[Group], Collectives] | None = None,
) -> Groups:
    """Open the groups that this rank belongs to. Collective: every rank of the topology calls it.

    With one rank nothing is initialised and nothing needs to be. With more, torch.distributed
    must be (see `pcomm.core.process.world.connect`), unless a `control` is given: communicators are
    made in its store. Where torch.distributed is not initialised, its functions then find the rank
    of this process, and no connections, until the last communicator is closed or abandoned.
    Failed ranks do not call it. Each call makes communicators of its own; if one cannot be made,
    those made before it are closed.

    The ranks of `control` call it, and the topology must be of exactly these. Without one, all
    processes of torch.distributed call it, or, for a topology with an offset above 0, its ranks
    alone. So the first ranks of a job open groups of their own with
    `control=default_control(topology.ranks)`.

    With `collectives` every group communicates through what that returns for its communicator. It
    is called once for each communicator, after all are connected, in the order of their creation
    and on every member, so it may be collective over the group. It gets the first group of the
    communicator, with torch's operations. Where the result has a `close`, that is called before
    the communicators close, the last one made first. If it raises on one rank, every rank raises
    and everything is closed again; the other ranks then call a `close` that this rank does not, so
    it should not communicate. One rank needs no communicator, and none is made for it.

    Args:
        topology: Axes, sizes and order; its ranks that have not failed are those that call it.
        specs: Groups by axes, `(axes, role)`, or `GroupSpec`, the same list on every rank. The
            order is the creation order. A rank opens those that it belongs to, which of groups of
            explicit ranks (`GroupSpec.of_ranks`) may be some.
        backend: `"gloo"` or `"nccl"`.
        timeout_s: Seconds to wait for other ranks; by default that of `control`, or
            `PCOMM_TIMEOUT_S`.
        control: Control of the ranks that call it.
        collectives: Function from a group to its collectives, such as those of another package;
            None for the operations of torch.distributed.

    Raises:
        ConfigError: A `PCOMM_*` variable cannot be used.
        TopologyError: Unknown axes, a group named twice, explicit ranks that are not there, or
            other ranks than those that call.
        UnsupportedError: An option of a strict `CommOptions` is not granted.
        PeerError: Another rank has one of these errors, or could not make a communicator or its
            collectives.
        DivergenceError: Ranks ask for different groups; names the first difference, on every rank.
        PeerTimeoutError: A rank did not arrive.
        FencedError: A newer generation than that of `control` has begun.
    """
    callers = callers_of(topology) if control is None else control
    agreed = agree_on_groups(
        topology,
        specs,
        callers,
        is_given=control is not None,
        backend=backend,
        timeout_s=timeout_s,
    )
    made, closing = Made(), Closing()

    def undo(_: Exception | None) -> list[Exception]:
        try:
            Groups([], owned=list(made.values()), closing=closing)._end_after_an_error()
        except Exception as problem:
            return [problem]
        return []

    def agree(step: str, error: Exception | None) -> None:
        # A rank that waits in vain for one that failed is later than that by as much.
        callers.fail_together(f"open_groups: {step}", error, timeout_s=2 * agreed.wait_s)

    # A communicator that is closed while a peer still connects to it is an error there, so no
    # rank goes on before all are done.
    opened, _ = all_or_none(
        lambda: connected_groups(agreed, made, closing),
        lambda _, error: agree("connecting", error),
        undo,
    )
    if collectives is not None:
        opened, _ = all_or_none(
            lambda: with_own_collectives(opened, collectives, timeout_s=agreed.wait_s),
            lambda _, error: agree("collectives", error),
            undo,
        )
    return Groups(
        opened, owned=list(made.values()), topology=topology, control=callers, closing=closing
    )


class Groups(Mapping[str | tuple[str, str], Group]):
    """Groups by axes, or by axes and role: `groups["tp"]`, `groups["dp_cp", "gather"]`.

    A context manager that closes the communicators it owns, in reverse order. Groups whose ranks,
    role and options are all equal (such as `dp` and `dp_cp` when cp is 1) share a communicator.

    Args:
        groups: Groups of this rank.
        owned: Communicators to close, in the order in which they were made.
        topology: Topology whose axes the groups run along; None where it is not known.
        closing: Calls before the communicators close; the same object as that of `groups`.
        control: Control of the ranks that opened them together; None where it is not known.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        owned: Sequence[dist.ProcessGroup] = (),
        topology: Topology | None = None,
        closing: Closing | None = None,
        control: Control | None = None,
    ) -> None:
        self.topology, self.control = topology, control
        self._groups: dict[str | tuple[str, str], Group] = {}
        for group in groups:
            self._groups[group.name, group.role] = group
            if not group.role:
                self._groups[group.name] = group
        self._owned = list(owned)
        self._closing = Closing() if closing is None else closing

    @classmethod
    def from_process_groups(
        cls, process_groups: Mapping[str | tuple[str, str], dist.ProcessGroup]
    ) -> Groups:
        """Groups around existing communicators, which their owner closes. Local.

        For a Megatron-style collection pass its attributes by the names wanted here:
        `Groups.from_process_groups({"tp": c.tp, ("dp_cp", "gather"): c.dp_cp_ag})`.
        """
        groups, closing = [], Closing()
        for key, process_group in process_groups.items():
            name, role = (key, "") if isinstance(key, str) else key
            group = Group.from_process_group(name, process_group, role=role, closing=closing)
            groups.append(group)
        return cls(groups, closing=closing)

    def __getitem__(self, key: str | tuple[str, str]) -> Group:
        try:
            return self._groups[key]
        except KeyError:
            raise self._missing(key) from None

    def __iter__(self) -> Iterator[str | tuple[str, str]]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def explain(self) -> str:
        """A table of this rank's groups: ranks, communicator, options asked and granted. Local."""
        return _table_of_groups(self._distinct())

    def own(self, communicator: dist.ProcessGroup) -> None:
        """Have `communicator` closed with these groups, before those that are there already."""
        self._owned.append(communicator)

    def before_close(
        self, call: Callable[[], object], *, is_local: bool = False
    ) -> Callable[[], None]:
        """Have `call` called when these groups close, while their communicators still work.

        Local. The last one given is called first. Its errors are raised by `close`, after the
        communicators are closed. It is kept until then with all that it refers to, so objects that
        may be freed before the groups should be referred to weakly.

        Args:
            call: Function without arguments.
            is_local: True if `call` neither communicates nor waits for another rank; only then
                `abandon` makes it, too.

        Returns:
            A function that takes `call` back; calling it again does nothing.
        """
        return self._closing.add(call, is_local=is_local)

    def with_collectives(self, make: Callable[[Group], Collectives]) -> Groups:
        """The same groups, whose operations go through what `make` returns for each. Local.

        Both use the same communicators; closing one closes those of the other too.
        """
        others = [group.with_collectives(make(group)) for group in self._distinct()]
        return self._sharing(others, self.control)

    def relabelled(
        self, names: Mapping[str, str], ranks: Mapping[int, int] | None = None
    ) -> Groups:
        """The same groups with other names, and other numbers for their ranks. Local.

        So each rank finds its own of many groups of explicit ranks under one name. Of groups that
        get the same key it has the one that was opened last. Both use the same communicators;
        closing one closes those of the other too.

        Args:
            names: New name of a group by its present one; others keep theirs.
            ranks: Number of each rank by its present one, in the same order, where processes are
                numbered without the ranks that are gone; None to keep the numbers.
        """
        others = []
        for group in self._distinct():
            own = group.ranks if ranks is None else tuple(ranks[rank] for rank in group.ranks)
            others.append(group.relabelled(names.get(group.name, group.name), own))
        # Each group still agrees by the control that it was opened with.
        return self._sharing(others, self.control if ranks is None else None)

    def abort_on(self, failure: Callable[[], str | None]) -> None:
        """Have a thread abort communicators of NCCL once a rank has failed. Local.

        What waits for the device then ends, and what it finds there is of no use. For collectives
        whose calls raise from then on, see `interruptible`. The thread ends with these groups.

        Args:
            failure: Function called every few milliseconds, on that thread; the message of a rank
                that failed, for good, or None.
        """
        self.before_close(AbortOnFailure(self._owned, failure).close, is_local=True)

    def close(self) -> None:
        """Close the communicators that these groups own, last opened first. Collective.

        The calls of `before_close` are made first, then close the communicators and their
        threads. Handles that are still referred to raise `ClosedError` from then on. An operation
        in flight ends as if the groups were open, if all ranks have begun it; `wait` returns its
        result. Calling it again does nothing. Communicators that ended with torch.distributed need
        no closing, also where it was begun again since, and those of others are left alone.
        """
        self._groups = {}
        with contextlib.ExitStack() as last_first:
            for communicator in self._owned:
                last_first.callback(close_communicator, communicator)
            for call in self._closing.take_all():
                last_first.callback(call)
            # In place: groups made by `with_collectives` hold the same list.
            self._owned.clear()

    def abandon(self) -> None:
        """Leave these groups as they are, without waiting for any rank or operation. Local.

        For ranks whose peers are gone: a close would wait for operations that never end. Handles
        raise `ClosedError` from then on, also those of groups made by `with_collectives`, and
        torch.distributed forgets the communicators, so that its own end does not wait for them.
        Groups of the next generation can be opened at once. Closing or abandoning again does
        nothing, and leaving a `with` block too.

        `wait` of an operation in flight raises `ClosedError` from then on. On Linux the connections
        of gloo's communicators are shut down. So operations in flight end with torch's error on
        ranks that have not abandoned the groups yet; here none of them writes to its tensors any
        more, and soon after threads, connections and tensors are free, except for what a `Pending`
        that the caller keeps refers to. An operation of which a message had arrived, or was sent,
        in part is an exception, here and there: gloo does not end it, and keeps its tensors and a
        thread, until the time limit of its group (`CommOptions.timeout_s`) is over.

        Of the calls of `before_close` those with `is_local=True` are made, the last one given
        first; the others never are, and what they refer to is kept. Their errors are raised once
        everything is abandoned. Groups around communicators of others abandon none.

        On other systems, connections and threads of each communicator (three with gloo) and the
        tensors of operations in flight stay until the process ends.

        Communicators of NCCL are aborted, all at the same time: their kernels in flight end, with
        any numbers as the result, and this returns when they have. It has not run on hardware yet.

        Raises:
            UnsupportedError: An abort of NCCL has not ended within a minute, so that kernels may
                keep the device busy.
        """
        self._groups = {}
        local, others = self._closing.take_local()
        with contextlib.ExitStack() as last_first:
            for call in local:
                last_first.callback(call)
            never_freed(others)
            # In place, as in `close`.
            abandon_communicators(self._owned)

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        try:
            if value is None:
                self.close()
            else:
                self._end_after_an_error()
        except Exception as problem:
            if value is None:
                raise
            # The error of the block is the cause of this one.
            value.add_note(f"closing the groups: {type(problem).__name__}: {problem}")

    def _end_after_an_error(self) -> None:
        """Close these groups; those of NCCL are left, whose close might wait for ranks in vain."""
        if any(map(is_abortable, self._owned)):
            self.abandon()
        else:
            self.close()

    def _sharing(self, groups: Sequence[Group], control: Control | None) -> Groups:
        """`groups`, with the communicators and the calls before the close of these."""
        others = Groups(groups, topology=self.topology, control=control, closing=self._closing)
        # The same list: closing one empties it for the other.
        others._owned = self._owned
        return others

    def _distinct(self) -> list[Group]:
        return [group for key, group in self._groups.items() if isinstance(key, tuple)]

    def _missing(self, key: str | tuple[str, str]) -> TopologyError:
        name, role = (key, "") if isinstance(key, str) else key
        known = [group.key for group in self._distinct()]
        return TopologyError(
            f"groups[{key!r}]",
            found=f"open groups {known}",
            why="Only groups named to open_groups are there, while they are open, and of those of "
            "explicit ranks the ones with this rank.",
            fix=near_misses(f"{name}[{role}]" if role else name, known),
        )


def _table_of_groups(groups: Sequence[Group]) -> str:
    """A table of `groups`: ranks, communicator, options asked, granted and refused. Local."""
    rows: list[tuple[str, ...]] = [_HEAD]
    first_with: dict[dist.ProcessGroup, str] = {}
    for group in groups:
        communicator = "none (identity)"
        if group.process_group is not None:
            first = first_with.setdefault(group.process_group, group.key)
            backend = dist.get_backend(group.process_group)
            communicator = backend if first == group.key else f"that of {first}"
        rows.append(
            (
                group.name,
                group.role or "-",
                f"{group.rank} of {group.size}",
                _shorten(group.ranks),
                communicator,
                _join(group.asked),
                _join(group.granted),
                _join(group.refused),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


_HEAD = ("group", "role", "rank", "ranks", "communicator", "asked", "granted", "refused")


def _shorten(ranks: Sequence[int]) -> str:
    text = ",".join(str(rank) for rank in ranks[:8])
    return text if len(ranks) <= 8 else f"{text},... ({len(ranks)})"


def _join(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "-"
