"""Any sequence of calls on a registry against a model that is a set of pairs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pcomm.core.errors import ConfigError, PcommError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import FakePools
from pcomm.core.memory.pools import PoolRegistry

ROLES = ("gather", "reduce", "outer")
GROUPS = [Group("dp", (0,), None, role=role) for role in ROLES]
CONTROL = Group("dp", (0,), None, role="control")

roles = st.sampled_from(ROLES)


class Registrations(RuleBasedStateMachine):
    """The model: which arenas are frozen, with how many segments, and which pairs are bound."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = FakePools()
        self.groups = Groups(GROUPS)
        self.registry = PoolRegistry(self.groups, CONTROL, self.backend)
        for group in GROUPS[:2]:
            self.backend.communicator(group)
        # Two keys that share a communicator: whatever is bound to one is bound to the other.
        self.backend.communicators["dp[outer]"] = self.backend.communicators["dp[gather]"]
        self.num_segments = dict.fromkeys(ROLES, 0)
        self.frozen: set[str] = set()
        self.bound: list[tuple[str, str]] = []

    @rule(role=roles)
    def allocate(self, role: str) -> None:
        arena = self.registry.arena(role)
        if role in self.frozen:
            with pytest.raises(ConfigError):
                arena.allocating()
            return
        with arena.allocating() as pool:
            pool.allocate(64)
        self.num_segments[role] += 1

    @rule(role=roles)
    def freeze(self, role: str) -> None:
        arena = self.registry.arena(role)
        if not self.num_segments[role]:
            with pytest.raises(ConfigError):
                arena.freeze()
            return
        arena.freeze()
        self.frozen.add(role)

    @rule(role=roles, chosen=st.lists(st.sampled_from(GROUPS), max_size=4), data=st.data())
    def bind(self, role: str, chosen: list[Group], data: Any) -> None:
        arena = self.registry.arena(role)
        wanted = sorted(g.key for g in chosen)
        names = dict.fromkeys(self.backend.communicators[key].name for key in wanted)
        new = [name for name in names if (role, name) not in self.bound]
        refusing = data.draw(st.sampled_from(["", *new]), label="refusing")
        if refusing and role in self.frozen:
            at = data.draw(st.integers(0, self.num_segments[role] - 1), label="at")
            communicator = self.backend.communicators[refusing]
            communicator.refused = {list(arena.pool.segments)[at]}
            with pytest.raises(UnsupportedError):
                self.registry.bind(arena, chosen, across_roles=True)
            communicator.refused = ()
        elif role in self.frozen:
            self.registry.bind(arena, chosen, across_roles=True)
            self.bound += [(role, name) for name in new]
        else:
            with pytest.raises(ConfigError):
                self.registry.bind(arena, chosen, across_roles=True)

    @rule(role=roles)
    def unbind(self, role: str) -> None:
        mine = [pair for pair in self.bound if pair[0] == role]
        if not mine:
            with pytest.raises(PcommError):
                self.registry.unbind(self.registry.arena(role))
            return
        self.registry.unbind(self.registry.arena(role))
        self.bound = [pair for pair in self.bound if pair[0] != role]

    @invariant()
    def what_is_registered_is_what_the_model_holds(self) -> None:
        expected = sorted(
            (name, address)
            for role, name in self.bound
            for address in self.registry.arena(role).pool.segments
        )
        assert sorted(self.backend.registered()) == expected
        found = [(b.arena.role, b.communicator.uid) for b in self.registry.bindings]
        assert found == self.bound

    def teardown(self) -> None:
        before = len(self.backend.log)
        numbers = {role: self.registry.arena(role).pool.number for role in ROLES}
        self.groups.close()
        undone = [f"deregister {numbers[role]} {name}" for role, name in reversed(self.bound)]
        assert self.backend.log[before:] == undone
        assert list(self.backend.registered()) == []


TestRegistrations = Registrations.TestCase
TestRegistrations.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
