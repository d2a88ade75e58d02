"""A resilient step counted on one process, beside the same step of a session of real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from integration_support.short_runs import prepare_words, tiny_config
from integration_support.spied_run import spied_rank
from pcomm.core.process import ResilientRanks
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import CheckpointConfig, ParallelConfig
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.forecast.resilient_step import count_resilient_step, state_bytes
from pcomm.integration.train.loop import batches_of
from pcomm.ntp.planning import Survival

SIZES = {"width": 32, "mlp_width": 96, "layers": 2}
TRAIN = {"steps": 2, "sequence_length": 64, "global_batch_tokens": 1536, "eval_every": "none"}
CASES = {
    "replicas": (ParallelConfig(dp=2), Survival(2, 2)),
    "one copy": (ParallelConfig(dp=3, data="shard", copies=1), Survival(1, 1)),
    "two copies": (ParallelConfig(dp=3, data="shard"), Survival(2, 2)),
    "two copies with tp": (ParallelConfig(dp=2, tp=2, data="shard"), Survival(2, 2)),
}


SHORT = ("two copies with tp",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in SHORT else [pytest.mark.soak]) for case in CASES],
)
def test_memory_and_traffic_are_those_of_a_session(tmp_path, case):
    parallel, survival = CASES[case]
    config = tiny_config(parallel, model=SIZES, **TRAIN)
    config = replace(config, checkpoint=CheckpointConfig(every="end"))
    run_dir = prepare_words(tmp_path, documents=20, shortest=60)
    ranks = int(parallel.dp) * parallel.tp
    with ResilientRanks(ranks, preload=["integration_support.spied_run"]) as processes:
        processes.start(spied_rank, (config, run_dir))
        reports = processes.wait(timeout_s=scaled_s(PATIENCE_S))
    assert all(report.has_finished for report in reports.values()), reports
    resolved = validate_resilient(config, ranks)
    batches = batches_of(resolved, open_prepared(run_dir))
    counted = count_resilient_step(resolved, batches, ranks_per_host=1)
    seen = reports[0].result
    assert counted.survival == survival
    memory = counted.step.memory
    assert (memory.weights, memory.optimizer) == (seen.weights, seen.optimizer)
    # Beside that there is the count of steps of each parameter.
    *whole, optimizer = state_bytes(resolved)
    assert whole == [memory.weights, memory.all_gradients]
    assert 0 <= memory.optimizer - optimizer < 200
    sent = counted.step.sent()
    assert {key: num for key, num in seen.sent.items() if key in sent and num} == {
        key: num for key, num in sent.items() if num
    }
    assert (counted.weight_bytes > 0) == (parallel.data == "shard")
