"""The line that a command ends with, and its fields."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from inference_support.toy_model import ToyModel
from pcomm.core.errors import PeerError
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.engine import EngineStats
from pcomm.inference.roofline import BandwidthMeter, MemoryBandwidth
from pcomm.integration.commands.llm_options import RunSummary, print_summary
from pcomm.integration.llm import LLM


def slow_memory(num_bytes: int, device: torch.device) -> MemoryBandwidth:
    return MemoryBandwidth(copy=1.0, sum=1e6, matrix_vector=2.0)


def stats_after(num_steps: int) -> EngineStats:
    meter = BandwidthMeter(slow_memory)
    meter.bandwidth(torch.device("cpu"), 0)
    engine = Engine(
        ToyModel(), vocabulary=11, max_model_len=16, num_blocks=4, num_state_slots=2, meter=meter
    )
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True)))
    for _ in range(num_steps):
        engine.step()
    return engine.stats()


def llm_of(stats: Any) -> LLM:
    return cast(LLM, SimpleNamespace(stats=stats))


def test_a_text_of_one_token_has_no_step_of_decoding():
    summary = RunSummary(1, 0.25, stats_after(1))
    assert str(summary) == "1 token, 4.0 tokens/s"
    assert summary.with_stats().startswith("1 token, 4.0 tokens/s; host: schedule ")
    assert summary.fields()["decode"] is None


def test_the_line_and_the_fields_say_the_same():
    summary = RunSummary(3, 1.5, stats_after(3))
    tokens, step, host = summary.with_stats().split("; ")
    assert tokens == str(summary) == "3 tokens, 2.0 tokens/s"
    # The first of two steps reads 3 tokens and writes one, of 16 bytes each; a state of 24 bytes is
    # read and written, and 11 logits are written.
    total = (3 + 1) * 16 + 2 * 24 + 11 * 8
    assert step.partition(", ratio ")[0].endswith(f"floor {total} us ({total} B at 1 MB/s)")
    assert host.startswith("host: schedule ")
    found = json.loads(json.dumps(summary.fields()))
    assert found["seconds"] == 1.5
    assert found["decode"]["moved"] == {
        "weights": 0, "keys_values": 64, "states": 48, "logits": 88, "total": total,
    }  # fmt: skip
    assert found["decode"]["floor_ms"] == pytest.approx(total / 1e3)
    assert found["decode"]["ratio"] == pytest.approx(total / 1e3 / found["decode"]["step_ms"])
    assert list(found["host_us"]) == ["schedule", "batch", "model", "sample", "outputs"]


def test_nothing_is_said_without_a_text_or_by_an_engine_that_has_failed(capsys):
    def failed() -> EngineStats:
        raise PeerError("stats", found="a rank that died", why="It is gone.", fix="Start again.")

    for stats in (lambda: stats_after(0), failed):
        print_summary(llm_of(stats), Namespace(stats=True))
    assert capsys.readouterr().err == ""
    print_summary(llm_of(lambda: stats_after(2)), Namespace(stats=True))
    assert capsys.readouterr().err.startswith("2 tokens; a decode step ")
    print_summary(llm_of(lambda: stats_after(2)), Namespace(stats=False), 0.5)
    assert capsys.readouterr().err == "2 tokens, 4.0 tokens/s\n"
