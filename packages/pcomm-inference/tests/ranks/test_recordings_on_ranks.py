"""Ranks that share a model record its steps together, or all of them run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pcomm.core import Topology, open_groups
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.testing.on_ranks import ranks
from pcomm.inference.engine import runner
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.model import KVSpec
from pcomm.inference.sampling.params import SamplingParams

VOCABULARY = 13


class Recordings(InstrumentedCollectives):
    """Notes how the blocks of recordings end, and which operations a sequence has."""

    def __init__(self, group):
        super().__init__(group.collectives)
        self.ends, self.eager, self.is_in_sequence = [], [], False

    @contextmanager
    def sequence(self):
        assert not self.is_in_sequence
        self.is_in_sequence = True
        with super().sequence():
            yield
        self.is_in_sequence = False

    def run(self, call):
        if call.x.dtype is torch.float64:
            self.eager.append(self.is_in_sequence)
        return super().run(call)

    @contextmanager
    def recording(self):
        with super().recording():
            try:
                yield
            except Exception:
                self.ends.append("given up")
                raise
            self.ends.append("kept")


class Shared:
    """Each rank holds a part of a sum that depends on the token and its place."""

    def __init__(self, group):
        self.group = group

    def memory_specs(self):
        return [KVSpec(heads=1, head_dim=1, dtype=torch.float32)]

    def step(self, batch, memory):
        tokens = batch.tokens_T[batch.logits_rows].double()
        ids = torch.arange(VOCABULARY, dtype=torch.float64)
        mine = (tokens[:, None] + self.group.rank + 1) * (2 * ids + 3) * 7919 % 10_007
        return self.group.collectives.all_reduce(mine)


class Fails:
    """A fake recorder that fails once on one rank, at one place, for steps of several requests."""

    def __init__(self, place: str) -> None:
        self.place, self.num_recorded = place, 0

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        body()
        self._fail_at("warm-up")

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self._fail_at("capture")
        # What a graph does: nothing runs yet.
        result = torch.zeros(0, dtype=torch.float64)

        def replay() -> None:
            result.set_(body())  # type: ignore[no-untyped-call]

        self.num_recorded += 1
        return result, replay

    def _fail_at(self, place: str) -> None:
        if place == self.place and self.num_recorded:
            raise MemoryError(f"out of memory in the {place}")


def run(recorder, group, *, at_once=False):
    with patch.object(runner, "recorder_for", lambda device: recorder):
        sizes = {"max_model_len": 30, "num_blocks": 20, "num_state_slots": 6, "max_requests": 4}
        engine = Engine(Shared(group), vocabulary=VOCABULARY, group=group, **sizes)
    if at_once:
        engine.record_graphs()
    found, errors = {}, []
    for number in range(3):
        params = SamplingParams(temperature=0, max_tokens=3 + 3 * number)
        engine.add(Request(str(number), (number + 1, 5), params))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        errors += [engine.step_error] if engine.step_error else []
    stats = engine.stats()
    engine.close()
    return found, stats.graph_sizes, stats.graph_refusal, errors


@ranks(2)
@pytest.mark.parametrize("place", ["warm-up", "capture"])
def test_a_recording_that_fails_on_one_rank_is_refused_on_all(rank: int, place: str) -> None:
    with open_groups(Topology({"tp": 2}), ["tp"], collectives=Recordings) as groups:
        group = groups["tp"]
        expected = run(None, group)[0]
        # A step that runs eagerly is one sequence of operations.
        assert group.collectives.eager
        assert all(group.collectives.eager)
        group.collectives.eager.clear()
        whole, sizes, refusal, errors = run(Fails("never"), group)
        assert (whole, sizes, refusal, errors) == (expected, (1, 2, 4), "", [])
        assert group.collectives.ends == 3 * ["kept"]
        assert run(Fails("never"), group, at_once=True) == (expected, (1, 2, 4), "", [])
        assert group.collectives.ends == 6 * ["kept"]
        # Prompts run eagerly; a warm-up and what a replay does are no part of a sequence.
        assert set(group.collectives.eager) == {False, True}
        group.collectives.ends.clear()

        # The first size is recorded on both ranks; the second one fails on rank 1.
        found, sizes, refusal, errors = run(Fails(place if rank == 1 else "never"), group)
        # None was lost: after the warm-up the step was computed again.
        assert found == expected
        assert sizes == (4,)
        message = f"out of memory in the {place}"
        assert message in refusal
        if place == "capture":
            assert refusal == f"rank 1: MemoryError: {message}"
            assert errors == []
            assert group.collectives.ends == ["kept", "given up"]
        else:
            # Ranks may be at different collectives: as after any step that failed on one of them.
            (error,) = errors
            assert type(error).__name__ == ("MemoryError" if rank == 1 else "PeerError")
            assert group.collectives.ends == ["kept"]
