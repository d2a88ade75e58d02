"""Collectives that are left when a rank fails, between ranks: forward, backward, sync and async.

The rank that is waited for joins each operation once the others have left it, so that everything
ends and nothing is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import interruptible
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.control.agreement import FailureFlag
from pcomm.core.errors import ClosedError, PeerError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

SMALL = 12
# Beyond the 256 KiB from which gathers and sums go through the queue of a gloo group.
LARGE = 3 * 40 * 1024
OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


def numbers(rank: int, length: int) -> Tensor:
    return ((torch.arange(length) * 7 + rank * 3) % 23).double()


def forward(operation: str, collectives: Collectives, x: Tensor) -> Tensor:
    result: Tensor = getattr(collectives, operation)(x)
    return result


def forward_async(operation: str, collectives: Collectives, x: Tensor) -> Tensor:
    result: Tensor = getattr(collectives, f"{operation}_async")(x).wait()
    return result


@ranks(3)
def test_results_and_gradients_are_those_of_the_collectives_within(rank: int) -> None:
    with open_groups(Topology({"dp": 3}), ["dp"]) as groups:
        plain = groups["dp"]
        other = groups.with_collectives(lambda g: interruptible(g.collectives, lambda: None))["dp"]
        for operation in OPERATIONS:
            for length in (SMALL, LARGE):
                x = numbers(rank, length)
                for call in (forward, forward_async):
                    expected = call(operation, plain.collectives, x)
                    assert_equal(call(operation, other.collectives, x), expected)
                    gradients = []
                    for group in (plain, other):
                        leaf = x.clone().requires_grad_()
                        result = call(operation, group.differentiable, leaf)
                        result.backward(numbers(rank + 1, len(result)))
                        assert leaf.grad is not None
                        gradients.append(leaf.grad)
                    assert_equal(gradients[1], gradients[0])
        x = numbers(rank, SMALL)
        assert other.collectives.all_reduce(x, out=x) is x
        assert_equal(x, numbers(0, SMALL) + numbers(1, SMALL) + numbers(2, SMALL))


@ranks(3)
def test_operations_in_flight_are_left_once_a_rank_has_failed(rank: int) -> None:
    with open_groups(Topology({"dp": 3}), ["dp"]) as groups:
        control = groups.control
        assert control is not None
        flag, store = FailureFlag(control, "work"), dist.distributed_c10d._get_default_store()
        turn, is_listening = 0, rank != 2

        def failure() -> str | None:
            # Asked only while the operation is in flight.
            store.set(f"turn {turn}: in flight on {rank}", "")
            return flag.heard(round_number=turn) if is_listening else None

        def others(word: str) -> list[str]:
            return [f"turn {turn}: {word} on {r}" for r in (0, 1)]

        group = groups.with_collectives(lambda g: interruptible(g.collectives, failure))["dp"]

        def assert_left(call: Callable[[], object]) -> None:
            """Make sure that ranks 0 and 1 leave `call`; it ends on rank 2, which is late."""
            nonlocal turn
            turn += 1
            if rank == 2:
                store.wait(others("in flight"))
                flag.sound("out of paper", round_number=turn)
                store.wait(others("left"))
                call()
                return
            with pytest.raises(PeerError, match="rank 2: out of paper"):
                call()
            store.set(f"turn {turn}: left on {rank}", "")

        lengths = {"all_gather": 3 * SMALL, "reduce_scatter": SMALL // 3}
        for operation in OPERATIONS:
            # What a broadcast waits for is its source, which is late.
            options = {"source": 2} if operation == "broadcast" else {}
            start = getattr(group.collectives, f"{operation}_async")
            for length in (SMALL, LARGE):
                x = numbers(rank, length)
                assert_left(lambda: getattr(group.collectives, operation)(x, **options))  # noqa: B023
                assert_left(lambda: start(x, **options).wait())  # noqa: B023
            leaf = numbers(rank, SMALL).requires_grad_()
            assert_left(lambda: getattr(group.differentiable, operation)(leaf, **options))  # noqa: B023
            if rank == 2:
                assert_left(lambda: start(numbers(2, SMALL), **options).wait())  # noqa: B023
            else:
                pending = start(numbers(rank, SMALL), **options)
                assert_left(pending.wait)
                # The rank that was late has joined, or will soon.
                is_listening = False
                assert len(pending.wait()) == lengths.get(operation, SMALL)
                is_listening = True
            control.agree("test: next")
            # A forward that all join, and a backward that rank 2 joins late.
            turn += 1
            result = getattr(group.differentiable, operation)(leaf, **options)
            assert_left(lambda: result.sum().backward())  # noqa: B023
            control.agree("test: next")


X = torch.ones(3)


class Broken(Collectives):
    """Raises `error`, when an operation is started or when it is waited for."""

    rank, size = 0, 2

    def __init__(self, error: Exception, *, at_start: bool) -> None:
        self.error, self.at_start = error, at_start

    def run(self, call: Call) -> Tensor:
        raise AssertionError("a blocking call cannot be left")

    def start(self, call: Call) -> Pending:
        if self.at_start:
            raise self.error
        return Pending(self._fail, Pending.ready(X))

    def _fail(self) -> Tensor:
        raise self.error


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_operation_that_a_failure_broke_tells_the_failure(
    at_start: bool, is_async: bool
) -> None:
    def attempt(error: Exception, message: str | None) -> None:
        collectives = interruptible(Broken(error, at_start=at_start), lambda: message)
        if is_async:
            collectives.all_reduce_async(X).wait()
        else:
            collectives.all_reduce(X)

    torn = RuntimeError("Connection closed by peer")
    with pytest.raises(PeerError, match="rank 1 was killed") as caught:
        attempt(torn, "rank 1 was killed")
    assert caught.value.__cause__ is torn
    # Without a failure, and of another kind: as it is.
    with pytest.raises(RuntimeError, match="closed by peer"):
        attempt(torn, None)
    closed = ClosedError("x", found="closed", why="it was", fix="open it")
    with pytest.raises(ClosedError):
        attempt(closed, "rank 1 was killed")


def test_one_rank_is_left_as_it_is() -> None:
    def failure() -> str | None:
        raise AssertionError("nothing to wait for")

    identity = IdentityCollectives()
    assert interruptible(identity, failure) is identity
