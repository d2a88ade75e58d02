"""Collectives that are left when a rank fails: errors of the operation itself, and one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import interruptible
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.errors import ClosedError, PeerError

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
