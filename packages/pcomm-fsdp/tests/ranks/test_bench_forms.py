"""Every form of `pcomm bench fsdp` on ranks: equal gradients, and what goes over which group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from torch import Tensor

from fsdp_bench.settings import FORMS, Widths
from fsdp_bench.trainings import BenchModel, Reference, make, run_step
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Call, Pending
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

ROLES = ("gather", "reduce", "other rail")
DEPTH = 4
# A shard of a layer of 512 is large enough to go between pairs, that of a block of 32 is not.
PROBLEMS = {"linear": Widths(512, DEPTH, 8), "transformer": Widths(32, DEPTH, 32)}


@pytest.mark.parametrize("name", PROBLEMS)
@ranks(2, leaves="torch keeps the mesh of FSDP2's parameters in a cache")
def test_every_form_has_the_gradients_of_one_process(rank: int, name: str) -> None:
    """In the second step, which replays what the first one recorded."""
    problem = BenchModel(name, PROBLEMS[name])
    with open_groups(Topology({"dp": 2}), ["dp", *(("dp", role) for role in ROLES)]) as groups:
        reference = Reference.of(problem, groups["dp"].collectives)
        own = {role: groups["dp", role] for role in ROLES}
        batch = problem.batch(rank)
        for form in FORMS:
            training = make(form, problem, own)
            for _ in range(2):
                training.forget_gradients()
                run_step(training, problem, batch)
            try:
                reference.check(training.whole_gradients())
            except AssertionError as difference:
                raise AssertionError(f"{form.name}: {difference}") from difference


class Log(InstrumentedCollectives):
    """Notes when operations begin and when they are waited for."""

    def __init__(self, group: Group, log: list[str]) -> None:
        super().__init__(group.collectives)
        self.role, self.log = group.role, log

    def run(self, call: Call) -> Tensor:
        """Note and pass on."""
        self.log.append(f"{call.operation} at once on {self.role}")
        return super().run(call)

    def start(self, call: Call) -> Pending:
        """Note and pass on."""
        word, pending = call.operation, super().start(call)
        self.log.append(f"{word} on {self.role}")

        def wait() -> Tensor:
            self.log.append(f"{word} ends")
            return pending.wait()

        return Pending(wait)


def logged(groups: Mapping[str, Group], log: list[str]) -> dict[str, Group]:
    return {role: group.with_collectives(Log(group, log)) for role, group in groups.items()}


def last_step(form_key: str, groups: Mapping[str, Group], rank: int) -> list[str]:
    """What a form sends in a step, once it knows its order."""
    problem = BenchModel("linear", PROBLEMS["linear"])
    log: list[str] = []
    form = next(form for form in FORMS if form.key == form_key)
    training = make(form, problem, logged(groups, log))
    for _ in range(2):
        log.clear()
        training.forget_gradients()
        run_step(training, problem, problem.batch(rank))
    gathers = sum(word.startswith("all_gather") and "ends" not in word for word in log)
    # What bounds and ideal bytes are computed from.
    assert gathers in (0, DEPTH + training.num_backward_gathers), form.name
    return log


GATHER, REDUCE = "all_gather on gather", "reduce_scatter on gather"
GATHERED, REDUCED = "all_gather ends", "reduce_scatter ends"


@ranks(2, leaves="torch keeps the mesh of FSDP2's parameters in a cache")
def test_forms_send_what_and_where_they_say(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), [("dp", role) for role in ROLES]) as opened:
        groups = {role: opened["dp", role] for role in ROLES}

        def found(key: str) -> list[str]:
            return last_step(key, groups, rank)

        # Torch's own collectives and those without pairs do not pass ours.
        assert found("fsdp2") == found("fsdp2-bytes") == found("ours-no-pairs") == []
        assert found("fsdp2-reduce") == [REDUCE, REDUCED] * DEPTH
        # It waits for each gather, as for torch's own on a CPU.
        blocking = found("fsdp2-gather")
        assert blocking.count("all_gather at once on gather") == 2 * DEPTH
        assert [word for word in blocking if word in (REDUCE, REDUCED)] == [REDUCE, REDUCED] * DEPTH

        ahead = found("fsdp2-ahead")
        # In forward the next unit is on its way before the one in use computes.
        assert ahead[:4] == [GATHER, GATHERED, GATHER, GATHERED]
        assert ahead.count(GATHER) == ahead.count(GATHERED) == 2 * DEPTH
        reduces = [i for i, word in enumerate(ahead) if word == REDUCE]
        assert [ahead[i + 1] for i in reduces] == [REDUCED] * DEPTH
        # In backward a gather is under way while a reduce is.
        assert under_way(ahead, reduces[0]) == {GATHER, REDUCE}

        overlap = found("fsdp2-overlap")
        reduces = [i for i, word in enumerate(overlap) if word == REDUCE]
        # Each is issued before the one before it is waited for, and the last one ends the step.
        assert overlap[reduces[0] + 1] != REDUCED
        assert [overlap[i + 1] for i in reduces[1:]] == [REDUCED] * (DEPTH - 1)
        assert overlap[-1] == REDUCED
        assert overlap.count(GATHER) == 2 * DEPTH

        for key, role in (("1-group", "gather"), ("2-groups", "reduce"), ("2-rails", "other rail")):
            for kind in ("fsdp2", "ours"):
                log = found(
                    f"{kind}-{key}" if (kind, role) != ("fsdp2", "gather") else "fsdp2-tuned"
                )
                assert log.count(GATHER) == 2 * DEPTH - 2, "two units are kept"
                # The first that was not kept is on its way before the first reduce is.
                before = log[: log.index(f"reduce_scatter on {role}")]
                assert before.count(GATHER) == DEPTH + 1
                assert log.count(f"reduce_scatter on {role}") == log.count(REDUCED) == DEPTH
        assert found("ours-no-prefetch").count(GATHER) == 2 * DEPTH - 1
        less = found("ours-less-memory")
        assert less.count(GATHER) == 2 * DEPTH - 2
        # Once a unit has ended, its gradients follow the gather of what computes next.
        backward = less[less.index("reduce_scatter on reduce") + 1 :]
        assert backward[:2] == [GATHER, "reduce_scatter on reduce"]


def under_way(log: list[str], place: int) -> set[str]:
    """What has begun and not ended after an entry."""
    counts = Counter(log[: place + 1])
    ends = {GATHER: GATHERED, REDUCE: REDUCED}
    return {begin for begin, end in ends.items() if counts[begin] > counts[end]}
