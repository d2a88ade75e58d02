"""Texts and profiles that a run writes while it trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from integration_support.short_runs import (
    open_trainer,
    run_words,
    tiny_config,
    write_words,
)
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.inference import SamplingParams
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.llm import LLM
from pcomm.integration.train.samples import continue_prompts, write_samples
from pcomm.integration.train.speed import StepProfile

PROMPTS = ["word1", "word3 word5 word7"]
WRITES = (
    f"sample.prompts={PROMPTS}",
    "sample.prompt='word1'",
    "sample.max_tokens=9",
    # So large that each token decides those that follow.
    "model.init_std=0.3",
)
WAYS = {
    "replicas": ParallelConfig(dp=2),
    "shards": ParallelConfig(dp=2, data="shard"),
    "tensor and sequence parallel": ParallelConfig(tp=2, sequence=True),
    "context parallel": ParallelConfig(cp=2),
    "experts": ParallelConfig(dp=2, ep=2),
}


def writing_config(parallel: ParallelConfig | None = None, *overrides: str, **model: Any) -> Config:
    config = tiny_config(parallel, model=model)
    return apply_overrides(config, [*WRITES, "sample.temperature=1.5", *overrides])


def texts_of(config: Config, run_dir: Path) -> dict[str, str]:
    tokenizer = open_prepared(run_dir).tokenizer
    with open_trainer(config, run_dir, torch.float64) as trainer:
        return continue_prompts(trainer.model, trainer.groups, trainer.config, tokenizer)


def model_of(way: str) -> dict[str, Any]:
    return {"experts": 4, "expert_width": 32} if way == "experts" else {"pattern": "GA"}


@pytest.fixture(scope="module")
def alone(run_dir: Path) -> dict[str, dict[str, str]]:
    """Texts of one process, drawn in fp64."""
    return {way: texts_of(writing_config(**model_of(way)), run_dir) for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_two_ranks_write_what_one_writes(rank, way, run_dir, alone):
    expected = alone[way]
    assert list(expected) == PROMPTS
    assert len({*expected.values()}) == 2
    assert texts_of(writing_config(WAYS[way], **model_of(way)), run_dir) == expected


@ranks(3)
def test_so_do_replicas_of_which_a_rank_is_missing(rank, run_dir, alone):
    failed = ParallelConfig(dp=2, tp=2, failed=("dp=0,tp=1",))
    assert texts_of(writing_config(failed, **model_of("replicas")), run_dir) == alone["replicas"]


def test_a_run_writes_what_its_model_writes_and_a_profile(tmp_path, caplog):
    text, run = write_words(tmp_path / "text"), tmp_path / "run"
    caplog.set_level("INFO", "pcomm.train")
    words = (*WRITES, "sample.temperature=0", "train.schedule=constant", "train.eval_every=2")
    more = ("train.sample_every=2", "train.profile_steps=[2, 3]", "train.micro_batch_tokens=128")
    run_words(text, run, *words, *more, "train.steps=5")
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (n, p) for n in (2, 4) for p in PROMPTS
    ]
    # The same weights, in the engine that serves.
    run_words(text, tmp_path / "shorter", *words, "train.steps=2")
    with LLM(tmp_path / "shorter", max_requests=1) as llm:
        greedy = SamplingParams(max_tokens=9, temperature=0)
        expected = [llm.generate([prompt], greedy)[0].text for prompt in PROMPTS]
    assert [row["text"] for row in rows[:2]] == expected
    assert f"after step 2: 'word1' continues {expected[0]!r}" in caplog.text
    assert "(2 micro-batches a rank)" in caplog.text
    (trace,) = (run / "profile").iterdir()
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    spans = {name: names.count(name) for name in ("data", "forward", "backward", "optimizer")}
    # torch may tell of a range on the CPU in more than one row.
    assert spans["data"] == spans["forward"] == spans["backward"] == 2 * spans["optimizer"] > 0
    assert "evaluation" in names
    assert "profile from step 2 on in" in caplog.text


def test_a_run_that_goes_on_within_the_range_keeps_the_trace_of_its_first_part(tmp_path):
    for steps in ((1, 2, 3), (4, 5, 6)):
        profile = StepProfile((2, 5), tmp_path, 0, torch.device("cpu"))
        for step in steps:
            profile.begin(step)
            with record_function(f"step {step}"):
                pass
            profile.end(step)
        profile.end()
    spans = {
        file.name: sorted(set(re.findall(r'"step (\d)"', file.read_text())))
        for file in tmp_path.iterdir()
    }
    assert spans == {"rank0.json": ["2", "3"], "rank0.from-step4.json": ["4", "5"]}


def test_rows_of_an_attempt_before_go(tmp_path, caplog):
    for step in (2, 4, 6, 4):
        write_samples(tmp_path, step, {"a": f"b{step}"})
    file = tmp_path / "samples.jsonl"
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [2, 4]
    file.write_text("no row\n")
    write_samples(tmp_path, 8, {"a": "b"})
    assert "no samples of step 8" in caplog.text
    assert file.read_text() == "no row\n"


@pytest.mark.parametrize("steps", [[3, 2], [1, 11]])
def test_a_range_that_the_run_does_not_have_is_refused(steps):
    config = apply_overrides(tiny_config(), ["train.steps=10", f"train.profile_steps={steps}"])
    with pytest.raises(ConfigError, match=re.escape(f"the value {steps} with train.steps = 10")):
        validate(config, 1)


def test_a_resilient_run_has_no_profile():
    config = apply_overrides(tiny_config(), ["train.profile_steps=[1, 2]"])
    with pytest.raises(UnsupportedError, match=r"train\.profile_steps"):
        validate_resilient(config, 2)
