"""Pools of memory that communicators register: filled, frozen, and bound as one transaction."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.control.agreement_round import all_or_none
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import PoolBackend, PoolCommunicator

__all__ = ["Arena", "Binding", "PoolRegistry", "State"]


class State(Enum):
    """Where a pair of arena and communicator stands."""

    UNBOUND = "unbound"
    BOUND = "bound"
    BROKEN = "broken"
    """De-registration failed; what is registered is not known, and nothing more is tried."""


@dataclass
class Binding:
    """One pair; `group` is the key of the first group by which the communicator was named."""

    arena: Arena
    communicator: PoolCommunicator
    group: str
    state: State = State.UNBOUND


class PoolRegistry:
    """Arenas, and the communicators that they are registered with.

    `arena`, allocate, `freeze`, `bind`; the rest happens when `groups` close: the device finishes
    what it was given, and everything is de-registered, last bound first, before the first
    communicator goes. Tensors of the arenas are not sent any more by then, and are freed after it.

    By default there is one arena a role, so that buffers for gathering and for reducing need no
    registration with a communicator they never meet.

    Args:
        groups: Groups whose communicators memory is registered with; it closes with them.
        control: Ranks that call `bind`, `unbind` and `close` together; members of all groups that
            are bound. Not used for communication: they agree in the store.
        backend: `NcclPools`, or `FakePools` without a GPU.
        timeout_s: Seconds to wait for other ranks; by default `PCOMM_TIMEOUT_S`.
    """

    def __init__(
        self,
        groups: Groups,
        control: Group,
        backend: PoolBackend,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._control, self._backend, self._timeout_s = control, backend, timeout_s
        self._groups_control = groups.control
        self._arenas: dict[str, Arena] = {}
        self._bindings: dict[tuple[str, str], Binding] = {}
        self._is_closed = False
        groups.before_close(self.close)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Every pair that is bound or broken, in the order of registration."""
        return tuple(self._bindings.values())

    def arena(self, role: str, name: str = "") -> Arena:
        """The arena of a role, made when it is asked for first; a named one stands apart. Local."""
        self._check_open("arena")
        key = name or f"role {role}"
        return self._arenas.setdefault(key, Arena(key, role, self._backend))

    def new_arena(self, role: str, name: str) -> Arena:
        """A new arena; where its name is taken it gets a number. Local."""
        names = itertools.chain([name], (f"{name} #{number}" for number in itertools.count(2)))
        return self.arena(role, next(key for key in names if key not in self._arenas))

    def drop(self, arena: Arena) -> None:
        """Forget an arena, so that its memory is freed with the last other reference. Local.

        Raises:
            ConfigError: It is bound, or broken.
        """
        if any(pair.arena is arena for pair in self._bindings.values()):
            raise ConfigError(
                f"drop: arena {arena.name!r}",
                found="it is bound to a communicator",
                why="Memory that goes while it is registered stays registered for ever.",
                fix="Call unbind first; closing the groups unbinds everything.",
            )
        self._arenas.pop(arena.name, None)

    def bind(
        self,
        arena: Arena,
        groups: Sequence[Group],
        *,
        across_roles: bool = False,
        symmetric: bool = False,
    ) -> None:
        """Register an arena with the communicators of `groups`. Collective over the control group.

        Groups that share a communicator count once, those without one not at all, and a pair that
        is bound already is left as it is. Before anything is registered the ranks compare
        layout and groups. If one pair fails on one rank, all pairs of this call are undone on all.

        Args:
            arena: Frozen, of this registry; the same layout on every rank.
            groups: Groups in any order; registration goes by name and role.
            across_roles: True to allow a group with another role than the arena, for a buffer
                that is truly used on two communicators.
            symmetric: Register as a symmetric window; see torch's `register_mem_pool`. NCCL
                does that collectively, so a rank on which it fails may keep the others waiting
                until NCCL's own time limit.

        Raises:
            ConfigError: The arena is not frozen, has changed, or is of another registry; a role
                that is not the arena's; ranks outside the control group; a broken pair.
            UnsupportedError: A communicator cannot register memory, or its registration failed.
            DivergenceError: The ranks' layouts or groups differ; on all, naming the difference.
            PeerError: One of these on another rank.
        """
        pairs: list[Binding] = []
        done: list[Binding] = []

        def prepare() -> list[str]:
            self._check_open("bind")
            pairs.extend(self._new_pairs(arena, groups, across_roles))
            lines = [f"arena {arena.name!r}, symmetric {symmetric}", *arena.signature()]
            lines += [f"communicator of {pair.group}" for pair in pairs]
            # A window is registered by all ranks together, which nothing else may interrupt.
            self._backend.quiesce()
            return lines

        def register() -> None:
            for pair in pairs:
                # Noted before the attempt: one that fails half-way leaves something to undo.
                done.append(pair)
                try:
                    pair.communicator.registrar.register_mem_pool(arena.pool, symmetric)
                except Exception as problem:
                    raise _failed("register", pair, problem) from problem

        def undo(failure: Exception | None) -> list[UnsupportedError]:
            # Only what failed half-way may have missing segments; torch stops at the first of
            # them, which is where registration stopped, so nothing stays registered.
            if failure is not None and done:
                _undo_half(done.pop())
            return self._deregister(done)

        all_or_none(prepare, lambda lines, error: self._agree("bind", lines or [], error), undo)
        all_or_none(register, lambda _, error: self._agree("bound", [], error), undo)
        for pair in pairs:
            pair.state = State.BOUND
            self._bindings[arena.name, pair.communicator.uid] = pair

    def unbind(self, arena: Arena) -> None:
        """De-register an arena everywhere, last bound first. Collective over the control group.

        Every pair is tried, also after one that fails.

        Raises:
            ConfigError: It is not bound, or a pair of it is broken.
            UnsupportedError: De-registration failed; the pair is broken from then on.
            DivergenceError: Other ranks unbind something else.
            PeerError: One of these on another rank.
        """
        pairs = [pair for pair in self._bindings.values() if pair.arena is arena]
        error: Exception | None = None
        if not pairs or any(pair.state is State.BROKEN for pair in pairs):
            states = {pair.group: pair.state.value for pair in pairs}
            error = ConfigError(
                f"unbind: arena {arena.name!r}",
                found=f"the states {states}" if pairs else "it is bound to no communicator",
                why="Torch answers a second de-registration with an error, and so it is one.",
                fix="Unbind once what was bound; closing the groups unbinds the rest.",
            )
        else:
            error = self._quiesced()
        # The fence: no memory is taken away that a peer still sends to.
        self._agree("unbind", [f"arena {arena.name!r}", *(pair.group for pair in pairs)], error)
        self._agree("unbound", [], _first(self._deregister(pairs)))

    def close(self) -> None:
        """De-register everything, last bound first. Collective; called when the groups close.

        Calling it again does nothing. Memory is de-registered also where peers do not come, and
        the error is raised after that.

        Raises:
            UnsupportedError: A de-registration failed; all others were tried.
            PeerTimeoutError: A rank did not come.
            ConfigError: torch.distributed has ended already, and its communicators with it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        pairs = [pair for pair in self._bindings.values() if pair.state is State.BOUND]
        if not pairs:
            return
        if self._control.size > 1 and not dist.is_initialized():
            raise ConfigError(
                f"pools: close, with {len(pairs)} pairs bound",
                found="torch.distributed has ended",
                why="Memory has to be taken from a communicator before that is destroyed.",
                fix="Close the groups first, for example by a `with` block around their use.",
            )
        late = self._quiesced()
        try:
            self._agree("close", [f"{pair.arena.name} {pair.group}" for pair in pairs], late)
        except Exception as problem:
            late = problem
        problem_here = _first(self._deregister(pairs)) or late
        if problem_here is not None:
            raise problem_here

    def _new_pairs(
        self, arena: Arena, groups: Sequence[Group], across_roles: bool
    ) -> list[Binding]:
        """Pairs to register, in canonical order, each communicator once."""
        if self._arenas.get(arena.name) is not arena:
            raise ConfigError(
                f"bind: arena {arena.name!r}",
                found="an arena of another registry",
                why="A registry knows the state of its own arenas only.",
                fix="Get the arena from this registry's arena().",
            )
        pairs: dict[str, Binding] = {}
        for group in sorted(groups, key=lambda group: (group.name, group.role)):
            self._check_group(arena, group, across_roles)
            communicator = self._backend.communicator(group)
            if communicator is None:
                continue
            pair = Binding(arena, communicator, group.key)
            known = self._bindings.get((arena.name, communicator.uid))
            # One that is bound already is checked and not registered again.
            first = known or pairs.setdefault(communicator.uid, pair)
            if first.communicator.ranks != communicator.ranks or first.state is State.BROKEN:
                raise ConfigError(
                    f"bind: arena {arena.name!r} to {group.key}",
                    found=f"communicator {communicator.uid!r} of ranks {first.communicator.ranks} "
                    f"under {first.group}, {first.state.value}",
                    why="One communicator has one set of ranks, and a broken pair stays broken.",
                    fix="Open the groups anew.",
                )
        return list(pairs.values())

    def _check_group(self, arena: Arena, group: Group, across_roles: bool) -> None:
        if group.role != arena.role and not across_roles:
            found = f"an arena for role {arena.role!r}"
        elif not set(group.ranks) <= set(self._control.ranks):
            found = f"ranks {group.ranks}, of which some are not in {self._control.key}"
        else:
            return
        raise ConfigError(
            f"bind: arena {arena.name!r} to {group.key}",
            found=found,
            why="Memory is bound to the communicators it is used on, by all of their ranks.",
            fix="Use an arena of that role, or across_roles=True if the buffer is used on both.",
        )

    def _deregister(self, pairs: Sequence[Binding]) -> list[UnsupportedError]:
        """Try every pair, last first; returns what went wrong."""
        errors = []
        for pair in reversed(pairs):
            key = pair.arena.name, pair.communicator.uid
            try:
                pair.communicator.registrar.deregister_mem_pool(pair.arena.pool)
            except Exception as problem:
                pair.state = State.BROKEN
                self._bindings[key] = pair
                errors.append(_failed("deregister", pair, problem))
            else:
                pair.state = State.UNBOUND
                self._bindings.pop(key, None)
        return errors

    def _quiesced(self) -> Exception | None:
        """Wait for the device; returns what went wrong there."""
        try:
            self._backend.quiesce()
        except RuntimeError as problem:
            return problem
        return None

    def _agree(self, what: str, lines: Sequence[str], error: Exception | None) -> None:
        agree_in_group(
            self._control,
            f"pools: {what}",
            lines,
            error=error,
            timeout_s=self._timeout_s,
            control=self._groups_control,
        )

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise ConfigError(
                f"PoolRegistry.{what}",
                found="the registry is closed",
                why="It closes with its groups, whose communicators are gone.",
                fix="Make a new one with the new groups.",
            )


def _undo_half(pair: Binding) -> None:
    """Undo a registration that failed half-way; that torch misses a segment is the expected end."""
    try:
        pair.communicator.registrar.deregister_mem_pool(pair.arena.pool)
    except RuntimeError:
        return


def _failed(what: str, pair: Binding, problem: Exception) -> UnsupportedError:
    error = UnsupportedError(
        f"pools: {what} arena {pair.arena.name!r} with {pair.group}",
        found=f"{type(problem).__name__}: {problem}",
        why="The communicator refused; what was done before it in this call is undone.",
        fix="Use the communicator once before, or leave this arena unregistered.",
    )
    error.__cause__ = problem
    return error


def _first(errors: Sequence[UnsupportedError]) -> UnsupportedError | None:
    if not errors:
        return None
    for other in errors[1:]:
        errors[0].add_note(str(other))
    return errors[0]


class Arena:
    """One pool, whose layout is final once it is frozen. Local; made by `PoolRegistry.arena`.

    Attributes:
        name: Name in errors and in the signature that ranks compare.
        role: Role of the communicators that its memory is for.
        pool: Torch's pool, or that of the fake.
    """

    def __init__(self, name: str, role: str, backend: PoolBackend) -> None:
        self.name, self.role = name, role
        self.pool: Any = backend.new_pool()
        self._backend = backend
        self._frozen: tuple[tuple[int, int], ...] | None = None
        self._num_slots, self._slot_bytes = 0, 0
        self._filled: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def is_frozen(self) -> bool:
        """Whether the layout is final."""
        return self._frozen is not None

    def allocating(self) -> AbstractContextManager[Any]:
        """A `with` block in which tensors are made in this arena.

        Raises:
            ConfigError: It is frozen.
        """
        if self._frozen is not None:
            raise ConfigError(
                f"arena {self.name!r}: allocating",
                found=f"it is frozen, with {sum(size for _, size in self._frozen)} bytes",
                why="Memory that is added later would be registered on some ranks and not others.",
                fix="Allocate everything before freeze, or use an arena of another name.",
            )
        return self._backend.allocating(self.pool)

    def freeze(self) -> None:
        """Take the layout for final; a second time changes nothing.

        Raises:
            ConfigError: Nothing is allocated in it.
        """
        if self._frozen is not None:
            return
        segments = self._backend.segments(self.pool)
        if not segments:
            raise ConfigError(
                f"arena {self.name!r}: freeze",
                found="no memory in it",
                why="An empty pool registers nothing, without an error.",
                fix="Make tensors within `with arena.allocating():` first.",
            )
        self._frozen = segments

    def reserve(self, count: int, num_bytes: int, device: torch.device) -> None:
        """Make room for `count` buffers of `num_bytes` at the same time, and freeze. Local.

        All buffers of the arena have one size from then on. That is why there is always room:
        whatever an allocator rounds, splits and merges, blocks of one size stand in a row in each
        segment, and the place that one leaves fits the next.

        Args:
            count: Number of buffers that live at once.
            num_bytes: Size of each buffer, in bytes.
            device: Device of the buffers.

        Raises:
            ConfigError: It is frozen.
        """
        self._num_slots, self._slot_bytes = count, num_bytes
        slots = [torch.UntypedStorage(0, device=device) for _ in range(count)]
        for slot in slots:
            with self.allocating():
                slot.resize_(num_bytes)
            self._backend.address(self.pool, slot)
        self.freeze()

    def fill(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give memory that `reserve` made to a storage that has none. Local.

        The storage gets as much as every buffer of this arena; `resize_(0)` gives it back.

        Args:
            storage: Storage without memory.
            num_bytes: Size that it needs, in bytes; at most that of `reserve`.

        Raises:
            ConfigError: More buffers live at once than were reserved; nothing was allocated.
            UnsupportedError: The allocator did not take memory that is there.
        """
        assert self._frozen is not None
        assert num_bytes <= self._slot_bytes
        self._filled = [known for known in self._filled if _has_memory(known())]
        if len(self._filled) == self._num_slots:
            raise ConfigError(
                f"arena {self.name!r}: a buffer of {num_bytes} bytes",
                found=f"all {self._num_slots} that were reserved are in use",
                why="New memory would not be registered, and communication slower without a word.",
                fix="Reserve for more buffers, or have fewer of them at once.",
            )
        with self._backend.allocating(self.pool):
            storage.resize_(self._slot_bytes)
        self._filled.append(weakref.ref(storage))
        address = self._backend.address(self.pool, storage)
        if not any(start <= address < start + size for start, size in self._frozen):
            raise UnsupportedError(
                f"arena {self.name!r}: a buffer of {num_bytes} bytes",
                found=f"memory at {address:#x}, in none of the {len(self._frozen)} segments",
                why="The allocator took memory that is not registered, although there is room.",
                fix="Reserve on the stream on which buffers are filled, and fill none in a "
                "captured graph: each has blocks of its own. Or use ordinary memory.",
            )

    def signature(self) -> list[str]:
        """Every segment as a line, for ranks to compare.

        Raises:
            ConfigError: It is not frozen, or its memory has changed since.
        """
        if self._frozen is None:
            raise ConfigError(
                f"arena {self.name!r}: bind",
                found="it is not frozen",
                why="Ranks compare layouts before they register, so a layout has to be final.",
                fix="Call freeze when everything is allocated.",
            )
        now = self._backend.segments(self.pool)
        sizes, frozen = (tuple(size for _, size in found) for found in (now, self._frozen))
        if now != self._frozen:
            raise ConfigError(
                f"arena {self.name!r}: bind",
                found=f"segments of {sizes} bytes, frozen with {frozen}",
                why="What is registered has to be what the ranks have compared.",
                fix="Make and free no tensor of this pool after freeze.",
            )
        return [f"segment {i}: {num} bytes" for i, num in enumerate(frozen)]


def _has_memory(storage: torch.UntypedStorage | None) -> bool:
    return storage is not None and storage.nbytes() > 0
