"""Operations of a counted step done again: each is the one that was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from integration_support.short_runs import tiny_config
from pcomm.integration.config.rules import validate
from pcomm.integration.forecast.counted_step import Computed, count_step
from pcomm.integration.forecast.dry_run import synthetic_batches
from pcomm.integration.forecast.machine import Machine, predict_step
from pcomm.integration.forecast.replay import Replay, share_of_cores, threads_of_rank

MODEL = {"pattern": "AGM", "layers": 3, "experts": 4, "moe_every": 3}
MACHINE = Machine(
    memory_gib=1.0,
    fp32_tflops=0.1,
    bf16_tflops=0.1,
    memory_gb_per_s=1.0,
    link_gb_per_s=1.0,
    network_gb_per_s=1.0,
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_operation_can_be_done_again(dtype):
    """The bytes that it reads and writes are those of its real tensors."""
    few = {"sequence_length": 32, "global_batch_tokens": 32, "recompute": dtype == "fp32"}
    config = validate(tiny_config(model=MODEL, dtype=dtype, **few), 1)
    step = count_step(config, synthetic_batches(config))
    computed = {one.call: one for one in step.events if isinstance(one, Computed)}
    assert any(str(call.function) == "aten._fused_adamw_.default" for call in computed)
    for call, one in computed.items():
        args, kwargs = call.arguments()
        with torch.no_grad():
            result = call.function(*args, **kwargs)
        given, made = (
            [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
            for tree in ((args, kwargs), result)
        )
        assert sum(x.nbytes for x in (*given, *(made or given))) == one.num_bytes, call.function


def test_what_is_not_timed_is_as_far_off_as_what_is(monkeypatch):
    """By hand: what was timed took three times what was expected, and so does the rest."""
    config = validate(tiny_config(model={"layers": 1}), 1)
    step = count_step(config, synthetic_batches(config))
    plain = predict_step(step, MACHINE, 1).seconds
    assert predict_step(step, MACHINE, 1, Replay(1, limit_s=0.0)).seconds == pytest.approx(plain)
    expected = {one.call: MACHINE.seconds(one) for one in step.events if isinstance(one, Computed)}
    replay = Replay(1, limit_s=1e6)
    asked = []

    def seconds(call):
        asked.append(call)
        if len(asked) > 5:
            raise RuntimeError("asks for values")
        return 3 * expected[call]

    monkeypatch.setattr(replay, "_seconds", seconds)
    assert predict_step(step, MACHINE, 1, replay).seconds == pytest.approx(3 * plain)
    assert set(asked) == set(expected)


def test_sending_takes_the_processor_where_it_has_to():
    config = validate(tiny_config(model={"layers": 1}), 2)
    step = count_step(config, synthetic_batches(config))
    by_socket = replace(MACHINE, socket_gb_per_s=0.001)
    more, less = (predict_step(step, one, 2).computing_s for one in (by_socket, MACHINE))
    assert more - less == pytest.approx(sum(step.sent().values()) / 1e6)


def test_ranks_that_outnumber_cores_wait_for_each_other(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [share_of_cores(n) for n in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 0.5]
    before = torch.get_num_threads()
    for ranks, threads in ((1, 4), (8, 1)):
        with threads_of_rank(ranks):
            assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
